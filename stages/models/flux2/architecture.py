"""FLUX.2's entry in the table of architectures. Code outside this folder imports this file only."""

from stages.models.family import Architecture
from stages.models.flux2 import adapters, autoencoder_memory, load, random_weights, sampling, transformer
from stages.models.text.encoder import TextEncoder, text_encoder_sizes

FLUX2 = Architecture(
    pixels_per_token=sampling.PIXELS,
    transformer_class=transformer.TRANSFORMER_CLASS,
    transformer_config=load.transformer_config,
    load_transformer=load.load_flux2,
    build_transformer=transformer.Flux2,
    in_block=transformer.in_block,
    packs_outside=transformer.packs_outside,
    outside_bits=transformer.OUTSIDE_BITS,
    tokens=transformer.tokens,
    inputs=transformer.inputs,
    zero_inputs=transformer.zero_inputs,
    load_autoencoder=load.load_autoencoder,
    load_text_encoder=TextEncoder,
    text_encoder_sizes=text_encoder_sizes,
    autoencoder_memory=autoencoder_memory.autoencoder_memory,
    sigmas=sampling.sigmas,
    draw=sampling.draw,
    guided_together=sampling.TOGETHER,
    read_adapter=adapters.read_adapter,
    adapter_styles={"diffusers": adapters.to_diffusers, "comfyui": adapters.to_comfyui},
    write_random_weights=random_weights.write_random_weights,
    recognise=load.recognise,
)
