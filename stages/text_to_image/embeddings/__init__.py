"""The stage `embeddings`, and what only it uses: its settings, and how much memory the text encoder takes (memory_plan).

Imports `stages.models.family`, `stages.tuner`, `stages.stage` and `schemas`, and no other stage.
"""

from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.embeddings.stage import STAGE

__all__ = ["STAGE", "EmbeddingsConfig"]
