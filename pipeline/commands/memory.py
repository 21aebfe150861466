"""`latentmill memory`: measures the memory of training by phase; writes a table and a plot, and gives advice.

The command takes real training steps on random weights of a family's true shapes, because memory depends on shapes alone. Only
settings are read from disk. `latentmill run STAGE --memory` reports the memory of any stage with `stage_report`.
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
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory_plan import BatchShape, MemoryEstimator, cheapest_fit, require_fit
from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
from stages.text_to_image.train.reader import MicroBatch
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
    """A memory measurement to be made: `steps` training steps of the model `family`. `train` holds the settings of the section
    [train]. The images have `pixels` x `pixels` pixels.
    """

    family: Family
    train: TrainConfig
    pixels: int
    steps: int = 6

    @property
    def limit(self) -> int:
        """The memory that training may take, in bytes."""
        return memory_budget(self.train.memory_gb)

    @property
    def estimator(self) -> MemoryEstimator:
        """The `MemoryEstimator` for training the model `family` with the settings `train`."""
        architecture = self.family.architecture
        return MemoryEstimator(self.train, architecture, architecture.transformer_config(None, self.family))

    def batch(self, side: int) -> BatchShape:
        """Return the size of the batch of one training step, as a `BatchShape`. It has `[train] batch_size` images of
        `side` x `side` pixels.
        """
        pixels_per_token = self.family.architecture.pixels_per_token
        return BatchShape(self.train.batch_size, side, side, self.family.text_tokens, pixels_per_token)


def parse_options(project: Project | None, options: dict[str, Any]) -> Profile:
    """Return the measurement that the options of the command `latentmill memory` ask for. `options` is a dict. "family"
    is the name of a model family. "pixels" is the side of the square images. "bits" is the number of bits per weight of
    the base model, as text. "plan" is the memory plan, as text. "rank" is the rank of the adapter. "steps" is the
    number of steps to measure. Raises ValueError if a value cannot be measured.

    A memory plan is "whole", "blocks", "auto" or a number of blocks. All values except "steps" may be None. None stands
    for the value of `project`, the opened project folder. The project's value of "pixels" is its largest resolution.
    Without a project, the defaults are used: the first family, the default settings and 512 pixels.
    """
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
    """Measure the memory of training and print what would fit. Real steps are taken on random weights. `path` is the
    project's folder (--project); its settings are measured. Rows and a plot are written to its folder tables/memory, or
    to ./memory without a project.
    """
    project = open_project(path) if path else None
    for line in report(parse_options(project, options), results_folder(project)):
        click.echo(line)


def results_folder(project: Project | None) -> Path:
    """Return the folder for measured rows and plots: tables/memory in `project`, or ./memory if there is no project."""
    return project.path / "tables" / "memory" if project else Path("memory")


def stage_report(meter: Meter, project: Project, stage_name: str) -> Iterator[str]:
    """Write the memory measurements of a stage's run to a Parquet file, and yield a summary as lines of text. The file
    is tables/memory/STAGE.parquet in `project`, the opened project folder. STAGE is `stage_name`, the name of the
    stage. The file has one row per measured batch. `meter` holds the measurements. If no batch was measured, nothing is
    written.
    """
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
    """Take `steps` training steps, all on the same `batch`, and return the memory measurements. The returned `Meter`
    has one row for each phase of each step, such as "gradients" or "optimizer". `training` is the model with its
    adapter and optimizer state. Raises ValueError if a gradient is not finite.

    The first step takes more memory than the others, because it fills caches.
    """
    meter = Meter()
    for number in range(1, steps + 1):
        meter.step = number
        result = training.step([batch], training.config.lr, meter=meter)
        if not result.finite:
            raise ValueError("memory: the gradient is not finite; choose another precision")
    return meter


def report(profile: Profile, folder: Path) -> Iterator[str]:
    """Measure training steps, and yield the report as lines of text. `profile` says what to measure: model, settings,
    image size and number of steps. The measured rows and a plot are written into `folder`. Without matplotlib, the plot
    is left out. Raises ValueError if the run does not fit into memory. The message names settings that would fit.
    """
    configure_scheduler()  # as training does, before anything asks MLX for an array
    c, batch = profile.train, profile.batch(profile.pixels)
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
    """Return the measurements of `meter` as lines of an aligned table. There is one line for each phase of each step,
    such as "gradients" or "optimizer". The columns are the memory before and after the phase, its peak, and the size of
    MLX's cache. Sizes are texts such as "1.2 MB".
    """
    columns = {"before": "before", "after": "active", "peak": "peak", "cache": "cache"}
    rows = [(row["step"], row["phase"], *(format_bytes(row[name]) for name in columns.values())) for row in meter.rows]
    return format_table(("step", "phase", *columns), rows, right=tuple(columns)).splitlines()


def leak_lines(meter: Meter) -> Iterator[str]:
    """Yield a line of text for each phase that leaks memory. A phase leaks if it retains more memory with every step.
    `meter` holds the memory measurements. If no phase leaks, yield one line. It gives the size of the smallest leak
    that can be found, or says that too few steps were measured.
    """
    found = meter.leaks()
    for phase, count in found.items():
        yield f"LEAK: {phase} retains {format_bytes(count)} more every step"
    if not meter.can_find_leaks:
        yield f"too few steps to find leaks; measure {LEAST_TIMES} or more"
    elif not found:
        yield f"no phase retains {format_bytes(LEAK_BYTES)} or more per step"


def panels(meter: Meter) -> list[Panel]:
    """Return the two panels of the memory plot. One shows the peak memory during a phase, the other the active memory
    after it. A panel has one curve per phase, with the step on the x axis. `meter` holds the measurements.
    """
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
    """Yield lines about the memory for training on one image at a time. `profile` holds the model, the settings and the
    memory limit. First come a heading and one line each for base weights of 16, 8 and 4 bits. These lines give the
    memory for several image sizes. Then comes a line for each image size with the [train] settings that would fit.

    If no settings fit, the line says so.
    """
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
