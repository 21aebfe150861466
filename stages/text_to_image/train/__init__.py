"""The stage train: the rows to train on, the samples of each step, the loss and the memory plan."""

from stages.text_to_image.train.stage import STAGE as STAGE
