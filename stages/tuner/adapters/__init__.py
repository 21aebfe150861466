"""Adapters of frozen Linears: which Linears get one, how it starts, what it adds, and how it is merged into the weights.

`targets` selects the Linears. `initial` makes the arrays before the first step. `lora`, `dora` and `lokr` compute the three
variants on top of `product`. `merge` folds an adapter into dense weights. `stacks` groups arrays of equal shape for the
optimizer. These files import each other, `stages.tuner.draws` and `stages.tuner.quantize`, and nothing else of ours.
"""
