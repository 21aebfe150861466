"""The stage `embeddings`: every distinct text, encoded once by the text encoder."""

from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.embeddings.stage import STAGE

__all__ = ["STAGE", "EmbeddingsConfig"]
