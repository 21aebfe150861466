"""FLUX.2's entry in the table of architectures. Code outside this folder imports this file only."""

from stages.models.family import Architecture
from stages.models.flux2 import (
    adapter_reader,
    adapter_writer,
    autoencoder_memory,
    config,
    load,
    random_weights,
    recognise,
    sampling,
    transformer,
)
from stages.models.flux2 import inputs as model_inputs
from stages.models.text.encoder import TextEncoder, text_encoder_sizes

FLUX2 = Architecture(
    pixels_per_token=sampling.PIXELS,
    transformer_class=config.TRANSFORMER_CLASS,
    transformer_config=load.transformer_config,
    load_transformer=load.load_flux2,
    build_transformer=transformer.Flux2,
    meta_transformer=transformer.meta_transformer,
    in_block=config.in_block,
    packs_outside=config.packs_outside,
    outside_bits=config.OUTSIDE_BITS,
    tokens=model_inputs.tokens,
    inputs=model_inputs.inputs,
    zero_inputs=model_inputs.zero_inputs,
    load_autoencoder=load.load_autoencoder,
    load_text_encoder=TextEncoder,
    text_encoder_sizes=text_encoder_sizes,
    autoencoder_bytes=autoencoder_memory.autoencoder_bytes,
    sigmas=sampling.sigmas,
    draw=sampling.draw,
    guided_together=sampling.TOGETHER,
    read_adapter=adapter_reader.read_adapter,
    adapter_styles={"diffusers": adapter_writer.to_diffusers, "comfyui": adapter_writer.to_comfyui},
    write_random_weights=random_weights.write_random_weights,
    recognise=recognise.recognise,
)
