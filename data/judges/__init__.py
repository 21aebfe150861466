"""What `make evaluate` scores pictures with: stored weights and sentence embeddings, and the scripts that made them."""
