"""Architectures in MLX: arrays in, arrays out; one file per architecture."""
