"""The stage train: the rows to train on, the samples of each step, the loss and the memory plan.

The runner calls `stage.py`; the training loop in `stages.tuner` uses `task.py`. A file here imports
`stages.tuner`, `stages.models.family` and `schemas`, but no other stage.
"""

from stages.text_to_image.train.stage import STAGE

__all__ = ["STAGE"]
