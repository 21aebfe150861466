"""Model architectures in MLX, one folder each: arrays in, arrays out. Nothing here imports a stage, the tuner or a schema."""
