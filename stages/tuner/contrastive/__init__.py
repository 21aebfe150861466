"""Contrastive training: the scores and losses of late interaction, and batches too large for one graph."""
