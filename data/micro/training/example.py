"""The pictures of data/example: a style that the base never saw to train on, and real ones of it to compare with.

    python -m data.micro.training.example WORK_DIR OUT

reads WORK_DIR/sprites.zip (see concepts.py) and writes OUT/images, the 3D emoji of the split "example" in several sizes and
shapes, and OUT/references, those of the split "held-out" as squares, each with a metadata.jsonl of plain captions; the
trigger comes from the project's template. OUT/prompts.toml asks for the very subjects and backgrounds of the references.

The style is that of a render in a studio: 3D subjects, light that falls on the background from above, a soft shadow. The
base knows flat subjects on plain colours alone.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from data.micro.training.captions import plain
from data.micro.training.compose import COLOURS, compose, load_sprites

CONCEPTS = Path(__file__).parents[1] / "concepts.jsonl"
SHAPES = ((256, 256), (256, 192), (192, 256), (288, 192), (192, 288))  # width, height: 1:1, 4:3, 3:4, 3:2, 2:3
SQUARE = (128, 128)  # of a reference: what the previews are drawn at
SCALE = (0.8, 0.9)  # side of the sprite, as a share of the short side; as in the base's training
GRID = 5  # every fifth concept comes first: the first prompts, which the grid shows, are of all kinds
CONTRAST = 90.0  # from which on colours are told apart, of 441 between black and white
LIGHT, FALL = 1.35, 0.55  # how bright the background is in the middle of the light, and what it loses by half a side from there
SPOT = 0.4  # height of the light's middle, as a share of the picture's height
SHADOW = 0.65  # how dark a shadow is
THROWN = (0.09, 0.03)  # how far it falls down and to the right, as a share of the short side
SOFT = 0.05  # how far its edge spreads, likewise
HIDDEN = 0.25  # share of a sprite that may be no more than that from its background

Concept = dict[str, str]


@dataclass(frozen=True)
class Sprites:
    """The sprites of one style by the names of their concepts."""

    names: list[str]
    rgba_N4HW: Tensor  # noqa: N815

    @classmethod
    def load(cls, work: Path, style: str) -> Sprites:
        """From WORK_DIR/sprites.zip; the style is flat or 3d."""
        return cls(*load_sprites(work / "sprites.zip", style))

    def picture(self, name: str, colour: str, size: tuple[int, int], scale: float) -> Image.Image:
        """That concept in the middle of a background; size is width and height."""
        behind_B3 = torch.tensor([COLOURS[colour]]) / 255
        sprite_B4HW = self.rgba_N4HW[self.names.index(name)][None]
        image_B3HW = compose(sprite_B4HW, behind_B3, size[1], size[0], scale, torch.zeros(1, 2, dtype=torch.int64))
        pixels_HW3 = ((image_B3HW[0] + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0)
        return Image.fromarray(pixels_HW3.numpy())

    def render(self, name: str, colour: str, size: tuple[int, int], scale: float) -> Image.Image:
        """The same in the studio's light."""
        (width, height), short = size, min(size)
        sprite_B4HW, still_B2 = self.rgba_N4HW[self.names.index(name)][None], torch.zeros(1, 2, dtype=torch.int64)
        thrown_B2 = torch.tensor([[round(short * part) for part in THROWN]])

        def over(shade: float, shift_B2: Tensor) -> Tensor:
            return (compose(sprite_B4HW, torch.full((1, 3), shade), height, width, scale, shift_B2)[0] + 1) / 2

        premultiplied_3HW = over(0, still_B2)
        clear_3HW = over(1, still_B2) - premultiplied_3HW  # 1 less the sprite's alpha
        shadow_HW = blurred(1 - (over(1, thrown_B2) - over(0, thrown_B2))[0], SOFT * short)
        down_H = (torch.arange(height) + 0.5) / (height / 2) - 2 * SPOT
        across_W = (torch.arange(width) + 0.5) / (width / 2) - 1
        light_HW = LIGHT - FALL * (down_H[:, None] ** 2 + across_W**2)
        behind_3HW = torch.tensor(COLOURS[colour])[:, None, None] / 255 * light_HW * (1 - SHADOW * shadow_HW)
        pixels_HW3 = (
            ((premultiplied_3HW + clear_3HW * behind_3HW.clamp(0, 1)) * 255).round().clamp(0, 255).byte().permute(1, 2, 0)
        )
        return Image.fromarray(pixels_HW3.numpy())

    def hidden(self, name: str, colour: str) -> float:
        """The share of a sprite that would vanish on that background."""
        sprite_4P = self.rgba_N4HW[self.names.index(name)].flatten(1).float()
        opaque_P3 = sprite_4P[:3, sprite_4P[3] > 127].T
        return float((torch.linalg.vector_norm(opaque_P3 - torch.tensor(COLOURS[colour]), dim=1) < CONTRAST).float().mean())


def blurred(x_HW: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur, with the edge's values beyond the edge."""
    reach = round(3 * sigma)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    x_11HW = functional.pad(x_HW[None, None], (reach,) * 4, mode="replicate")
    kernel = weights / weights.sum()
    return functional.conv2d(functional.conv2d(x_11HW, kernel[None, None, :, None]), kernel[None, None, None, :])[0, 0]


def concepts(split: str) -> list[Concept]:
    """The concepts of a split, in the order of the list."""
    lines = CONCEPTS.read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


def backgrounds(chosen: list[Concept], sprites: Sprites, seed: int) -> dict[str, str]:
    """A colour for each concept by its name: every colour about as often, none that the sprite would vanish on."""
    draw = random.Random(seed)
    used = dict.fromkeys(COLOURS, 0)
    found = {}
    for concept in chosen:
        name = concept["name"]
        clear = [colour for colour in COLOURS if sprites.hidden(name, colour) < HIDDEN]
        found[name] = colour = min(clear, key=lambda c: (used[c], draw.random()))
        used[colour] += 1
    return found


def said(concept: Concept, colour: str) -> str:
    """The plain caption; a white background is not mentioned, as in the base's training."""
    return plain(concept["phrase"], None if colour == "white" else colour)


def held_out(sprites: Sprites, seed: int = 0) -> list[tuple[Concept, str, Image.Image]]:
    """Every held-out concept with its colour and its picture; the colours are the same for both styles."""
    chosen = concepts("held-out")
    colours = backgrounds(chosen, sprites, seed)
    middle = sum(SCALE) / 2
    return [(c, colours[c["name"]], sprites.render(c["name"], colours[c["name"]], SQUARE, middle)) for c in chosen]


def write(folder: Path, pictures: list[tuple[Concept, str, Image.Image]]) -> None:
    """The pictures as lossless WebP, named after their concepts, and their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for concept, colour, image in pictures:
        name = concept["name"].replace(" ", "-") + ".webp"
        image.save(folder / name, lossless=True, method=6)
        lines.append(json.dumps({"file_name": name, "text": said(concept, colour)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(work: Path, out: Path) -> str:
    """Write both folders and the prompts; says what was written."""
    solid = Sprites.load(work, "3d")
    draw = random.Random(1)
    chosen = concepts("example")
    colours = backgrounds(chosen, solid, seed=1)
    images: list[tuple[Concept, str, Image.Image]] = []
    for place, concept in enumerate(chosen):
        colour, size = colours[concept["name"]], SHAPES[place % len(SHAPES)]
        images.append((concept, colour, solid.render(concept["name"], colour, size, draw.uniform(*SCALE))))
    references = held_out(solid)
    write(out / "images", images)
    write(out / "references", references)
    mixed = [references[place] for begin in range(GRID) for place in range(begin, len(references), GRID)]
    prompts = "".join(f'    "{{trigger}}, {said(concept, colour)}",\n' for concept, colour, _ in mixed)
    (out / "prompts.toml").write_text(f"preview_prompts = [\n{prompts}]\n", encoding="utf-8")
    return f"{len(images)} images and {len(references)} references: {size_of(out)} bytes in {out}"


def size_of(folder: Path) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def arguments(usage: Any, count: int) -> list[Path]:
    """The command line's paths, or an end with the usage."""
    given = [Path(word) for word in sys.argv[1:]]
    if len(given) != count:
        raise SystemExit(str(usage).strip())
    return given


if __name__ == "__main__":
    sys.stdout.write(main(*arguments(__doc__, 2)) + "\n")
