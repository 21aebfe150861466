"""The scripts that trained `retriever-micro` with PyTorch; README.md one folder up lists them.

They import torch, tokenizers and transformers. The program does not need them.
"""
