"""The stage `scores`, and what only it uses: reading references, image and text encoders, the style axis, the agreement
map.

Imports `stages.text_to_image.imaging`, `stages.models.vision`, `stages.stage` and `schemas`, and no other stage.
"""

from stages.text_to_image.scores.stage import STAGE

__all__ = ["STAGE"]
