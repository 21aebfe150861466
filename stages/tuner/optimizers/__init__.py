"""Optimizers: pure functions over flat dicts of float32 arrays, one file per method."""
