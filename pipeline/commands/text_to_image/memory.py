"""`latentmill memory`: measures the memory of training by phase; writes a table and a plot, and gives advice.

It takes real training steps on random weights of a family's true shapes, because memory depends on shapes alone.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import mlx.core as mx
import pyarrow as pa
import pyarrow.parquet as pq

import stages  # noqa: F401  (before mlx.core)
from pipeline import plots
from pipeline.commands.run import leak_lines
from pipeline.plots import Curve, Panel
from pipeline.project.project import Project
from pipeline.store.disk import format_bytes
from pipeline.terminal import format_table, tell
from stages import footprint
from stages.models.family import Family
from stages.text_to_image.families import FAMILIES, family
from stages.text_to_image.train.batches import MicroBatch
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator
from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
from stages.tuner.blockwise.device import configure_scheduler, memory_budget
from stages.tuner.blockwise.meter import Meter
from stages.tuner.memory import Candidate, MemoryPlan, cheapest_settings, require_fit
from stages.tuner.step import TrainingStep
from stages.tuner.weights import BITS

ROWS, PICTURE = "memory.parquet", "memory.png"
SIDES = (512, 768, 1024)  # pixels: the image sizes for which advice is given
COLORS = {"batch": plots.GREEN, "gradients": plots.BLUE, "optimizer": plots.ORANGE}
PANELS = (("Peak memory in the phase", "peak"), ("Active memory after the phase", "active"))  # title, column
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))  # of the plot's axis


@dataclass(frozen=True)
class Profile:
    family: Family
    train: TrainConfig
    pixels: int  # side of the square images
    steps: int = 6

    @property
    def limit(self) -> int:
        return memory_budget(self.train.memory_gb)

    def estimator(self, side: int) -> ImageEstimator:
        architecture = self.family.architecture
        sizes = architecture.transformer_config(None, self.family.without_references())
        return ImageEstimator(self.train, architecture, sizes, self.batch(side))

    def batch(self, side: int) -> BatchShape:
        pixels_per_token = self.family.architecture.pixels_per_token
        return BatchShape(self.train.batch_size, side, side, self.family.text_tokens, pixels_per_token)


def parse_options(project: Project | None, options: dict[str, Any]) -> Profile:
    """The measurement that the command's options ask for; None stands for the project's value. Raises ValueError."""
    if project:
        train, own_pixels = project.config.sections["train"], max(project.config.sections["buckets"].resolutions)
    else:
        train, own_pixels = profile_settings(), SIDES[0]
    plan = options["plan"] and (int(options["plan"]) if options["plan"].isdigit() else options["plan"])
    changes = {"base_bits": options["bits"] and int(options["bits"]), "rank": options["rank"], "memory": plan}
    train = replace(train, **{name: value for name, value in changes.items() if value is not None})
    default = project.family if project else next(iter(FAMILIES.values()))
    chosen = family(options["family"]) if options["family"] else default
    pixels, per_token = options["pixels"] or own_pixels, chosen.architecture.pixels_per_token
    if pixels < 2 * per_token or pixels % per_token:
        raise ValueError(f"--pixels must be a multiple of {per_token}, {2 * per_token} or more, got {pixels}")
    if options["steps"] < 1:
        raise ValueError(f"--steps must be >= 1, got {options['steps']}")
    return Profile(chosen, train, pixels, options["steps"])


@click.command("memory")
@click.option("--project", "-p", "path", help="The folder of the project whose settings are measured.")
@click.option("--family", help="A model family, measured with random weights.  [default: the project's]")
@click.option("--pixels", type=int, help="Side of the images in pixels.  [default: the project's largest resolution]")
@click.option(
    "--bits", type=click.Choice(["16", "8", "4"]), help="Bits per weight of the base model's blocks ([train] base_bits)."
)
@click.option("--plan", help="Memory plan: whole, blocks, auto, or the number of blocks that keep their activations.")
@click.option("--rank", type=int, help="Rank of the adapter ([train] rank).")
@click.option("--steps", type=int, default=6, show_default=True, help="Number of steps to measure.")
def command(path: str | None, **options: Any) -> None:
    """Measure the memory of training and print what would fit. Real steps are taken on random weights, with the settings
    of the project (--project). Rows and a plot are written to its folder tables/memory, or to ./memory without a
    project.
    """
    project = Project(path) if path else None
    folder = project.path / "tables" / "memory" if project else Path("memory")
    for line in report(parse_options(project, options), folder):
        tell(line)


def prepare(profile: Profile, limit: int) -> tuple[Candidate, TrainingStep, MicroBatch]:
    """Training on random weights, with plan and limit as in training; ValueError if it needs more than `limit` bytes."""
    batch = profile.batch(profile.pixels)
    plan = require_fit(profile.estimator(profile.pixels), limit)
    training = random_training(profile.family, profile.train, MemoryPlan(plan.plan, plan.memory(limit).live))
    return plan, training, random_batch(profile.family, replace(batch, samples=plan.samples))


def measure_steps(training: TrainingStep, batch: MicroBatch, steps: int) -> Meter:
    """Train on one batch, and measure each phase of each step. Raises ValueError if a gradient is not finite."""
    meter = Meter()
    # An array may get a larger buffer from MLX's cache than it needs, and all of it counts: that would hide small leaks.
    cache = mx.set_cache_limit(0)
    try:
        # The first step takes more memory, because it fills caches.
        for number in range(1, steps + 1):
            meter.step = number
            result = training.step([batch], training.config.lr, meter=meter)
            if not result.finite:
                raise ValueError("memory: the gradient is not finite; choose another precision")
    finally:
        mx.set_cache_limit(cache)
    return meter


def report(profile: Profile, folder: Path) -> Iterator[str]:
    """Measure, write rows and plot, yield the report. Raises ValueError as `prepare` does."""
    configure_scheduler()  # as training does, before anything asks MLX for an array
    c = profile.train
    plan, training, batch = prepare(profile, profile.limit)
    meter = measure_steps(training, batch, profile.steps)
    del training
    images = "" if plan.samples == 1 else f" x {plan.samples}"
    title = f"{profile.family.title}, {profile.pixels} px{images}, {c.base_bits} bits"
    yield f"{title}, {c.variant} of rank {c.rank}, {c.optimizer.kind}, plan {plan.plan}"
    columns = {"before": "before", "after": "active", "peak": "peak"}
    rows = [(row["step"], row["phase"], *(format_bytes(row[name]) for name in columns.values())) for row in meter.rows]
    yield from format_table(("step", "phase", *columns), rows, right=tuple(columns)).splitlines()
    held = format_bytes(meter.rows[0]["before"])
    yield f"arrays: peak {format_bytes(meter.peak)}, estimated {format_bytes(plan.peak)}; held between steps: {held}"
    expected = f", estimated {format_bytes(plan.footprint)}" if plan.footprint > plan.peak else ""
    yield f"as the machine counts: peak {format_bytes(footprint.peak())}{expected}"
    yield from leak_lines(meter)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"family": profile.family.name, "pixels": profile.pixels, "samples": plan.samples, "bits": c.base_bits}
    facts |= {"rank": c.rank, "variant": c.variant, "optimizer": c.optimizer.kind, "plan": str(plan.plan)}
    pq.write_table(pa.Table.from_pylist([facts | row for row in meter.rows]), folder / ROWS)
    yield f"rows: {folder / ROWS}"
    try:
        plots.save(panels(meter), folder / PICTURE, title=f"Memory of training by phase: {title}, plan {plan.plan}")
        yield f"plot: {folder / PICTURE}"
    except plots.MatplotlibMissing as error:
        yield str(error)
    yield from advice(profile)


def panels(meter: Meter) -> list[Panel]:
    unit, scale = next((pair for pair in UNITS if meter.peak >= pair[1]), UNITS[-1])
    phases = list(dict.fromkeys(row["phase"] for row in meter.rows))
    top = (0.0, 1.1 * meter.peak / scale)
    found = []
    for title, column in PANELS:
        curves = []
        for phase in phases:
            rows = [row for row in meter.rows if row["phase"] == phase]
            x, y = [row["step"] for row in rows], [row[column] / scale for row in rows]
            curves.append(Curve(phase, COLORS.get(phase, plots.PURPLE), x, y, marked=True))
        found.append(Panel(title, "step", unit, curves, top))
    return found


def advice(profile: Profile) -> Iterator[str]:
    """What one image needs with 16, 8 and 4 bits, then the [train] settings that would fit for each size."""
    yield f"one image may take {format_bytes(profile.limit)} and needs, with plan blocks / plan whole:"
    train = replace(profile.train, memory="auto", micro_batch=1)
    estimators = {side: replace(profile, train=replace(train, base_bits=BITS[0])).estimator(side) for side in SIDES}
    for bits in BITS:
        needs = {side: each.changed({"train": {"base_bits": bits}}).blocks(1) for side, each in estimators.items()}
        sizes = {side: [found.memory(plan).footprint for plan in ("blocks", "whole")] for side, found in needs.items()}
        peaks = {side: [format_bytes(each) for each in pair] for side, pair in sizes.items()}
        yield f"  base_bits = {bits}: " + ", ".join(f"{side} px {blocks} / {whole}" for side, (blocks, whole) in peaks.items())
    for side, estimator in estimators.items():
        remedy = cheapest_settings(estimator, profile.limit)
        changes = {"base_bits": BITS[0], **remedy.settings.get("train", {})}
        changes = {name: value for name, value in changes.items() if value != getattr(train, name)}
        settings = f" with {replace(remedy, settings={'train': changes})}" if changes else ""
        if remedy.peak > profile.limit:
            yield f"{side} px would not fit:{settings} it needs {format_bytes(remedy.peak)}"
        else:
            yield f"{side} px would fit{settings}, plan {estimator.changed(remedy.settings).best(profile.limit).plan}"


# Probes of `latentmill doctor --measure`


def probes(name: str, budget: int) -> dict[str, Callable[[], dict[str, Any]]]:
    return {f"training {side} px": functools.partial(probe, name, side, budget) for side in (512, 1024)}


def probe(name: str, side: int, budget: int, steps: int = 20) -> dict[str, Any]:
    """Speed and memory of training on random weights, 4 bits, after a warm-up step. Raises ValueError as `prepare` does."""
    profile = Profile(family(name), profile_settings("adamw8bit", base_bits=4), side)
    plan, step, batch = prepare(profile, budget)
    mx.reset_peak_memory()
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        step.step([batch], profile.train.lr)
        seconds.append(time.perf_counter() - began)
    peak = mx.get_peak_memory()
    del step
    gc.collect()
    mx.clear_cache()
    times = {"first_s": seconds[0], "s": median(seconds[1:]), "least_s": min(seconds[1:]), "most_s": max(seconds[1:])}
    sizes = {"peak_bytes": peak, "estimated_bytes": plan.peak, "footprint_bytes": footprint.peak()}
    return times | {"plan": str(plan.plan), "bits": 4, **sizes}
