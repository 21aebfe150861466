"""Model architectures in MLX: arrays in, arrays out. There is one folder per architecture.

All architectures share the other files. `family` is the record through which stages and commands reach an architecture.
`protocols` says what it returns. `folders` finds a model's files. `weights` reads them strictly. `adapters` knows an adapter's
arrays. Nothing here imports a stage, the tuner, a schema or the table of families.
"""
