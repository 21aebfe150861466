"""What any training of adapters needs: the loop, its task as a protocol, checkpoints, memory plans, and folders by concern.

`loop.py` runs a task (`task.py`): it owns order, micro-batches, clipping, optimizer, averages, checkpoints, resuming and health.
`adapters/`, `optimizers/` and `blockwise/` serve any task, `diffusion/` those that predict noise. Nothing here imports a stage, a
model or a schema; `stages.settings` and `stages.hashing` are allowed.
"""
