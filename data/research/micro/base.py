"""Train text encoder and transformer together, on cached latents of flat sprites, to predict the velocity.

Pictures are encoded once, captions are tokenised once, and both stay on the device. All pictures of a batch have one shape.
The length of a training is a time, so the learning-rate schedule follows the clock. Training may be divided among calls.

In names: B batch, L image tokens, C channels, T text tokens, N pictures of a shape, K concepts, M captions.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from torch import Tensor
from transformers import Qwen3ForCausalLM

from data.research.micro import model as parts
from data.research.micro.captions import caption
from data.research.micro.compose import COLOURS, SHAPES, compose
from data.research.micro.journal import Journal
from data.research.micro.optimizer import Average, Matrix, Optimizer, rate
from data.research.micro.tokenizer import Prompts

Shape = tuple[int, int]  # height, width

SHARES = {128: 0.68, 160: 0.18, 192: 0.14}  # resolution -> share of the steps; small pictures are cheaper and teach the same
WIDE = {160: ((112, 224), (224, 112))}  # resolution -> shapes of ratio 2:1 that the base sees beside compose.SHAPES
SQUARE = 0.4  # share of squares among the steps of a resolution
CAPTIONS = 10  # captions per concept and colour
UNMENTIONED = 0.5  # share of the captions on white that do not mention the background
DROPPED = 0.1  # share of captions that are replaced by the empty caption, for guidance
SCALE = (0.8, 0.9)  # side of a sprite relative to the short side of the picture
SHIFT = 0.03  # largest distance from the centre, likewise

# Noise levels: logit(sigma) is normal. Sampling an image of 64 tokens takes most of its steps above sigma 0.8.
LOGIT_MEAN, LOGIT_STD = 1.1, 1.3
EVEN = 0.1  # share that is uniform from 0 to 1 instead, so that every level is trained

RATE_MATRICES = 2e-3
RATE_TEXT = 1e-3
RATE_OTHERS = 1e-3
LOG_EVERY = 200  # steps


@dataclass(frozen=True)
class Corpus:
    """The training data of the base. `latents[shape][n]` is the latent of picture n of a shape, and `pairs[shape][n]` its
    pair. A pair is a concept on a background colour, with the number concept * len(COLOURS) + colour. `tokens` and `real`
    hold the tokens of all captions and the mask of padding.
    """

    latents: dict[Shape, Tensor]  # float16 (N,L,C)
    pairs: dict[Shape, Tensor]  # (N,)
    tokens: Tensor  # (M,T); caption k of pair p is row p * CAPTIONS + k; the last row is the empty caption
    real: Tensor  # (M,T); False for padding

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tokens.device


def shares() -> dict[Shape, float]:
    """Return, for each shape of pictures, the share of the training steps that use it."""
    found: dict[Shape, float] = {}
    for resolution, share in SHARES.items():
        others = [shape for shape in (*SHAPES[resolution], *WIDE.get(resolution, ())) if shape[0] != shape[1]]
        found[(resolution, resolution)] = share * SQUARE
        found |= {shape: share * (1 - SQUARE) / len(others) for shape in others}
    return found


def all_captions(phrases: list[str], seed: int) -> list[str]:
    """Make CAPTIONS captions for every concept on every colour, in the order of the pairs, and append the empty caption.
    `phrases` are the phrases of the concepts.
    """
    rng = random.Random(seed)
    made = []
    for phrase in phrases:
        for colour in COLOURS:
            for k in range(CAPTIONS):
                unmentioned = colour == "white" and k < CAPTIONS * UNMENTIONED
                made.append(caption(phrase, None if unmentioned else colour, rng))
    return [*made, ""]


@torch.no_grad()
def corpus(
    model: AutoencoderKLFlux2, sprites_K4HW: Tensor, captions: list[str], prompts: Prompts, pictures: int, seed: int
) -> Corpus:
    """Compose and encode about `pictures` pictures, divided among all shapes, tokenise the captions, and return the
    training data. `sprites_K4HW` holds the flat sprite of each concept, uint8 RGBA.
    """
    device = sprites_K4HW.device
    draw = torch.Generator(device=device).manual_seed(seed + 3)
    tokens_MT, real_MT = prompts(captions)
    latents: dict[Shape, Tensor] = {}
    pairs: dict[Shape, Tensor] = {}
    for (height, width), share in shares().items():
        count = max(1, round(pictures * share))
        pairs[height, width] = torch.randint(len(sprites_K4HW) * len(COLOURS), (count,), generator=draw, device=device)
        latents[height, width] = _encoded(model, sprites_K4HW, pairs[height, width], (height, width), draw)
    return Corpus(latents, pairs, tokens_MT.to(device), real_MT.to(device))


def _encoded(
    model: AutoencoderKLFlux2, sprites_K4HW: Tensor, pairs_N: Tensor, shape: Shape, draw: torch.Generator, chunk: int = 128
) -> Tensor:
    named = torch.tensor(list(COLOURS.values()), device=pairs_N.device) / 255
    reach = max(1, round(SHIFT * min(shape)))
    made = []
    for pairs_B in pairs_N.split(chunk):
        scale = SCALE[0] + (SCALE[1] - SCALE[0]) * float(torch.rand((), generator=draw, device=draw.device))
        shift_B2 = torch.randint(-reach, reach + 1, (len(pairs_B), 2), generator=draw, device=draw.device)
        concepts_B4HW = sprites_K4HW[pairs_B // len(COLOURS)]
        images_B3HW = compose(concepts_B4HW, named[pairs_B % len(COLOURS)], *shape, scale, shift_B2).clamp(-1, 1)
        z_BChw = parts.normalised(model, parts.encode_images(model, images_B3HW))
        made.append(parts.tokens_of(z_BChw).half())
    return torch.cat(made)


def noise_levels(B: int, draw: torch.Generator) -> Tensor:
    """Draw a random noise level for each of B pictures, (B,), from 0 (clean) to 1 (noise)."""
    normal_B = torch.randn(B, generator=draw, device=draw.device)
    even_B = torch.rand(B, generator=draw, device=draw.device)
    chosen_B = torch.rand(B, generator=draw, device=draw.device) < EVEN
    return torch.where(chosen_B, even_B, (LOGIT_MEAN + LOGIT_STD * normal_B).sigmoid())


class Base:
    """Text encoder and transformer in training: weights, optimizer, moving average, and progress."""

    def __init__(self, sizes: parts.Sizes, transformer: Flux2Transformer2DModel, text_encoder: Qwen3ForCausalLM) -> None:
        self.sizes = sizes
        self.transformer, self.text_encoder = transformer, text_encoder
        parts.freeze_unread(text_encoder, sizes)
        self.average = Average([transformer, text_encoder])
        self.device = transformer.proj_out.weight.device
        self.optimizer = _optimizer(transformer, text_encoder, self.device)
        self.seconds = 0.0
        self.step = 0
        self.tables: dict[Shape, parts.Rotary] = {}

    def loss(self, data: Corpus, shape: Shape, B: int, draw: torch.Generator) -> Tensor:
        """Return the mean squared error of the predicted velocity, a scalar, for a random batch. The batch has B pictures
        of the shape `shape`. `draw` draws the pictures and the noise.
        """
        chosen_B = torch.randint(len(data.pairs[shape]), (B,), generator=draw, device=self.device)
        clean_BLC = data.latents[shape][chosen_B].float()
        rows_B = data.pairs[shape][chosen_B] * CAPTIONS + torch.randint(CAPTIONS, (B,), generator=draw, device=self.device)
        dropped_B = torch.rand(B, generator=draw, device=self.device) < DROPPED
        rows_B = torch.where(dropped_B, len(data.tokens) - 1, rows_B)
        noise_BLC = torch.randn(clean_BLC.shape, generator=draw, device=self.device)
        sigma_B = noise_levels(B, draw)
        mixed_BLC = torch.lerp(clean_BLC, noise_BLC, sigma_B[:, None, None])
        if shape not in self.tables:
            self.tables[shape] = parts.rotary(self.transformer, self.sizes.text_tokens, *shape)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            tokens_BT, real_BT = data.tokens[rows_B], data.real[rows_B]
            context_BTJ = parts.encode_text(self.text_encoder, tokens_BT, real_BT, self.sizes.text_layers)
            found_BLC = parts.velocity(self.transformer, mixed_BLC, context_BTJ, sigma_B, self.tables[shape])
        return (found_BLC.float() - (noise_BLC - clean_BLC)).square().mean()

    def train(self, data: Corpus, total: float, stop_minutes: float, batch: int, seed: int, journal: Journal) -> bool:
        """Train until `total` seconds are spent over all calls, or `stop_minutes` minutes in this call. Return True if
        `total` is reached. `batch` is the batch size. Losses are written to `journal`.
        """
        draw = torch.Generator(device=self.device).manual_seed(seed + 4 + self.step)
        order = random.Random(seed + 5 + self.step)
        odds = shares()
        self._warm_up(data, batch, draw, journal)
        summed, since = torch.zeros((), device=self.device), time.monotonic()
        before = self.seconds
        while (progress := self.seconds / total) < 1 and journal.minutes < stop_minutes:
            shape = order.choices(list(odds), list(odds.values()))[0]
            loss = self.loss(data, shape, batch, draw)
            loss.backward()
            self.optimizer.step(rate(progress, self.step))
            self.average.update()
            self.step += 1
            summed += loss.detach()
            self.seconds = before + time.monotonic() - since
            if self.step % LOG_EVERY == 0:
                mean = float(summed) / LOG_EVERY  # waits for the device, so that the time is right
                numbers = {"step": self.step, "seconds": round(self.seconds, 1), "loss": round(mean, 5)}
                journal.note("base", **numbers, rate=round(rate(progress, self.step), 4))
                summed.zero_()
        return self.seconds >= total

    def _warm_up(self, data: Corpus, batch: int, draw: torch.Generator, journal: Journal) -> None:
        """Compute one loss with gradients for each shape, so that everything is compiled before the training time starts.
        The gradients are dropped.
        """
        started = time.monotonic()
        for shape in reversed(
            shares()
        ):  # 64 tokens last: compiled first, a size equal to another one would be taken for the same
            self.loss(data, shape, batch, draw).backward()
        for weight in (*self.transformer.parameters(), *self.text_encoder.parameters()):
            weight.grad = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        journal.note("base", warm_up_s=round(time.monotonic() - started, 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` needs to resume the training."""
        modules = [self.transformer, self.text_encoder, *self.average.modules]
        return {
            "modules": [module.state_dict() for module in modules],
            "average_steps": self.average.steps,
            "optimizer": self.optimizer.state_dict(),
            "seconds": self.seconds,
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        modules = [self.transformer, self.text_encoder, *self.average.modules]
        for module, saved in zip(modules, state["modules"], strict=True):
            module.load_state_dict(saved)
        self.average.steps = state["average_steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds, self.step = state["seconds"], state["step"]


def _optimizer(transformer: Flux2Transformer2DModel, text_encoder: Qwen3ForCausalLM, device: torch.device) -> Optimizer:
    """Make the optimizer: Muon for the matrices of the blocks, AdamW for all other weights."""
    matrices, others = [], []
    for name, weight in transformer.named_parameters():
        if "transformer_blocks." in name and weight.ndim == 2:
            matrices.append(Matrix(weight, RATE_MATRICES, _rows(name, weight)))
        else:
            others.append(weight)
    words = []
    for name, weight in text_encoder.named_parameters():
        if weight.requires_grad and weight.ndim == 2 and "layers." in name:
            matrices.append(Matrix(weight, RATE_TEXT, (weight.shape[0],)))
        elif weight.requires_grad:
            words.append(weight)
    return Optimizer(matrices, [{"params": others, "lr": RATE_OTHERS}, {"params": words, "lr": RATE_TEXT}], device)


def _rows(name: str, weight: Tensor) -> tuple[int, ...]:
    """Return the number of rows of each matrix that the weight `name` consists of. In single blocks, one weight holds the
    matrices of queries, keys, values and MLP input.
    """
    rows, D = weight.shape
    return (D, D, D, rows - 3 * D) if "to_qkv_mlp_proj" in name else (rows,)
