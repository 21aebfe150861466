"""The stage `descriptions`: captions by a vision-language model, for images that have none."""

from stages.text_to_image.descriptions.stage import STAGE

__all__ = ["STAGE"]
