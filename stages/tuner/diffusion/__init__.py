"""What the tuner knows of diffusion: which noise levels are trained, how a prediction's error is measured and weighted."""
