"""T5's encoder with a projection head: token vectors of queries and documents for late interaction.

The names of the encoder's weights are those of transformers' `T5EncoderModel`. Imports `stages.models.weights`, no stage.
"""
