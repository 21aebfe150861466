"""The stage latents."""

from stages.text_to_image.latents.stage import STAGE

__all__ = ["STAGE"]
