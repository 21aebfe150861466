"""The stage `latents`: every crop, encoded once by the autoencoder."""

from stages.text_to_image.latents.stage import STAGE

__all__ = ["STAGE"]
