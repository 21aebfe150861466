"""Model architectures in MLX: arrays in, arrays out. One folder per architecture, and what all architectures share.

`family` is the record through which stages and commands reach an architecture, and `protocols` what it returns; `folders` finds
a model's files, `weights` reads them strictly, `adapters` knows an adapter's arrays. Nothing here imports a stage, the tuner, a
schema or the table of families.
"""
