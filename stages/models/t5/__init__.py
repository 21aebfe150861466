"""T5's encoder with a projection head, for late interaction. Weights have the names of transformers' `T5EncoderModel`."""
