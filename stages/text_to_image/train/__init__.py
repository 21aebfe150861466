"""The stage train: which rows it trains on, what a step draws and reads, its loss, its memory plan.

`stage.py` is what the runner calls, `task.py` what the training loop in `stages.tuner` is given. A file here imports
`stages.tuner`, `stages.models.family` and `schemas`, but no other stage.
"""

from stages.text_to_image.train.stage import STAGE

__all__ = ["STAGE"]
