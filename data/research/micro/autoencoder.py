"""Train the autoencoder to reconstruct flat and 3D sprites on coloured backgrounds from a noisy latent.

Noise on the latent is the regulariser. Its level is drawn for every picture, in units of the standard deviation of each
channel: with little noise the decoder learns detail, with much noise it learns to draw clean pictures from latents that a
transformer predicts only approximately.

B pictures, C packed latent channels (128), H W pixels.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2
from torch import Tensor

from data.research.micro import model as parts
from data.research.micro.compose import COLOURS, SIDE, compose
from data.research.micro.journal import Journal
from data.research.micro.optimizer import Average, rate

CANVAS = 128  # side of the training pictures, pixels
NOISE = 0.2  # highest noise level, in standard deviations of a channel
RATE = 1.5e-3
SCALE_PENALTY = 1e-3  # weight of the penalty that keeps packed channels near mean 0 and variance 1
HIDDEN_LOGVAR = -8.0  # log variance in the unused half of the moments: a posterior with almost no variance


@dataclass(frozen=True)
class Sprites:
    """Sprites by style, uint8 RGBA (N,4,256,256), on the training device. `solid` holds 3D sprites of the split base."""

    flat: Tensor
    solid: Tensor


def pool(sprites: Sprites, count: int, seed: int, chunk: int = 256) -> Tensor:
    """Compose `count` training pictures, and return them as uint8 (count,3,CANVAS,CANVAS). They show sprites of both styles
    at many scales; some are cut off. `chunk` pictures are composed at a time.
    """
    device = sprites.flat.device
    draw = torch.Generator(device=device).manual_seed(seed)
    scales = torch.Generator().manual_seed(seed)
    made = torch.empty(count, 3, CANVAS, CANVAS, dtype=torch.uint8, device=device)
    for start in range(0, count, chunk):
        B = min(chunk, count - start)
        near = float(torch.rand((), generator=scales)) < 0.4
        low, high = (1.0, 1.5) if near else (0.6, 0.95)
        scale = low + (high - low) * float(torch.rand((), generator=scales))
        reach = max(4, round((scale - 0.9) * CANVAS / 2) + 4)
        chosen_B4HW = draw_sprites(sprites, B, draw)
        shift_B2 = torch.randint(-reach, reach + 1, (B, 2), generator=draw, device=device)
        images_B3HW = compose(chosen_B4HW, backgrounds(B, draw), CANVAS, CANVAS, scale, shift_B2)
        made[start : start + B] = ((images_B3HW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return made


def draw_sprites(sprites: Sprites, B: int, draw: torch.Generator) -> Tensor:
    """Choose B sprites at random with the generator `draw`, half of them flat and half 3D. Return uint8 (B,4,256,256)."""
    device = sprites.flat.device
    flat = torch.randint(len(sprites.flat), (B // 2,), generator=draw, device=device)
    solid = torch.randint(len(sprites.solid), (B - B // 2,), generator=draw, device=device)
    return torch.cat([sprites.flat[flat], sprites.solid[solid]])


def backgrounds(B: int, draw: torch.Generator, free: float = 0.3) -> Tensor:
    """Choose B background colours with the generator `draw`, (B,3), 0 to 1. A share `free` of them is arbitrary; the others
    are named colours.
    """
    device = draw.device
    named = torch.tensor(list(COLOURS.values()), device=device) / 255
    chosen_B3 = named[torch.randint(len(named), (B,), generator=draw, device=device)]
    any_B3 = torch.rand(B, 3, generator=draw, device=device)
    return torch.where(torch.rand(B, 1, generator=draw, device=device) < free, any_B3, chosen_B3)


def loss_of(model: AutoencoderKLFlux2, images_B3HW: Tensor, noise_BChw: Tensor, level_B111: Tensor) -> Tensor:
    """Return the training loss as a scalar: the error of reconstruction plus a penalty on the scale of the latents.
    `images_B3HW` are the pictures, -1 to 1. `noise_BChw` is standard normal noise for the latents. `level_B111` is the
    noise level of each picture.
    """
    z_BChw = parts.encode_images(model, images_B3HW).float()
    spread, mean = torch.var_mean(z_BChw, dim=(0, 2, 3), keepdim=True)
    noisy_BChw = z_BChw + level_B111 * noise_BChw * spread.clamp(min=1e-6).sqrt()
    wrong_B3HW = parts.decode_packed(model, noisy_BChw).float() - images_B3HW
    down, across = wrong_B3HW.diff(dim=2).abs().mean(), wrong_B3HW.diff(dim=3).abs().mean()
    picture = wrong_B3HW.abs().mean() + (down + across) / 2 + wrong_B3HW.square().mean()
    return picture + SCALE_PENALTY * (spread.clamp(min=1e-6).log().square().mean() + mean.square().mean())


def train(
    sizes: parts.Sizes, sprites: Sprites, seconds: float, batch: int, pictures: int, seed: int, journal: Journal
) -> AutoencoderKLFlux2:
    """Train an autoencoder for `seconds` of wall time, and return the moving average of its weights, rounded to float16.
    `pictures` is the number of composed pictures to train on, and `batch` the batch size. The result also holds the mean
    and variance of its latents.
    """
    device = sprites.flat.device
    torch.manual_seed(seed)
    model = parts.make_autoencoder(sizes).to(device, memory_format=torch.channels_last)
    average = Average([model])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=1e-3, fused=device.type == "cuda")
    images_N3HW = pool(sprites, pictures, seed)
    journal.note("autoencoder", pictures=pictures, parameters=sum(w.numel() for w in model.parameters()))
    compute = torch.compile(loss_of) if device.type == "cuda" else loss_of
    draw = torch.Generator(device=device).manual_seed(seed + 1)
    torch.backends.cudnn.benchmark = True  # every step has the same shape
    started, step, total = time.monotonic(), 0, torch.zeros((), device=device)
    while (elapsed := time.monotonic() - started) < seconds:
        factor = rate(elapsed / seconds, step)
        for group in optimizer.param_groups:
            group["lr"] = factor * RATE
        chosen = torch.randint(len(images_N3HW), (batch,), generator=draw, device=device)
        loss = _step(compute, model, images_N3HW[chosen], draw)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update()
        step, total = step + 1, total + loss
        if step == 1:
            _wait(device)
            journal.note("autoencoder", first_step_s=round(time.monotonic() - started, 1))
            started = time.monotonic()  # compilation is not counted
        if step % 100 == 0:
            mean = float(total) / 100  # waits for the device, so that the time is right
            journal.note("autoencoder", step=step, seconds=round(elapsed, 1), loss=round(mean, 5), rate=round(factor, 4))
            total.zero_()
    torch.backends.cudnn.benchmark = False
    journal.note("autoencoder", steps=step, batch=batch, seconds=round(time.monotonic() - started, 1))
    return finished(average.modules[0], sprites, seed)


def _step(compute: Any, model: AutoencoderKLFlux2, chosen_B3HW: Tensor, draw: torch.Generator) -> Tensor:
    """Compute the loss and the gradients of one batch. Return the loss, a tensor that the device may not have computed yet.
    `compute` is the loss function. `chosen_B3HW` are uint8 pictures. The generator `draw` draws the noise and its level.
    """
    B, device = len(chosen_B3HW), chosen_B3HW.device
    images_B3HW = (chosen_B3HW.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
    level_B111 = NOISE * torch.rand(B, 1, 1, 1, generator=draw, device=device)
    C, h = 4 * model.config.latent_channels, CANVAS // parts.PIXELS
    noise_BChw = torch.randn(B, C, h, h, generator=draw, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss: Tensor = compute(model, images_B3HW, noise_BChw, level_B111)
    loss.backward()
    return loss.detach()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def finished(
    model: AutoencoderKLFlux2, sprites: Sprites, seed: int, pictures: int = 4096, chunk: int = 128
) -> AutoencoderKLFlux2:
    """Prepare the model for export and return it: its weights are rounded to float16, and the mean and variance of its
    latents are measured. `pictures` is the number of flat pictures to measure on, and `chunk` the number encoded at a time.
    """
    C = model.config.latent_channels
    model.quant_conv.weight[C:].zero_()
    model.quant_conv.bias[C:].fill_(HIDDEN_LOGVAR)
    for weight in model.parameters():
        weight.copy_(weight.half())
    draw = torch.Generator(device=sprites.flat.device).manual_seed(seed + 2)
    sums = torch.zeros(2, 4 * C, dtype=torch.float64, device=sprites.flat.device)
    rounds = math.ceil(min(pictures, 8 * len(sprites.flat)) / chunk)
    for _ in range(rounds):
        chosen = torch.randint(len(sprites.flat), (chunk,), generator=draw, device=draw.device)
        still_B2 = torch.zeros(chunk, 2, dtype=torch.long, device=draw.device)
        images_B3HW = compose(sprites.flat[chosen], backgrounds(chunk, draw, free=0.0), CANVAS, CANVAS, 0.85, still_B2)
        z_BChw = parts.encode_images(model, images_B3HW).double()
        sums += torch.stack([z_BChw.mean(dim=(0, 2, 3)), z_BChw.square().mean(dim=(0, 2, 3))]) / rounds
    model.bn.running_mean.copy_(sums[0])
    model.bn.running_var.copy_(sums[1] - sums[0].square())
    model.bn.num_batches_tracked.fill_(1)
    return model


@torch.no_grad()
def quality(model: AutoencoderKLFlux2, sprites_N4HW: Tensor, height: int, width: int, seed: int, count: int) -> float:
    """Return the mean PSNR, in dB, of reconstructions of `count` random pictures. No noise is added to the latents.
    `height` and `width` are those of the pictures.
    """
    originals, restored = reconstruct(model, sprites_N4HW, height, width, seed, count)
    wrong_B = (originals - restored).square().mean(dim=(1, 2, 3)) / 4  # -1 to 1 is 2 wide
    return float((-10 * wrong_B.clamp(min=1e-10).log10()).mean())


@torch.no_grad()
def reconstruct(
    model: AutoencoderKLFlux2, sprites_N4HW: Tensor, height: int, width: int, seed: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return `count` random pictures and their reconstructions, each (count,3,height,width), -1 to 1. The latents are
    normalised and restored in between, as in the pipeline.
    """
    assert sprites_N4HW.shape[-1] == SIDE
    draw = torch.Generator(device=sprites_N4HW.device).manual_seed(seed)
    chosen = torch.randint(len(sprites_N4HW), (count,), generator=draw, device=draw.device)
    still_B2 = torch.zeros(count, 2, dtype=torch.long, device=draw.device)
    images_B3HW = compose(sprites_N4HW[chosen], backgrounds(count, draw), height, width, 0.85, still_B2).clamp(-1, 1)
    z_BChw = parts.normalised(model, parts.encode_images(model, images_B3HW))
    return images_B3HW, parts.decode_packed(model, parts.restored(model, z_BChw)).clamp(-1, 1)
