"""FLUX.2: the transformer (config, layers, blocks, transformer, inputs), the autoencoder, sampling, loading and key maps.

Other folders reach it through `architecture.FLUX2` alone, the record that its families name. It imports `stages.models` only.
"""
