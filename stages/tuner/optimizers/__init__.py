"""Optimizers: pure functions over flat dicts of float32 arrays, one file per method.

`protocol` says what an optimizer is and `methods` finds one by name. `step` makes a whole training step of it: gradient norm,
clipping, update. `ema` wraps an optimizer with a moving average; `moments` and `decay` are arithmetic that several methods
share. These files import each other, `adapters.stacks` and `blockwise.device`, and nothing else of ours.
"""
