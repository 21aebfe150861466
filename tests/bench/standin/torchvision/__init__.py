"""Stands in for torchvision where it is not installed: the few functions of it that diffusers' training script calls."""
