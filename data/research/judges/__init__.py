"""The stored weights and sentence embeddings with which `make evaluate` scores pictures, and the scripts that made them."""
