"""What helps with few pictures: T-LoRA, dropout of ranks, LoRA+, averages of checkpoints, with 4 and with 24 pictures on `micro`.

    python -m data.research.experiments.few_pictures OUT [--seeds 3] [--steps 200] [--only PATTERN] [--workers N]

adds one JSON line per adapter to the file OUT, and prints the table of all rows. Adapters that OUT has are left out. If OUT
is data/measurements/few-pictures.jsonl, the table in data/docs/experiments/few-pictures.md is replaced.

Trained is data/projects/example, or 4 of its pictures, other ones for each seed. *Loss* is that of the 40 pictures of other
subjects in data/projects/example/references, which no run trains on; *style* and *agreement* are those of scoring.py, of
pictures drawn for every third of these subjects.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from data import DOCS, EXAMPLE, MEASUREMENTS
from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import append, call_all
from data.research.experiments.report import with_table
from data.research.experiments.scoring import Scorer
from data.research.experiments.slider import interval
from data.research.experiments.tables import markdown
from pipeline.project.project import Project
from schemas.text_to_image import CAPTIONS
from stages.text_to_image.caption_files import trigger_word
from stages.text_to_image.sampler import LatentSampler
from stages.text_to_image.samples.drawing import decode
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train.task import ImageTask
from stages.tuner.adapters import combine
from stages.tuner.adapters.lora import A
from stages.tuner.adapters.masks import RankMasks
from stages.tuner.blockwise.backprop import BlockwiseForward, model_forward, predict, predict_base
from stages.tuner.checkpoint import ADAPTER, find_checkpoints

LOG = logging.getLogger("few pictures")
PAGE, FILE = DOCS / "experiments" / "few-pictures.md", MEASUREMENTS / "few-pictures.jsonl"
PICTURES = (4, 24)
PLAIN, BASE = "LoRA", "the base"
RATE = 3e-3  # of data/projects/example
CHECKPOINTS = 20  # of a plain run, to average
AVERAGES = {f"average, width {width:g}": width for width in (0.05, 0.1, 0.2)}
MASKED = ", drawn with its mask"
# Name -> settings. LoRA+ has a factor of 16 between the rates of A and B, its authors' advice, and a smaller rate of A.
RUNS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "LoRA, a third of the rate": {"train.lr": RATE / 3},
    "T-LoRA's mask alone": {"train.tlora.start": "zero"},
    "T-LoRA": {"train.tlora.start": "orthogonal"},
    "dropout of 0.25 of the ranks": {"train.rank_dropout": 0.25},
    "LoRA+, rates of A / 4, of B x 4": {"train.optimizer.lr_ratio": 16.0, "train.lr": RATE / 4},
    "LoRA+, rate of A / 16": {"train.optimizer.lr_ratio": 16.0, "train.lr": RATE / 16},
}
BEFORE = ("images", "captions", "buckets", "latents", "embeddings")
MEASURES = ("loss", "style", "agreement")

Row = dict[str, Any]
Adapter = tuple[Mapping[str, mx.array], Mapping[str, float]]


def names_of(run: str) -> list[str]:
    """The adapters that a training gives."""
    if run == PLAIN:
        return [PLAIN, *AVERAGES]
    return [run, run + MASKED] if "train.tlora.start" in RUNS.get(run, {}) else [run]


class MaskedForward(BlockwiseForward):
    """Draws as T-LoRA's authors do: with the ranks that the noise level of the step trains."""

    def __init__(self, model: Any, adapter: Adapter, masks: Callable[[list[float]], Mapping[str, mx.array]]) -> None:
        super().__init__(model, dict(adapter[0]), adapter[1], model.dtype)
        self.whole, self.masks = self.scales, masks

    def __call__(self, **inputs: Any) -> mx.array:
        sigmas: Any = inputs["timesteps_B"].tolist()
        found = self.masks(sigmas)
        names = [block.name for block in self.chain.blocks]
        self.scales = [
            {name: scale * found[f"{block}.{name}"] for name, scale in own.items()}
            for block, own in zip(names, self.whole, strict=True)
        ]
        return super().__call__(**inputs)


class Bench:
    """What all runs share: the tables before `train`, the held-out pictures, the base's pictures. Files lie below `folder`."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.pictures = folder / "pictures"
        shutil.copytree(EXAMPLE / "images", self.pictures)
        shutil.copytree(EXAMPLE / "references", self.pictures / "held")
        self.tables = MemoryTables(folder / "before")
        for name in BEFORE:
            self.tables.run(self._project(), name)
        measured = self.tables.open(self._project({"train.validation.paths": ["held/*"]}), "train")
        self.task = ImageTask(measured)
        self.model = self.task.load_model()
        rows = measured.inputs.rows(CAPTIONS).to_pylist()
        self.trigger, words = trigger_word(measured.inputs.rows(CAPTIONS)), embedding_reader(measured)
        self.empty = mx.array(words.read(next(r["caption_id"] for r in rows if r["role"] == "empty"))).view(mx.bfloat16)[None]
        prompts = sorted((row for row in rows if row["role"] == "preview"), key=lambda row: row["position"])
        self.prompts = {
            row["text"].removeprefix(f"{self.trigger}, "): mx.array(words.read(row["caption_id"])).view(mx.bfloat16)[None]
            for row in prompts[::3]
        }
        drawing = self.tables.open(self._project(), "samples")
        self.drawing = drawing.config
        self.autoencoder = self.task.family.architecture.load_autoencoder(
            drawing.needs["autoencoder"], self.task.family, mx.float32
        )
        base = self._draw(model_forward(self.model, None), folder / "base")
        self.scorer = Scorer(list(base.items()))

    def _project(self, more: Mapping[str, Any] | None = None) -> Project:
        length = {"train.steps": self.steps, "train.checkpoint_every": self.steps, "train.schedule.decay_steps": self.steps - 20}
        return Project(EXAMPLE, {"images.folder": str(self.pictures)} | length | dict(more or {}))

    def _draw(self, forward: BlockwiseForward, folder: Path) -> dict[str, Path]:
        """Subject -> file."""
        c, family = self.drawing, self.task.family
        sampler = LatentSampler("", family, self.model, forward, c.steps or family.sampling_steps, c.guidance, self.empty)
        folder.mkdir(parents=True)
        found = {}
        for n, (subject, text_1TJ) in enumerate(self.prompts.items()):
            latent_1Chw = sampler.draw(text_1TJ, 0, c.width, c.height)
            assert latent_1Chw is not None
            found[subject] = folder / f"{n}.png"
            decode(self.autoencoder, latent_1Chw).save(found[subject])
        return found

    def _losses(self, adapter: Adapter | None, masks: Callable[[list[float]], Mapping[str, mx.array]] | None) -> list[float]:
        """The mean loss of each held-out picture, over the noise levels."""
        found: dict[str, list[float]] = defaultdict(list)
        assert self.task.held_out
        for batch in self.task.held_out.micro_batches():
            term = self.task.objective.validation_term(self.model, batch)
            if adapter:
                of_batch = masks([sample.sigma for sample in batch.samples]) if masks else {}
                scales = {name: scale * of_batch.get(name, 1.0) for name, scale in adapter[1].items()}
                prediction = predict(self.model, dict(adapter[0]), scales, term.inputs)
            else:
                prediction = predict_base(self.model, term.inputs)
            losses: Any = term.loss(prediction)
            for sample, loss in zip(batch.samples, losses.tolist(), strict=True):
                found[sample.crop.image_id].append(loss)
        return [float(np.mean(found[image])) for image in sorted(found)]

    def measure(self, adapter: Adapter | None, masks: Callable[[list[float]], Mapping[str, mx.array]] | None = None) -> Row:
        """By picture, in the order of the pictures or prompts."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        if adapter and masks:
            forward: BlockwiseForward = MaskedForward(self.model, adapter, masks)
        else:
            forward = model_forward(self.model, (dict(adapter[0]), dict(adapter[1])) if adapter else None)
        drawn = self._draw(forward, folder / "pictures")
        scores = [self.scorer.score(path, subject, None) for subject, path in drawn.items()]
        shutil.rmtree(folder)
        found = {name: [round(score[name], 4) for score in scores] for name in ("style", "agreement")}
        return {"loss": [round(loss, 5) for loss in self._losses(adapter, masks)]} | found

    def run(self, name: str, pictures: int, seed: int, wanted: Sequence[str]) -> Iterator[Row]:
        """A row for each of the adapters `wanted`."""
        about: Row = {"pictures": pictures, "seed": seed, "steps": self.steps}
        if name == BASE:
            yield about | {"method": BASE} | self.measure(None)
            return
        tables = self._chosen(pictures, seed)
        settings = {"train.seed": seed} | RUNS[name]
        if name == PLAIN:
            settings |= {"train.checkpoint_every": self.steps // CHECKPOINTS}
        began, project = time.monotonic(), self._project(settings)
        losses = tables.run(project, "train")["loss"].to_numpy()
        about |= {"train_loss": round(float(losses[-len(losses) // 5 :].mean()), 4)}
        about |= {"train_seconds": round(time.monotonic() - began, 1)}
        saved = find_checkpoints(tables.files["train"])[::-1]
        read = self.task.family.architecture.read_adapter
        adapter = read(saved[-1].folder / ADAPTER)
        for each in wanted:
            if each in AVERAGES:
                weights = combine.power_weights([one.step for one in saved], AVERAGES[each])
                found = self.measure(combine.average((read(one.folder / ADAPTER) for one in saved), weights))
            else:
                found = self.measure(adapter, masks_of(project, adapter) if each.endswith(MASKED) else None)
            yield about | {"method": each} | found
        shutil.rmtree(tables.folder)

    def _chosen(self, pictures: int, seed: int) -> MemoryTables:
        """The tables with so many of the pictures that are not held out."""
        tables = self.tables.branch(Path(tempfile.mkdtemp(dir=self.folder)))
        images = sorted(tables.rows["images"].to_pylist(), key=lambda row: str(row["path"]))
        size = {row["image_id"]: (row["width"], row["height"]) for row in tables.rows["buckets"].to_pylist()}
        shown = [row["image_id"] for row in images if not row["path"].startswith("held/")]
        if pictures < len(shown):
            # Of one size, so that a step stays one batch.
            most, _ = Counter(size[each] for each in shown).most_common(1)[0]
            shown = [each for each in shown if size[each] == most]
        kept = {shown[n] for n in np.random.default_rng(seed).permutation(len(shown))[:pictures]} | {""}
        for name in ("images", "captions", "buckets", "latents"):
            rows = tables.rows[name]
            tables.rows[name] = rows.filter(pa.array([each in kept for each in rows["image_id"].to_pylist()]))
        return tables


def masks_of(project: Project, adapter: Adapter) -> Callable[[list[float]], Mapping[str, mx.array]]:
    """Of the adapter as its file holds it: of an orthogonal start, both halves have the mask."""
    masks: RankMasks = project.config.sections["train"].masks
    twice = project.config.sections["train"].orthogonal
    ranks = {key.removesuffix(A): a.shape[0] for key, a in adapter[0].items() if key.endswith(A)}

    def of(sigmas: list[float]) -> Mapping[str, mx.array]:
        found = {}
        for name, rank in ranks.items():
            own_BR = mx.array(masks.of_noise(sigmas, rank // 2 if twice else rank))
            found[name] = mx.concatenate([own_BR, own_BR], axis=1) if twice else own_BR
        return found

    return of


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[Row]) -> str:
    """One line per method and number of pictures: means, and differences from plain LoRA paired by seed and picture."""
    lines = []
    order = [BASE, *(name for run in RUNS for name in names_of(run))]
    values: dict[tuple[str, int], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        values[row["method"], row["pictures"]][row["seed"]] = row
    for method, pictures in ((m, n) for n in (0, *PICTURES) for m in order if (m, n) in values):
        own, plain = values[method, pictures], values.get((PLAIN, pictures), {})
        paired = sorted(own.keys() & plain.keys()) if method != PLAIN else []
        cells = [method, str(pictures or "-"), str(len(own))]
        for name in MEASURES:
            mean = np.mean([row[name] for row in own.values()])
            differences = np.array([np.subtract(own[seed][name], plain[seed][name]) for seed in paired])
            cells += [f"{mean:.4f}" if name == "loss" else f"{mean:.3f}", interval(differences) if paired else "-"]
        lines.append(tuple(cells))
    head = ["adapter", "pictures", "seeds"]
    for name in MEASURES:
        head += ["held-out loss" if name == "loss" else name, "difference from LoRA"]
    return markdown(tuple(head), lines)


_BENCH: list[Bench] = []  # the bench of this worker process


def _work(row: Row, folder: str) -> Row:
    if not _BENCH:
        _BENCH.append(Bench(Path(tempfile.mkdtemp(dir=folder)), row["steps"]))
    for found in _BENCH[0].run(row["run"], row["pictures"], row["seed"], row["wanted"]):
        append(Path(row["out"]), found)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="*", help="names of trainings, with wildcards")
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one helps on a GPU and on many cores")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    done = {(row["method"], row["pictures"], row["seed"]) for row in read_rows(asked.out)}
    wanted = [(BASE, 0, 0), *((run, n, seed) for seed in range(asked.seeds) for n in PICTURES for run in RUNS)]
    todo = [
        {"run": run, "pictures": n, "seed": seed, "steps": asked.steps, "out": str(asked.out), "wanted": lacking}
        for run, n, seed in wanted
        if fnmatch.fnmatch(run, asked.only) and (lacking := [m for m in names_of(run) if (m, n, seed) not in done])
    ]
    for row in call_all(_work, todo, min(asked.workers, max(len(todo), 1))):
        LOG.info("%s, %d pictures, seed %d", row["run"], row["pictures"], row["seed"])
    found = table(read_rows(asked.out))
    LOG.info("\n%s", found)
    if asked.out.resolve() == FILE.resolve():
        PAGE.write_text(with_table(PAGE.read_text(), "few pictures", found))


if __name__ == "__main__":
    main()
