"""Z-Image: transformer, latents, names, loading, random weights. `architecture.py` says what code outside may use."""
