"""The scripts that trained `micro` with PyTorch and diffusers, and that made data/projects/example; README.md one folder up
lists them.

They import torch, diffusers and stages. The program does not need them.
"""
