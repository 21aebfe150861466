"""FLUX.2's entry in the table of architectures. Code outside this folder imports this file only."""

import functools

from stages.models import adapter_files
from stages.models.family import Architecture
from stages.models.flux2 import adapters, autoencoder, load, random_weights, sampling, transformer
from stages.models.layers import tokens
from stages.models.sampling import PIXELS, TOGETHER
from stages.models.text.encoder import TextEncoder, is_text_encoder, text_encoder_sizes

FLUX2 = Architecture(
    pixels_per_token=PIXELS,
    transformer_class=transformer.TRANSFORMER_CLASS,
    tag="flux.2",
    readers=("mflux", "Draw Things"),
    transformer_config=load.transformer_config,
    load_transformer=load.load_flux2,
    build_transformer=transformer.Flux2,
    in_block=transformer.in_block,
    packs_outside=transformer.packs_outside,
    outside_bits=transformer.OUTSIDE_BITS,
    tokens=tokens,
    text_rows=int,  # as many as the embedding has
    inputs=transformer.inputs,
    load_autoencoder=autoencoder.load_autoencoder,
    load_text_encoder=TextEncoder,
    text_encoder_sizes=text_encoder_sizes,
    autoencoder_memory=autoencoder.memory,
    sigmas=sampling.sigmas,
    guided_together=TOGETHER,
    read_adapter=functools.partial(adapter_files.read, names=adapters.NAMES),
    adapter_styles={"diffusers": adapter_files.to_diffusers, "comfyui": adapters.to_comfyui},
    write_random_weights=random_weights.write_random_weights,
    is_transformer=load.is_transformer,
    is_autoencoder=autoencoder.is_autoencoder,
    is_text_encoder=is_text_encoder,
)
