"""The stage `latents`: every crop, encoded once by the autoencoder.

`stage.py` holds the settings and the stage's functions, `mask_ids.py` says which mask each image has, `crop.py` decodes the
images, cuts the crops and resizes them, `encode.py` runs the autoencoder. Which crops there are is decided in `buckets.py`.
Nothing outside this folder imports more than STAGE; the folder imports `imaging`, the contracts in `stages` and `schemas`,
and reaches the autoencoder through the family record.
"""

from stages.text_to_image.latents.stage import STAGE

__all__ = ["STAGE"]
