"""Make the pictures of data/projects/example: training images in a style that the base never saw, and references to compare with.

    python -m data.research.micro.example WORK_DIR OUT

reads WORK_DIR/sprites.zip (see concepts.py) and writes OUT/images, the 3D emoji of the split "example" in several sizes and
shapes, and OUT/references, the 3D emoji of the split "held-out" as squares. Both have a metadata.jsonl of plain captions
without the trigger, which the project's template adds. OUT/prompts.toml has prompts for the subjects and backgrounds of the
references.

The style imitates a studio render: 3D subjects, light on the background from above, a soft shadow. The base knows only flat
subjects on plain colours.
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

from data.research.micro.captions import plain
from data.research.micro.compose import COLOURS, compose, load_sprites

CONCEPTS = Path(__file__).with_name("concepts.jsonl")
SHAPES = ((256, 256), (256, 192), (192, 256), (288, 192), (192, 288))  # width, height: 1:1, 4:3, 3:4, 3:2, 2:3
SQUARE = (128, 128)  # size of a reference, and of the previews
SCALE = (0.8, 0.9)  # side of the sprite relative to the short side, as in the training of the base
GRID = 5  # every fifth concept comes first, so that the first prompts, which the grid shows, are varied
CONTRAST = 90.0  # distance at which two colours can be told apart; black and white are 441 apart
LIGHT, FALL = 1.35, 0.55  # brightness of the background at the centre of the light, and its loss at half a side from there
SPOT = 0.4  # height of the light's centre, as a share of the picture's height
SHADOW = 0.65  # darkness of the shadow, 0 to 1
THROWN = (0.09, 0.03)  # offset of the shadow (down, right), as a share of the short side
SOFT = 0.05  # standard deviation of the shadow's blur, likewise
HIDDEN = 0.25  # largest share of a sprite that may be closer than CONTRAST to its background

Concept = dict[str, str]


@dataclass(frozen=True)
class Sprites:
    """The sprites of one style, and the names of their concepts."""

    names: list[str]
    rgba_N4HW: Tensor  # noqa: N815

    @classmethod
    def load(cls, work: Path, style: str) -> Sprites:
        """Load the style "flat" or "3d" from WORK_DIR/sprites.zip."""
        return cls(*load_sprites(work / "sprites.zip", style))

    def picture(self, name: str, colour: str, size: tuple[int, int], scale: float) -> Image.Image:
        """Draw the concept `name` in the middle of a plain background of `colour`. `size` is (width, height) in pixels.
        `scale` is the side of the sprite relative to the short side of the picture.
        """
        behind_B3 = torch.tensor([COLOURS[colour]]) / 255
        sprite_B4HW = self.rgba_N4HW[self.names.index(name)][None]
        image_B3HW = compose(sprite_B4HW, behind_B3, size[1], size[0], scale, torch.zeros(1, 2, dtype=torch.int64))
        pixels_HW3 = ((image_B3HW[0] + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0)
        return Image.fromarray(pixels_HW3.numpy())

    def render(self, name: str, colour: str, size: tuple[int, int], scale: float) -> Image.Image:
        """Draw the concept `name` in the middle of a background of `colour`, with studio light and a shadow. `size` is
        (width, height) in pixels. `scale` is the side of the sprite relative to the short side of the picture.
        """
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
        """Return the share of a sprite's opaque pixels that are closer than CONTRAST to the background colour."""
        sprite_4P = self.rgba_N4HW[self.names.index(name)].flatten(1).float()
        opaque_P3 = sprite_4P[:3, sprite_4P[3] > 127].T
        return float((torch.linalg.vector_norm(opaque_P3 - torch.tensor(COLOURS[colour]), dim=1) < CONTRAST).float().mean())


def blurred(x_HW: Tensor, sigma: float) -> Tensor:
    """Return `x_HW` blurred with a Gaussian. `sigma` is the standard deviation in pixels. Values beyond the border equal
    those at the border.
    """
    reach = round(3 * sigma)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    x_11HW = functional.pad(x_HW[None, None], (reach,) * 4, mode="replicate")
    kernel = weights / weights.sum()
    return functional.conv2d(functional.conv2d(x_11HW, kernel[None, None, :, None]), kernel[None, None, None, :])[0, 0]


def concepts(split: str) -> list[Concept]:
    """Return the concepts of a split in the order of concepts.jsonl."""
    lines = CONCEPTS.read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


def backgrounds(chosen: list[Concept], sprites: Sprites, seed: int) -> dict[str, str]:
    """Choose a background colour for each concept, and return a dict from the concept's name to the colour. All colours are
    used about equally often. A colour on which much of the sprite would vanish is never chosen.
    """
    draw = random.Random(seed)
    used = dict.fromkeys(COLOURS, 0)
    found = {}
    for concept in chosen:
        name = concept["name"]
        clear = [colour for colour in COLOURS if sprites.hidden(name, colour) < HIDDEN]
        found[name] = colour = min(clear, key=lambda c: (used[c], draw.random()))
        used[colour] += 1
    return found


def caption_of(concept: Concept, colour: str) -> str:
    """Return the plain caption of a concept on a colour; white is not mentioned, as in the training of the base."""
    return plain(concept["phrase"], None if colour == "white" else colour)


def held_out(sprites: Sprites, seed: int = 0) -> list[tuple[Concept, str, Image.Image]]:
    """Return (concept, colour, picture) for every held-out concept. The pictures are rendered with `sprites`. `seed`
    chooses the colours.
    """
    chosen = concepts("held-out")
    colours = backgrounds(chosen, sprites, seed)
    middle = sum(SCALE) / 2
    return [(c, colours[c["name"]], sprites.render(c["name"], colours[c["name"]], SQUARE, middle)) for c in chosen]


def write(folder: Path, pictures: list[tuple[Concept, str, Image.Image]]) -> None:
    """Write pictures as lossless WebP files into `folder`, with a metadata.jsonl of their captions. `pictures` lists
    (concept, colour, picture). A file is named after its concept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for concept, colour, image in pictures:
        name = concept["name"].replace(" ", "-") + ".webp"
        image.save(folder / name, lossless=True, method=6)
        lines.append(json.dumps({"file_name": name, "text": caption_of(concept, colour)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(work: Path, out: Path) -> str:
    """Write the folders of images and references and the prompts into `out`. Return one line that says what was written.
    `work` is WORK_DIR.
    """
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
    prompts = "".join(f'    "{{trigger}}, {caption_of(concept, colour)}",\n' for concept, colour, _ in mixed)
    (out / "prompts.toml").write_text(f"preview_prompts = [\n{prompts}]\n", encoding="utf-8")
    return f"{len(images)} images and {len(references)} references: {size_of(out)} bytes in {out}"


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def arguments(usage: Any, count: int) -> list[Path]:
    """Return the `count` paths of the command line. SystemExit with the usage if there is another number of arguments."""
    given = [Path(word) for word in sys.argv[1:]]
    if len(given) != count:
        raise SystemExit(str(usage).strip())
    return given


if __name__ == "__main__":
    sys.stdout.write(main(*arguments(__doc__, 2)) + "\n")
