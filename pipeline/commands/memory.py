"""`latentmill memory`: measures the memory of training by phase; writes a table and a plot, and gives advice.

It takes real training steps on random weights of a family's true shapes, because memory depends on shapes alone. `latentmill
run STAGE --memory` reports the memory of any stage with `stage_report`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands import plots
from pipeline.commands.plots import Curve, Panel
from pipeline.options import open_project
from pipeline.store.disk import format_bytes
from pipeline.terminal import format_table
from stages.models.family import Family
from stages.text_to_image.families import FAMILIES, family
from stages.text_to_image.train.batches import MicroBatch
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory_plan import BatchShape, MemoryEstimator, cheapest_fit, require_fit
from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
from stages.tuner.blockwise.device import configure_scheduler, memory_budget
from stages.tuner.blockwise.meter import LEAK_BYTES, LEAST_TIMES, Meter
from stages.tuner.memory_plan import live_bytes_limit
from stages.tuner.quantize import BITS
from stages.tuner.step import TrainingStep

if TYPE_CHECKING:
    from pipeline.project.project import Project

ROWS, PICTURE = "memory.parquet", "memory.png"
SIDES = (512, 768, 1024)  # pixels: the image sizes for which advice is given
COLORS = {"batch": plots.GREEN, "gradients": plots.BLUE, "optimizer": plots.ORANGE}
PANELS = (("Peak memory in the phase", "peak"), ("Active memory after the phase", "active"))  # title, column
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))  # of the plot's axis


@dataclass(frozen=True)
class Profile:
    """What to measure."""

    family: Family
    train: TrainConfig
    pixels: int  # side of the square images
    steps: int = 6

    @property
    def limit(self) -> int:
        """Memory that training may take, bytes."""
        return memory_budget(self.train.memory_gb)

    @property
    def estimator(self) -> MemoryEstimator:
        architecture = self.family.architecture
        return MemoryEstimator(self.train, architecture, architecture.transformer_config(None, self.family))

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
    project = open_project(path) if path else None
    for line in report(parse_options(project, options), results_folder(project)):
        click.echo(line)


def results_folder(project: Project | None) -> Path:
    return project.path / "tables" / "memory" if project else Path("memory")


def stage_report(meter: Meter, project: Project, stage_name: str) -> Iterator[str]:
    """Write tables/memory/STAGE.parquet, one row per measured batch, and yield a summary."""
    batches = [row for row in meter.rows if row["phase"] == stage_name]
    if not batches:
        yield f"memory: {stage_name} computed no batch, so nothing was measured"
        return
    last = format_bytes(batches[-1]["active"])
    yield f"memory: peak {format_bytes(meter.peak)} in {len(batches)} batches, {last} after the last"
    yield from leak_lines(meter)
    file = results_folder(project) / f"{stage_name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{"family": project.family.name} | row for row in meter.rows]), file)
    yield f"rows: {file}"


def measure_steps(training: TrainingStep, batch: MicroBatch, steps: int) -> Meter:
    """Train on one batch, and measure each phase of each step. Raises ValueError if a gradient is not finite."""
    meter = Meter()
    # The first step takes more memory, because it fills caches.
    for number in range(1, steps + 1):
        meter.step = number
        result = training.step([batch], training.config.lr, meter=meter)
        if not result.finite:
            raise ValueError("memory: the gradient is not finite; choose another precision")
    return meter


def report(profile: Profile, folder: Path) -> Iterator[str]:
    """Measure, write rows and plot, yield the report. Raises ValueError, with settings that would fit, if the run does not."""
    configure_scheduler()  # as training does, before anything asks MLX for an array
    c, batch = profile.train, profile.batch(profile.pixels)
    # Plans and limits as in training, so that what is measured is what training takes.
    plan = require_fit(profile.estimator, batch, profile.limit)
    training = random_training(profile.family, c)
    training.plan, training.live_bytes = plan.plan, live_bytes_limit(plan.estimate, plan.plan, profile.limit)
    meter = measure_steps(training, random_batch(profile.family, replace(batch, samples=plan.samples)), profile.steps)
    del training
    images = "" if plan.samples == 1 else f" x {plan.samples}"
    title = f"{profile.family.title}, {profile.pixels} px{images}, {c.base_bits} bits"
    yield f"{title}, {c.variant} of rank {c.rank}, {c.optimizer.kind}, plan {plan.plan}"
    yield from meter_table(meter)
    held = format_bytes(meter.rows[0]["before"])
    yield f"peak {format_bytes(meter.peak)}, estimated {format_bytes(plan.needs)}; held between steps: {held}"
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


def meter_table(meter: Meter) -> list[str]:
    columns = {"before": "before", "after": "active", "peak": "peak", "cache": "cache"}
    rows = [(row["step"], row["phase"], *(format_bytes(row[name]) for name in columns.values())) for row in meter.rows]
    return format_table(("step", "phase", *columns), rows, right=tuple(columns)).splitlines()


def leak_lines(meter: Meter) -> Iterator[str]:
    """A line for each phase that retains more with every step, or one with the smallest leak that can be found."""
    found = meter.leaks()
    for phase, count in found.items():
        yield f"LEAK: {phase} retains {format_bytes(count)} more every step"
    if not meter.can_find_leaks:
        yield f"too few steps to find leaks; measure {LEAST_TIMES} or more"
    elif not found:
        yield f"no phase retains {format_bytes(LEAK_BYTES)} or more per step"


def panels(meter: Meter) -> list[Panel]:
    unit, scale = next((pair for pair in UNITS if meter.peak >= pair[1]), UNITS[-1])
    phases = list(dict.fromkeys(row["phase"] for row in meter.rows))
    top = (0.0, 1.1 * meter.peak / scale)
    return [Panel(title, "step", unit, _curves(meter, phases, column, scale), top) for title, column in PANELS]


def _curves(meter: Meter, phases: list[str], column: str, scale: float) -> list[Curve]:
    curves = []
    for phase in phases:
        rows = [row for row in meter.rows if row["phase"] == phase]
        x, y = [row["step"] for row in rows], [row[column] / scale for row in rows]
        curves.append(Curve(phase, COLORS.get(phase, plots.PURPLE), x, y, marked=True))
    return curves


def advice(profile: Profile) -> Iterator[str]:
    """What one image needs with 16, 8 and 4 bits, then the [train] settings that would fit for each size."""
    train = replace(profile.train, memory="auto", micro_batch=1)
    estimators = [profile.estimator.with_config(replace(train, base_bits=bits)) for bits in BITS]
    yield f"one image may take {format_bytes(profile.limit)} and needs, with plan blocks / plan whole:"
    for estimator in estimators:
        needs = {side: estimator.estimate(profile.batch(side), 1) for side in SIDES}
        cells = [f"{side} px {format_bytes(p.peak('blocks'))} / {format_bytes(p.peak('whole'))}" for side, p in needs.items()]
        yield f"  base_bits = {estimator.config.base_bits}: " + ", ".join(cells)
    for side in SIDES:
        remedy = cheapest_fit(estimators[0], profile.batch(side), profile.limit)
        changes = {"base_bits": BITS[0], **remedy.settings}
        changes = {name: value for name, value in changes.items() if value != getattr(train, name)}
        settings = f" with {replace(remedy, settings=changes)}" if changes else ""
        if remedy.needs > profile.limit:
            yield f"{side} px would not fit:{settings} it needs {format_bytes(remedy.needs)}"
        else:
            yield f"{side} px would fit{settings}, plan {remedy.plan}"
