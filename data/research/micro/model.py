"""The models of `micro`: their sizes, their initial weights, and their forward passes, written to be compiled block by block.

The modules are those of diffusers and transformers, so that saving them gives the layout of FLUX.2. Only the loops over
their blocks are written anew, because the original loops compute tables and collect outputs on every call.

In names: B batch, T text tokens, J text features (three hidden states), L image tokens, C packed latent channels (128),
D hidden, H W pixels, h w = H/16, W/16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

Rotary = tuple[Tensor, Tensor]

PIXELS = 16  # pixels along one side of an image token


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, named as in its config files."""

    transformer: dict[str, Any]
    autoencoder: dict[str, Any]
    text: dict[str, Any]
    text_layers: tuple[int, ...]
    text_tokens: int


MICRO = Sizes(
    transformer={
        "in_channels": 128,
        "num_layers": 2,
        "num_single_layers": 5,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "joint_attention_dim": 384,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (16, 16, 16, 16),
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
        "guidance_embeds": False,
    },
    autoencoder={
        "latent_channels": 32,
        "block_out_channels": (32, 64, 96, 96),
        "decoder_block_out_channels": (48, 80, 112, 112),  # edges are made here: a third of the bytes well spent
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 192,
    },
    # One layer more than hidden state 6 needs, as in the released models. In transformers the last hidden state is taken
    # after the final norm, which FLUX.2 does not use, so nothing reads the last layer.
    text={
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
    },
    text_layers=(2, 4, 6),
    text_tokens=48,
)


def make_autoencoder(sizes: Sizes) -> AutoencoderKLFlux2:
    """Make an autoencoder with random weights."""
    return AutoencoderKLFlux2(**sizes.autoencoder)


def make_transformer(sizes: Sizes) -> Flux2Transformer2DModel:
    """Make a transformer with random weights. Modulations and output layer are zero, so it first predicts 0."""
    model = Flux2Transformer2DModel(**sizes.transformer)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if "modulation" in name or name in ("norm_out.linear", "proj_out"):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
    return model


def make_text_encoder(sizes: Sizes) -> Qwen3ForCausalLM:
    """Make a text encoder with random weights. Layers above the last hidden state in use are zero."""
    settings = dict(sizes.text)
    theta = settings.pop("rope_theta")
    config = Qwen3Config(**settings, rope_parameters={"rope_type": "default", "rope_theta": theta})
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers[max(sizes.text_layers) :]:
        for weight in layer.parameters():
            nn.init.zeros_(weight)
    return model


def freeze_unread(model: Qwen3ForCausalLM, sizes: Sizes) -> None:
    """Freeze the weights that do not affect any hidden state in use. `sizes` says which hidden states are used."""
    for part in (*model.model.layers[max(sizes.text_layers) :], model.model.norm):
        part.requires_grad_(False)


def compile_blocks(transformer: Flux2Transformer2DModel, text_encoder: Qwen3ForCausalLM) -> None:
    """Compile the blocks of both models. Blocks of one kind share compiled code, which accepts any number of tokens, so
    compilation takes seconds.
    """
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        block.compile(dynamic=True)
    for layer in text_encoder.model.layers:
        layer.compile(dynamic=False)


# Text


def encode_text(model: Qwen3ForCausalLM, tokens_BT: Tensor, real_BT: Tensor, layers: Sequence[int]) -> Tensor:
    """Return some hidden states of a text encoder, concatenated, (B,T,J). `tokens_BT` holds token ids. `real_BT` is False
    for padding; no token attends to padding. `layers` lists the hidden states to return.
    """
    h_BTD = model.model.embed_tokens(tokens_BT)
    places_1T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
    causal_TT = places_1T <= places_1T.T
    seen_B1TT = causal_TT[None, None] & real_BT[:, None, None, :]
    turned = model.model.rotary_emb(h_BTD, places_1T)
    states = {0: h_BTD}
    for i, layer in enumerate(model.model.layers[: max(layers)]):
        h_BTD = layer(h_BTD, attention_mask=seen_B1TT, position_embeddings=turned)
        states[i + 1] = h_BTD
    return torch.cat([states[k] for k in layers], dim=-1)


# Transformer


def rotary(model: Flux2Transformer2DModel, text_tokens: int, height: int, width: int) -> Rotary:
    """Return the rotary tables (cosine, sine) for all tokens: first the text tokens, then the image tokens row by row.
    `height` and `width` are those of the picture in pixels. Text token k has the position (0, 0, 0, k). An image token has
    the position (0, row, column, 0).
    """
    device = model.proj_out.weight.device
    text_T4 = torch.zeros(text_tokens, 4, device=device)
    text_T4[:, 3] = torch.arange(text_tokens, device=device)
    image_hw4 = torch.zeros(height // PIXELS, width // PIXELS, 4, device=device)
    image_hw4[..., 1] = torch.arange(height // PIXELS, device=device)[:, None]
    image_hw4[..., 2] = torch.arange(width // PIXELS, device=device)[None, :]
    cosine, sine = model.pos_embed(torch.cat([text_T4, image_hw4.reshape(-1, 4)]))
    return cosine, sine


def velocity(model: Flux2Transformer2DModel, x_BLC: Tensor, context_BTJ: Tensor, sigma_B: Tensor, tables: Rotary) -> Tensor:
    """Predict the velocity, noise minus clean latent, (B,L,C). `x_BLC` holds noisy latents as tokens. `context_BTJ` holds
    text features. `sigma_B` holds noise levels, 0 to 1. `tables` is the result of `rotary`.
    """
    time_BD = model.time_guidance_embed(1000 * sigma_B, None)
    of_image, of_text = model.double_stream_modulation_img(time_BD), model.double_stream_modulation_txt(time_BD)
    of_both = model.single_stream_modulation(time_BD)
    h_BLD, h_BTD = model.x_embedder(x_BLC), model.context_embedder(context_BTJ)
    for block in model.transformer_blocks:
        h_BTD, h_BLD = block(h_BLD, h_BTD, of_image, of_text, image_rotary_emb=tables)
    h_BSD = torch.cat([h_BTD, h_BLD], dim=1)
    for block in model.single_transformer_blocks:
        h_BSD = block(h_BSD, None, of_both, image_rotary_emb=tables)
    return model.proj_out(model.norm_out(h_BSD[:, context_BTJ.shape[1] :], time_BD))


# Latents


def packed(z_BCHW: Tensor) -> Tensor:
    """Fold each 2x2 square of positions into channels, as FLUX.2 packs its latents. Value (row, column) of channel c goes
    to channel 4 c + 2 row + column.
    """
    return functional.pixel_unshuffle(z_BCHW, 2)


def encode_images(model: AutoencoderKLFlux2, images_B3HW: Tensor) -> Tensor:
    """Encode pictures (B,3,H,W), -1 to 1, and return packed latents (B,C,h,w). They are the mean of the posterior, and not
    normalised.
    """
    moments = model.quant_conv(model.encoder(images_B3HW))
    return packed(moments.chunk(2, dim=1)[0])


def decode_packed(model: AutoencoderKLFlux2, z_BChw: Tensor) -> Tensor:
    """Decode packed latents, and return pictures (B,3,H,W), -1 to 1. The latents must not be normalised."""
    return model.decoder(model.post_quant_conv(functional.pixel_shuffle(z_BChw, 2)))


def normalised(model: AutoencoderKLFlux2, z_BChw: Tensor) -> Tensor:
    """Normalise packed latents to mean 0 and variance 1 per channel, as the transformer needs them."""
    mean, spread = _statistics(model)
    return (z_BChw - mean) / spread


def restored(model: AutoencoderKLFlux2, z_BChw: Tensor) -> Tensor:
    """Undo `normalised`: return packed latents with the mean and variance that the autoencoder gives them."""
    mean, spread = _statistics(model)
    return z_BChw * spread + mean


def _statistics(model: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    mean = model.bn.running_mean[:, None, None]
    spread = (model.bn.running_var[:, None, None] + model.config.batch_norm_eps).sqrt()
    return mean, spread


def tokens_of(z_BChw: Tensor) -> Tensor:
    """Turn packed latents (B,C,h,w) into tokens (B,L,C), row by row."""
    return z_BChw.flatten(2).transpose(1, 2)


def image_of(x_BLC: Tensor, height: int, width: int) -> Tensor:
    """Turn tokens (B,L,C) into packed latents (B,C,h,w). `height` and `width` are those of the picture in pixels."""
    return x_BLC.transpose(1, 2).unflatten(2, (height // PIXELS, width // PIXELS))
