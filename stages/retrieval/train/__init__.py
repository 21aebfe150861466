"""The stage `train`: an adapter and the projection head of a retriever, trained on pairs of query and document.

`stage` declares it, `task` is what the training loop in `stages.tuner` runs, and each other file is one part of that task.
"""

from stages.retrieval.train.stage import STAGE

__all__ = ["STAGE"]
