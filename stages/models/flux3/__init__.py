"""FLUX 3 Image: transformer, names, loading, random weights. `architecture.py` says what code outside may use."""
