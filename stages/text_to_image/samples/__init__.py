"""The stage `samples`: which adapters draw, drawing, decoding, and the grid of all previews."""

from stages.text_to_image.samples.stage import STAGE as STAGE
