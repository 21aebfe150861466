"""Training with the memory of one block: gradients block by block, and how much memory they take.

`chain` says what is needed of a model. `backprop` computes gradients of a chain of blocks, `visit` reads weights from disk in
time, and `cores` divides a batch among the cores of a CPU. `device` holds the limits of the device, `planner` estimates a run's
memory before it starts, and `meter` measures it. These files import each other, `stages.blas`, `stages.kernels`,
`stages.tuner.adapters`, `stages.tuner.quantize` and `stages.tuner.stored`.
"""
