"""FLUX 3 Image's entry in the table of architectures. Code outside this folder imports this file only."""

import functools

from stages.models import adapter_files
from stages.models.family import Architecture
from stages.models.flux2 import autoencoder
from stages.models.flux3 import load, random_weights, transformer
from stages.models.layers import tokens
from stages.models.sampling import PIXELS, TOGETHER, shifted
from stages.models.text.encoder import TextEncoder, is_text_encoder, text_encoder_sizes

FLUX3 = Architecture(
    pixels_per_token=PIXELS,
    transformer_class=transformer.TRANSFORMER_CLASS,
    tag="flux.3",
    readers=(),  # mflux may read them; nobody has tried
    transformer_config=load.transformer_config,
    load_transformer=load.load_transformer,
    build_transformer=transformer.Flux3,
    in_block=transformer.in_block,
    packs_outside=transformer.packs_outside,
    outside_bits=transformer.OUTSIDE_BITS,
    tokens=tokens,
    text_rows=transformer.text_rows,
    inputs=transformer.inputs,
    load_autoencoder=autoencoder.load_autoencoder,
    load_text_encoder=TextEncoder,
    text_encoder_sizes=text_encoder_sizes,
    autoencoder_memory=autoencoder.memory,
    sigmas=functools.partial(shifted, shift=transformer.SHIFT),
    guided_together=TOGETHER,
    read_adapter=functools.partial(adapter_files.read, names=load.NAMES),
    adapter_styles={
        "diffusers": adapter_files.to_diffusers,
        "comfyui": functools.partial(adapter_files.to_comfyui, theirs=load.MAKERS),
    },
    write_random_weights=random_weights.write_random_weights,
    is_transformer=load.is_transformer,
    is_autoencoder=autoencoder.is_autoencoder,
    is_text_encoder=is_text_encoder,
    modular=True,
)
