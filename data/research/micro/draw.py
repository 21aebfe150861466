"""Draw sheets of pictures that show the state of the training: samples of the base model, reconstructions of the
autoencoder.

In names: B pictures, L image tokens, C channels, J text features, H W pixels.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import Qwen3ForCausalLM

from data.research.micro import model as parts
from data.research.micro.tokenizer import Prompts

GUIDANCE = 3.0
STEPS = 24
LABEL = 12  # height of the text below a picture, pixels
# FLUX.2 shifts its noise levels by mu, which is linear in the tokens and in the steps; see stages/models/flux2/sampling.py.
AT_10_STEPS = (8.73809524e-05, 1.89833333)
AT_200_STEPS = (0.00016927, 0.45666666)


def levels(tokens: int, steps: int) -> list[float]:
    """Return the noise levels of a sampling run, `steps` + 1 numbers from 1 to 0. `tokens` is the number of tokens of the
    image.
    """
    at_10, at_200 = (slope * tokens + offset for slope, offset in (AT_10_STEPS, AT_200_STEPS))
    shift = math.exp(at_200 + (at_200 - at_10) / 190 * (steps - 200))
    return [shift / (shift + steps / left - 1) for left in range(steps, 0, -1)] + [0.0]


@torch.no_grad()
def samples(
    transformer: Flux2Transformer2DModel,
    text_encoder: Qwen3ForCausalLM,
    autoencoder: AutoencoderKLFlux2,
    sizes: parts.Sizes,
    prompts: Prompts,
    captions: list[str],
    shape: tuple[int, int],
    seed: int,
    steps: int = STEPS,
) -> Tensor:
    """Draw one picture per caption, and return them as (B,3,H,W), -1 to 1. `steps` Euler steps are taken, with guidance.
    `shape` is (height, width) in pixels. `seed` chooses the noise. `prompts` turns captions into tokens.
    """
    device = transformer.proj_out.weight.device
    B = len(captions)
    tokens_BT, real_BT = (found.to(device) for found in prompts([*captions, *([""] * B)]))
    context_BTJ = parts.encode_text(text_encoder, tokens_BT, real_BT, sizes.text_layers)
    tables = parts.rotary(transformer, sizes.text_tokens, *shape)
    L = shape[0] * shape[1] // parts.PIXELS**2
    draw = torch.Generator(device=device).manual_seed(seed)
    x_BLC = torch.randn(B, L, sizes.transformer["in_channels"], generator=draw, device=device)
    for sigma, following in pairwise(levels(L, steps)):
        sigma_B = torch.full((2 * B,), sigma, device=device)
        both_BLC = parts.velocity(transformer, x_BLC.repeat(2, 1, 1), context_BTJ, sigma_B, tables)
        prompt_BLC, empty_BLC = both_BLC.chunk(2)
        x_BLC = x_BLC + (following - sigma) * (empty_BLC + GUIDANCE * (prompt_BLC - empty_BLC))
    z_BChw = parts.restored(autoencoder, parts.image_of(x_BLC, *shape))
    return parts.decode_packed(autoencoder, z_BChw).clamp(-1, 1)


def grid(path: Path, rows: list[tuple[Tensor, list[str]]]) -> None:
    """Write a PNG file with rows of labelled pictures. A row is the pair (pictures (B,3,H,W) from -1 to 1, B labels). Rows
    may have different numbers and sizes of pictures.
    """
    width = max(len(images) * (images.shape[3] + 2) for images, _ in rows)
    height = sum(images.shape[2] + LABEL + 2 for images, _ in rows)
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    top = 0
    for images_B3HW, labels in rows:
        bytes_BHW3 = ((images_B3HW.float().cpu() + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
        for i, (picture, label) in enumerate(zip(bytes_BHW3, labels, strict=True)):
            left = i * (picture.shape[1] + 2)
            sheet.paste(Image.fromarray(picture.numpy()), (left, top))
            pen.text((left, top + picture.shape[0]), label[: picture.shape[1] // 5], fill="black", font_size=9)
        top += images_B3HW.shape[2] + LABEL + 2
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
