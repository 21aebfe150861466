"""Train `micro` from sprites: first the autoencoder, then text encoder and transformer together; then export the model.

    python -m data.research.micro.train --sprites sprites.zip --work WORK --out OUT --minutes-autoencoder 3.5 --minutes-base 12

The length of the training is a time, and it may be divided among several calls: `--stop-after 9` ends a call after nine
minutes and saves its state in WORK, and the same command with --resume continues from there. With --last the rest of the
schedule is fitted into the rest of that call. Needs torch, diffusers and transformers, and a GPU with 20 GB (a CPU is slow).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from transformers import Qwen3ForCausalLM

from data.research.micro import autoencoder, base, compose, draw, export, tokenizer
from data.research.micro import model as parts
from data.research.micro.captions import plain
from data.research.micro.journal import Journal

CONCEPTS = Path(__file__).with_name("concepts.jsonl")
SHOWN = ((128, 128), (96, 160), (144, 112), (160, 160), (160, 224), (192, 192))  # shapes of the sample sheet
PER_SHAPE = 8
STATE = "state.pt"


@dataclass(frozen=True)
class Concept:
    """The fields of a line of concepts.jsonl that the training uses."""

    name: str
    phrase: str
    split: str


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; None means sys.argv."""
    parser = argparse.ArgumentParser(description="Train micro.")
    parser.add_argument("--sprites", type=Path, required=True, help="sprites.zip, as concepts.py makes it")
    parser.add_argument("--concepts", type=Path, default=CONCEPTS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the state between calls")
    parser.add_argument("--out", type=Path, help="folder of results; default: WORK/out")
    parser.add_argument("--minutes-autoencoder", type=float, default=3.5, help="of training steps, without compilation")
    parser.add_argument("--minutes-base", type=float, default=12.0, help="of training steps, over all calls")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes after which the training of this call ends")
    parser.add_argument("--last", action="store_true", help="no call follows: end the schedule with this call")
    parser.add_argument("--resume", action="store_true", help="continue from the state in WORK")
    parser.add_argument("--start", type=Path, help="folder of a trained model to start from, with its autoencoder")
    parser.add_argument("--autoencoder", type=Path, help="folder of a trained autoencoder, instead of training one")
    parser.add_argument("--export-only", action="store_true", help="only export the state in WORK")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batch-autoencoder", type=int, default=128)
    parser.add_argument("--pictures", type=int, default=150_000, help="number of pictures encoded for the base")
    parser.add_argument("--pictures-autoencoder", type=int, default=98_304)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, sizes: parts.Sizes = parts.MICRO) -> None:
    """Train for the time that the command line `argv` gives, and export the result. `sizes` are the sizes of the model."""
    args = arguments(argv)
    args.out = args.out or args.work / "out"
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("micro").setLevel(logging.INFO)
    journal = Journal(args.work / "log.jsonl")
    _set_up(args, journal)
    run = Run(args, sizes, journal)
    try:
        if not args.export_only:
            run.train()
    finally:  # also after an error, because the autoencoder took minutes to train
        run.results()


def _set_up(args: argparse.Namespace, journal: Journal) -> None:
    """Set torch's global options, and log them with the arguments and the machine. Paths are logged by name only."""
    torch.set_float32_matmul_precision("high")  # TF32, where autocast does not choose bfloat16
    torch._dynamo.config.suppress_errors = True  # a block that fails to compile runs slowly instead of ending the training
    torch._dynamo.config.cache_size_limit = 64
    logged = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    logged |= {name: value.name for name in ("start", "autoencoder") if (value := getattr(args, name))}
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    journal.note("run", machine=machine, torch=torch.__version__, cores=os.cpu_count(), **logged)


class Run:
    """One call of the training command. It reads sprites and the saved state, trains, and writes the new state and the
    results.
    """

    def __init__(self, args: argparse.Namespace, sizes: parts.Sizes, journal: Journal) -> None:
        self.args, self.sizes, self.journal = args, sizes, journal
        self.device = torch.device(args.device)
        self.concepts = _concepts(args.concepts)
        self.sprites = _sprites(args.sprites, self.concepts, self.device)
        journal.note("sprites", flat=len(self.sprites.flat), solid=len(self.sprites.solid), concepts=len(self.concepts))
        self.folder = args.work / "micro"
        self.captions = base.all_captions([concept.phrase for concept in self.concepts], args.seed)
        self.prompts = self._prompts()
        self.state: dict[str, Any] = {}
        if args.resume or args.export_only:
            self.state = torch.load(args.work / STATE, map_location=self.device, weights_only=True)
        self.autoencoder = self._autoencoder()
        self.base = self._base()

    def _prompts(self) -> tokenizer.Prompts:
        to = self.folder / "tokenizer"
        if self.args.start:
            shutil.copytree(self.args.start / "tokenizer", to, dirs_exist_ok=True)
        elif not (self.args.resume or self.args.export_only):
            tokenizer.train(self.captions, self.sizes.text["vocab_size"], to)
        prompts = tokenizer.Prompts(to, self.sizes.text_tokens)
        self.journal.note("tokenizer", tokens=len(prompts.tokenizer), captions=len(self.captions))
        return prompts

    def _autoencoder(self) -> AutoencoderKLFlux2:
        """Return the autoencoder. It is loaded from the saved state or from a folder, or else trained."""
        args = self.args
        if self.state:
            found = parts.make_autoencoder(self.sizes).to(self.device).eval()
            found.load_state_dict(self.state["autoencoder"])
            return found
        if args.autoencoder or args.start:
            return AutoencoderKLFlux2.from_pretrained(args.autoencoder or args.start / "vae").to(self.device).eval()
        found = autoencoder.train(
            self.sizes,
            self.sprites,
            60 * args.minutes_autoencoder,
            args.batch_autoencoder,
            args.pictures_autoencoder,
            args.seed,
            self.journal,
        )
        return found.to(memory_format=torch.contiguous_format)

    def _base(self) -> base.Base:
        torch.manual_seed(self.args.seed)
        if self.args.start:
            transformer = Flux2Transformer2DModel.from_pretrained(self.args.start / "transformer")
            text_encoder = Qwen3ForCausalLM.from_pretrained(self.args.start / "text_encoder", dtype=torch.float32)
        else:
            transformer, text_encoder = parts.make_transformer(self.sizes), parts.make_text_encoder(self.sizes)
        made = base.Base(self.sizes, transformer.to(self.device), text_encoder.to(self.device))
        if self.state:
            made.load_state_dict(self.state["base"])
        counts = {m.__class__.__name__: sum(w.numel() for w in m.parameters()) for m in (transformer, text_encoder)}
        self.journal.note("base", step=made.step, seconds=round(made.seconds, 1), **counts)
        return made

    def train(self) -> None:
        """Train the base for the time of this call, then save the state."""
        args = self.args
        self.reconstructions()
        started = time.monotonic()
        data = base.corpus(self.autoencoder, self.sprites.flat, self.captions, self.prompts, args.pictures, args.seed)
        pictures = sum(map(len, data.pairs.values()))
        std = float(next(iter(data.latents.values())).float().std())
        self.journal.note("corpus", pictures=pictures, seconds=round(time.monotonic() - started, 1), std=round(std, 3))
        self.save()
        if self.device.type == "cuda":
            parts.compile_blocks(self.base.transformer, self.base.text_encoder)
        left = 60 * (args.stop_after - self.journal.minutes)
        total = 60 * args.minutes_base
        if args.last:
            total = min(total, self.base.seconds + max(left - 45, 1))  # seconds that warming up takes at most
        done = self.base.train(data, total, args.stop_after, args.batch, args.seed, self.journal)
        self.journal.note("base", step=self.base.step, seconds=round(self.base.seconds, 1), done=done)
        self.save()

    def save(self) -> None:
        """Save the state that a later call needs to continue the training. It is written into WORK."""
        state = {"autoencoder": self.autoencoder.state_dict(), "base": self.base.state_dict()}
        torch.save(state, self.args.work / "state.new")
        (self.args.work / "state.new").replace(self.args.work / STATE)

    def reconstructions(self) -> None:
        """Log the autoencoder's PSNR, and draw a sheet with originals above their reconstructions."""
        rows = []
        for name, found_N4HW in (("flat", self.sprites.flat), ("3d", self.sprites.solid)):
            for shape in ((128, 128), (96, 160), (192, 192)):
                decibels = autoencoder.quality(self.autoencoder, found_N4HW, *shape, self.args.seed + 9, len(found_N4HW[:128]))
                self.journal.note("psnr", style=name, height=shape[0], width=shape[1], decibels=round(decibels, 2))
            for images_B3HW in autoencoder.reconstruct(self.autoencoder, found_N4HW, 128, 128, self.args.seed + 9, 12):
                rows.append((images_B3HW, [""] * 12))
        draw.grid(self.args.out / "autoencoder.png", rows)

    def results(self) -> None:
        """Write the sample sheet, the model's folder, its tar files, and a copy of the log."""
        out = self.args.out
        transformer, text_encoder = self.base.average.modules
        started = time.monotonic()
        rows = []
        for i, shape in enumerate(SHOWN):
            captions = self._sheet_captions()[i * PER_SHAPE : (i + 1) * PER_SHAPE]
            models = (transformer, text_encoder, self.autoencoder, self.sizes, self.prompts)
            rows.append((draw.samples(*models, captions, shape, self.args.seed + i), captions))
        draw.grid(out / f"samples-{self.base.step}.png", rows)
        export.write(self.folder, self.autoencoder, transformer, text_encoder)
        size = sum(f.stat().st_size for f in self.folder.rglob("*") if f.is_file())
        made = [path.name for path in export.pack(self.folder, out, "micro")]
        self.journal.note("export", bytes=size, files=made, seconds=round(time.monotonic() - started, 1))
        shutil.copy(self.journal.path, out / "log.jsonl")

    def _sheet_captions(self) -> list[str]:
        """Return the captions of the sample sheet: a fixed choice, every second one of a concept of the split held-out."""
        held = [c for c in self.concepts if c.split == "held-out"]
        others = [c for c in self.concepts if c.split != "held-out"]
        colours = list(compose.COLOURS)
        captions = []
        for i in range(PER_SHAPE * len(SHOWN)):
            group = held if i % 2 and held else others
            concept = group[(i // 2 * 7) % len(group)]
            captions.append(plain(concept.phrase, colours[(5 * i + i // 12) % len(colours)]))
        return captions


def _concepts(path: Path) -> list[Concept]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return sorted((Concept(line["name"], line["phrase"], line["split"]) for line in lines), key=lambda c: c.name)


def _sprites(path: Path, concepts: list[Concept], device: torch.device) -> autoencoder.Sprites:
    """Return the flat sprites in the order of `concepts`, and the 3D sprites of the split "base". `path` is the zip file of
    the sprites. Raises ValueError if a concept has no flat sprite.
    """
    names, flat_N4HW = compose.load_sprites(path, "flat")
    place = {name: n for n, name in enumerate(names)}
    missing = [asdict(c) for c in concepts if c.name not in place]
    if missing:
        raise ValueError(
            f"{path} must have a flat sprite of every concept; {len(missing)} are missing, such as {missing[0]['name']!r}"
        )
    flat_K4HW = flat_N4HW[[place[c.name] for c in concepts]].to(device)
    solid, solid_N4HW = compose.load_sprites(path, "3d")
    splits = compose.load_splits(path)
    free = [n for n, name in enumerate(solid) if splits[name] == "base"]
    return autoencoder.Sprites(flat_K4HW, solid_N4HW[free].to(device))


if __name__ == "__main__":
    main()
