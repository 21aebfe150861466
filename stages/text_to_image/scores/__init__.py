"""The stage `scores`: previews compared with training images, references and texts."""

from stages.text_to_image.scores.stage import STAGE

__all__ = ["STAGE"]
