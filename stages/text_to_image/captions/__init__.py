"""The stage `captions`: the texts that images are trained with, and the texts that belong to no image."""

from stages.text_to_image.captions.stage import STAGE as STAGE
