"""Training runs of the bundled model `micro`, sound ones and ones with a planted mistake: what they say, and what they should.

    python -m tests.stages.text_to_image.train.sound_runs OUT [--workers 6] [--only PATTERN]

runs all of them in worker processes and adds one JSON line per run to the file OUT. It needs no Lance, so it also runs on a
machine with a GPU. The tests of `test_sound_start.py` run some of them.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image

from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import run_all
from pipeline.project.project import Project
from stages.models.family import Family
from stages.models.flux2.load import load_flux2
from stages.models.text.encoder import TextEncoder
from stages.run import Report
from stages.text_to_image.families import family
from stages.text_to_image.latents import encode
from stages.text_to_image.train import task
from stages.text_to_image.train.config import NoiseConfig, TrainConfig
from stages.text_to_image.train.sound_start import uninformed_mse
from stages.tuner.config import OptimizerConfig
from tests.projects import ROOT
from tests.stages.text_to_image.train.runs import tables_of

LOG = logging.getLogger("sound_runs")
MICRO, WEIGHTS = family("micro"), ROOT / "data" / "assets" / "micro"
SIDE, CROPS = 128, 12
CONFIG = TrainConfig(steps=50, batch_size=4, rank=4, precision="float32", checkpoint_every=1000)
RATES = {"adamw": 1e-4, "adamw8bit": 1e-4, "adafactor": 1e-4, "lion": 2e-5, "prodigy": 1.0}
VARIANTS = ("lora", "dora", "lokr")
BASES = ("logit_normal", "uniform", "low_noise", "high_noise")
WARNINGS = ("the latents", "the embeddings", "times that of", "the update", "has not moved", "not finite")
RIGHT, WRONG = 1.0, 4.0  # guidance in training
TOO_HIGH = "times that of a model that knows nothing"

Tables = dict[str, pa.Table]


# Planted mistakes


@contextmanager
def other_normalisation() -> Iterator[Family]:
    from stages.models.flux2.autoencoder import Autoencoder

    flux1 = mx.array(0.1159), mx.array(1 / 0.3611)
    with patch.object(Autoencoder, "_statistics", lambda self: flux1):
        yield MICRO


PLANTS: dict[str, Callable[[], AbstractContextManager[Family]]] = {
    "": lambda: nullcontext(MICRO),
    "layers": lambda: nullcontext(replace(MICRO, text_layers=(1, 3, 5))),
    "padding": lambda: nullcontext(replace(MICRO, text_padding="start")),
    "normalisation": other_normalisation,
}
MISTAKES = {
    "layers": r"^the embeddings are not those of .*: the hidden states of the first token have the sizes 1\.2",
    "padding": r"^the embeddings are padded at the start, where .* was trained with padding at the end",
    "normalisation": r"^the latents have mean .* and standard deviation 0\.3\d, where the transformer was trained on 0 and 1",
}


# Inputs


@functools.cache
def pictures() -> tuple[list[np.ndarray], list[str]]:
    folder = ROOT / "data" / "projects" / "example" / "images"
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()][:CROPS]
    return [np.asarray(Image.open(folder / row["file_name"]).convert("RGB").resize((SIDE, SIDE))) for row in rows], [
        row["text"] for row in rows
    ]


@functools.cache
def encoded_pictures(plant: str) -> list[np.ndarray]:
    with PLANTS[plant]():
        autoencoder = MICRO.architecture.load_autoencoder(WEIGHTS / "vae", MICRO, mx.float32)
        return [encode(autoencoder, each) for each in pictures()[0]]


@functools.cache
def tables(plant: str = "") -> Tables:
    """Pictures with captions, encoded by micro with the mistake `plant`, or none."""
    pixels, texts = pictures()
    words = encoded_pictures("normalisation" if plant == "normalisation" else "")
    with PLANTS[plant]() as record:
        encoder = TextEncoder(WEIGHTS / "text_encoder", WEIGHTS / "tokenizer", record, "float32")
        encoded = list(encoder.encode([*texts, ""]))
    places = [{"image_id": f"i{n}", "width": SIDE, "height": SIDE, "crop_w": 1.0, "crop_h": 1.0} for n in range(len(pixels))]
    named = [("caption", f"i{n}", f"c{n}", 0) for n in range(len(texts))] + [("empty", "", "empty", 0)]
    latents = [{"shape": list(w.shape), "tensor": w.ravel().tolist()} for w in words]
    embeddings = [
        {"caption_id": caption_id, "tokens": e.tokens, "shape": list(e.words.shape), "tensor": e.words.ravel().tolist()}
        for (_, _, caption_id, _), e in zip(named, encoded, strict=True)
    ]
    return tables_of(places, SIDE, latents, named, embeddings)


def write_guided(folder: Path) -> Path:
    """micro, reading a guidance value: at 1 it is micro, at 4 it predicts for less noise than there is, as guidance does."""
    model = load_flux2(WEIGHTS / "transformer", MICRO, mx.float32)
    much_1D, little_1D = (model._embed("timestep", mx.array([sigma])) for sigma in (0.9, 0.1))
    moved_D = (little_1D - much_1D)[0]
    folder.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    for file in (WEIGHTS / "transformer").glob("*.safetensors"):
        arrays |= mx.load(str(file))
    stem = "time_guidance_embed.timestep_embedder."
    frequencies = np.exp(-math.log(10000) * np.arange(128) / 128)
    at_1, at_4 = (np.concatenate([np.cos(1000 * g * frequencies), np.sin(1000 * g * frequencies)]) for g in (RIGHT, WRONG))
    only_4 = at_4 - at_1 * (at_4 @ at_1) / (at_1 @ at_1)
    width = model.config.hidden
    first, second = np.zeros(arrays[f"{stem}linear_1.weight"].shape, np.float32), np.zeros((width, width), np.float32)
    first[0] = only_4 / (only_4 @ at_4)
    second[:, 0] = np.array(moved_D) * (1 + math.exp(-1))  # SiLU(1) is 1 / (1 + 1/e)
    other = stem.replace("timestep", "guidance")
    arrays |= {f"{other}linear_1.weight": mx.array(first), f"{other}linear_2.weight": mx.array(second)}
    mx.save_safetensors(str(folder / "diffusion_pytorch_model.safetensors"), arrays)
    sizes = json.loads((WEIGHTS / "transformer" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"guidance_embeds": True}))
    return folder


# Runs


@dataclass(frozen=True)
class Case:
    """A run. `plant` is the mistake in its tables. `guidance` is the guidance value in training, None for a model that reads
    none. `warning` is a pattern of the one warning that it must give; without it, it must give none. `falls` is True if its
    loss must not end higher than it began.
    """

    name: str
    config: TrainConfig
    plant: str = ""
    guidance: float | None = None
    warning: str = ""
    falls: bool = False


@dataclass
class Result:
    rows: list[dict[str, Any]]
    said: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.said if any(part in line for part in WARNINGS)]

    @property
    def ratios(self) -> list[float]:
        return [row["loss"] / uninformed_mse(row["sigma"]) for row in self.rows if 0.4 <= row["sigma"] <= 0.9]


def sound_cases() -> list[Case]:
    found, kinds = [], list(RATES)
    for seed in range(20):
        kind, variant = kinds[seed % len(kinds)], VARIANTS[seed % len(VARIANTS)]
        noise: Any = NoiseConfig(base=BASES[seed % len(BASES)])  # type: ignore[arg-type]
        found.append(Case(f"sound {seed}", _config(kind, variant, seed=seed, noise=noise)))
    return found


def long_cases() -> list[Case]:
    return [
        Case(f"long {kind} {variant}", _config(kind, variant, steps=500, batch_size=1), falls=True)
        for variant in VARIANTS
        for kind in RATES
    ]


def planted_cases(seeds: int = 3) -> list[Case]:
    """Latents or embeddings are wrong, which is named before the first step."""
    return [
        Case(f"{plant} {seed}", replace(CONFIG, steps=1, seed=seed), plant, warning=pattern)
        for plant, pattern in MISTAKES.items()
        for seed in range(seeds)
    ]


def guidance_cases(seeds: int = 3, steps: int = 50) -> list[Case]:
    return [
        Case(
            f"guidance {guidance:g} {seed}",
            replace(CONFIG, steps=steps, seed=seed, caption_dropout=0.0),
            guidance=guidance,
            warning=TOO_HIGH if guidance == WRONG else "",
        )
        for seed in range(seeds)
        for guidance in (RIGHT, WRONG)
    ]


def _config(kind: str, variant: str, **settings: Any) -> TrainConfig:
    chosen: Any = {"optimizer": OptimizerConfig(kind=kind), "lr": RATES[kind], "variant": variant, **settings}  # type: ignore[arg-type]
    return replace(CONFIG, **chosen)


def run(case: Case, folder: Path) -> Result:
    folder.mkdir(parents=True)
    (folder / "images").mkdir()
    (folder / "project.toml").write_text('[project]\nfamily = "micro"\n')
    record, transformer = MICRO, WEIGHTS / "transformer"
    if case.guidance is not None:
        record, transformer = replace(MICRO, guidance_embedded=True), write_guided(folder / "transformer")
    memory, said = MemoryTables(folder / "tables"), list[str]()
    memory.rows = dict(tables(case.plant))
    needs = {"family": record, "transformer": transformer}
    with patch.object(task, "GUIDANCE", case.guidance or task.GUIDANCE):
        rows = memory.run(Project(folder), "train", Report(said.append), config=case.config, needs=needs)
    return Result(rows.to_pylist(), said)


def problem(case: Case, result: Result) -> str:
    if len(result.rows) != case.config.steps * case.config.batch_size:
        return f"{len(result.rows)} rows"
    if len(result.warnings) != bool(case.warning) or not re.search(case.warning, "\n".join(result.warnings)):
        return f"warnings: {result.warnings}"
    first, last = (float(np.mean(part)) for part in (result.ratios[:100], result.ratios[-100:])) if case.falls else (1.0, 0.0)
    return f"the loss rises from {first:.3f} to {last:.3f}" if last > first else ""


# All of them


def work(case: Any, folder: str) -> dict[str, Any]:
    began = time.perf_counter()
    result = run(case, Path(folder, case.name))
    ratios = result.ratios
    return {
        "case": case.name,
        "steps": case.config.steps,
        "problem": problem(case, result),
        "warnings": result.warnings,
        "first": round(float(np.mean(ratios[:100])), 4) if ratios else None,
        "last": round(float(np.mean(ratios[-100:])), 4) if ratios else None,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--only", default="*", help="names of runs, with wildcards")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    every: list[Any] = [*long_cases(), *guidance_cases(), *sound_cases(), *planted_cases()]
    chosen = [case for case in every if fnmatch.fnmatch(case.name, asked.only)]
    wrong = 0
    for row in run_all(work, chosen, asked.out, asked.workers):
        wrong += bool(row["problem"])
        LOG.info("%s: %s, %s s", row["case"], row["problem"] or "as it should", row["seconds"])
    LOG.info("%d runs, %d not as they should", len(chosen), wrong)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
