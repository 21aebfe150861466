"""The stage `images`: the files in the image folder, one row each."""

from stages.text_to_image.images.stage import STAGE as STAGE
