"""Training with the memory of one block: gradients block by block, and how much memory they take."""
