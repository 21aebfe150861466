"""What training takes of memory: by phase and step, as a table, a plot and plain advice. `latentmill memory`.

Random weights in the family's true shape, since memory depends on shapes alone; nothing is read from disk but settings.
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
from pipeline.terminal import format_bytes, format_table
from stages.models.family import Family
from stages.models.flux2.transformer import Flux2Config
from stages.text_to_image.families import family
from stages.text_to_image.train import memory_plan
from stages.text_to_image.train.config import TrainConfig
from stages.tuner.blockwise.backprop import Plan
from stages.tuner.blockwise.device import limit_command_buffers, memory_budget
from stages.tuner.blockwise.meter import LEAK_BYTES, LEAST_TIMES, Meter
from tests.bench.steps import Rig, settings

if TYPE_CHECKING:
    from pipeline.project.project import Project

ROWS, PICTURE = "memory.parquet", "memory.png"
SIDES = (512, 768, 1024)  # pixels: what is advised on
COLORS = {"batch": plots.GREEN, "gradients": plots.BLUE, "optimizer": plots.ORANGE}
PANELS = (("Peak memory in the phase", "peak"), ("Active memory after the phase", "active"))  # title, column
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))  # of the plot's axis


@dataclass(frozen=True)
class Setup:
    """What is trained, as far as memory cares: images of that side, as [train] says."""

    family: Family
    train: TrainConfig
    pixels: int
    steps: int = 6  # that are measured

    @property
    def limit(self) -> int:
        """Bytes that training may take."""
        return memory_budget(self.train.memory_gb)

    @property
    def ask(self) -> memory_plan.MemoryEstimator:
        """What training would ask of these shapes."""
        return memory_plan.MemoryEstimator(self.train, Flux2Config.from_dict(self.family.transformer))

    def batch(self, side: int) -> memory_plan.Batch:
        """A whole batch of images of that side."""
        return memory_plan.Batch(self.train.batch_size, side, side, self.family.text_tokens)


def asked(project: Project | None, given: dict[str, Any]) -> Setup:
    """A project's settings at its largest resolution, or a family's; what is `given` instead of None holds instead.

    ValueError for what cannot be measured.
    """
    pixels, steps = given["pixels"], given["steps"]
    if project:
        train, own = project.config.sections["train"], max(project.config.sections["buckets"].resolutions)
    else:
        train, own = settings(), SIDES[0]
    plan = given["plan"] and (int(given["plan"]) if given["plan"].isdigit() else given["plan"])
    other = {"base_bits": given["bits"] and int(given["bits"]), "rank": given["rank"], "memory": plan}
    train = replace(train, **{name: value for name, value in other.items() if value is not None})
    chosen = project.family if project and not given["family"] else family(given["family"] or "klein-base-4b")
    pixels = own if pixels is None else pixels
    if pixels < 32 or pixels % 16:
        raise ValueError(f"memory: {pixels} pixels are wrong; a multiple of 16 is wanted, 512 for instance")
    if steps < 1:
        raise ValueError(f"memory: {steps} steps are wrong; 1 or more is wanted")
    return Setup(chosen, train, pixels, steps)


@click.command("memory")
@click.option("--project", "-p", "path", help="The project whose settings are used; without it, --family.")
@click.option("--family", help="A model family; its true shape is measured, with random weights.")
@click.option("--pixels", type=int, help="Side of the images, pixels; default: a project's largest resolution.")
@click.option("--bits", type=click.Choice(["16", "8", "4"]), help="Bits per weight of the base.")
@click.option("--plan", help="whole, blocks, a number of blocks that keep their activations, or auto.")
@click.option("--rank", type=int, help="Rank of the adapter.")
@click.option("--steps", type=int, default=6, show_default=True, help="Number of steps to measure.")
def command(path: str | None, **given: Any) -> None:
    """Measure the memory that training takes, phase by phase, and tell what would fit."""
    project = open_project(path) if path else None
    for line in report(asked(project, given), folder_of(project)):
        click.echo(line)


def stage_report(meter: Meter, project: Project, stage_name: str) -> Iterator[str]:
    """What a stage's run took, batch by batch: the rows go into the project's tables/memory, a line each says the rest."""
    batches = [row for row in meter.rows if row["phase"] == stage_name]
    if not batches:
        yield f"memory: {stage_name} made nothing, so there is nothing to measure"
        return
    last = format_bytes(batches[-1]["active"])
    yield f"memory: peak {format_bytes(meter.peak)} in {len(batches)} batches, {last} after the last"
    yield from leaks(meter)
    file = folder_of(project) / f"{stage_name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{"family": project.family.name} | row for row in meter.rows]), file)
    yield f"rows: {file}"


def folder_of(project: Project | None) -> Path:
    """Where the rows go."""
    return project.path / "tables" / "memory" if project else Path("memory")


def profile(rig: Rig, plan: Plan, steps: int) -> Meter:
    """Train some steps, phase by phase. The first also fills caches."""
    meter = Meter()
    for number in range(1, steps + 1):
        meter.step = number
        rig.step(plan, meter)
    return meter


def report(setup: Setup, folder: Path) -> Iterator[str]:
    """Profile, write the rows and the plot into `folder`, and say it all, line by line. ValueError if it cannot memory_plan."""
    limit_command_buffers()  # as training does, before anything asks MLX for an array
    c, batch = setup.train, setup.batch(setup.pixels)
    samples, plan, need = memory_plan.settle(setup.ask, batch, setup.limit)
    rig = Rig(setup.family, c, replace(batch, samples=samples))
    rig.bound = memory_plan.bound(setup.ask.estimate(batch, samples), plan, setup.limit)
    meter = profile(rig, plan, setup.steps)
    del rig
    images = "" if samples == 1 else f" x {samples}"
    what = f"{setup.family.title}, {setup.pixels} px{images}, {c.base_bits} bits"
    yield f"{what}, {c.variant} of rank {c.rank}, {c.optimizer.kind}, plan {plan}"
    yield from lines(meter)
    yield f"peak {format_bytes(meter.peak)}, expected {format_bytes(need)}, of it held {format_bytes(meter.rows[0]['before'])}"
    yield from leaks(meter)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"family": setup.family.name, "pixels": setup.pixels, "samples": samples, "bits": c.base_bits, "rank": c.rank}
    facts |= {"variant": c.variant, "optimizer": c.optimizer.kind, "plan": str(plan)}
    pq.write_table(pa.Table.from_pylist([facts | row for row in meter.rows]), folder / ROWS)
    yield f"rows: {folder / ROWS}"
    try:
        plots.save(panels(meter), folder / PICTURE, title=f"Memory of training by phase: {what}, plan {plan}")
        yield f"plot: {folder / PICTURE}"
    except plots.MatplotlibMissing as error:
        yield str(error)
    yield from advice(setup)


def lines(meter: Meter) -> Iterator[str]:
    """Format a meter's rows as a table: MLX's memory before and after each phase of each step, its peak and its cache."""
    sizes = ("before", "active", "peak", "cache")
    rows = [(row["step"], row["phase"], *(format_bytes(row[name]) for name in sizes)) for row in meter.rows]
    yield from format_table(
        ("step", "phase", "before", "after", "peak", "cache"), rows, right=("before", "after", *sizes)
    ).splitlines()


def leaks(meter: Meter) -> Iterator[str]:
    """What grows from step to step, with the phase that grows; or from what size on a growth would have been seen."""
    found = meter.leaks()
    for phase, count in found.items():
        yield f"LEAK: {phase} keeps {format_bytes(count)} more every step"
    if not meter.can_find_leaks:
        yield f"too few steps to tell whether a phase keeps more from step to step; {LEAST_TIMES} or more are wanted"
    elif not found:
        yield f"no phase keeps {format_bytes(LEAK_BYTES)} or more from step to step"


def panels(meter: Meter) -> list[Panel]:
    """The plot's panels: each phase's peak, and the active memory after each phase, over the steps."""
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


def advice(setup: Setup) -> Iterator[str]:
    """What a step would need at other resolutions and bits, and what that means for this device."""
    c, config, limit = replace(setup.train, memory="auto", micro_batch=1), setup.ask.meta_model.config, setup.limit
    packings: list[dict[str, Any]] = [{"base_bits": bits} for bits in memory_plan.BITS]
    yield f"one image may take {format_bytes(limit)} and needs, computing every block twice (blocks) or none (whole):"
    for packing in packings:
        ask = memory_plan.MemoryEstimator(replace(c, **packing), config)
        found = {side: ask.estimate(setup.batch(side), 1) for side in SIDES}
        cells = [f"{side} px {format_bytes(p.peak('blocks'))} / {format_bytes(p.peak('whole'))}" for side, p in found.items()]
        yield f"  base_bits = {ask.c.base_bits}: " + ", ".join(cells)
    for side in SIDES:
        remedy = memory_plan.mended(memory_plan.MemoryEstimator(replace(c, **packings[0]), config), setup.batch(side), limit)
        other = {name: value for name, value in (packings[0] | remedy.settings).items() if value != getattr(c, name)}
        using = f" with {replace(remedy, settings=other)}" if other else ""
        if remedy.needs > limit:
            yield f"{side} px would not fit:{using} it needs {format_bytes(remedy.needs)}"
        else:
            yield f"{side} px would fit{using}, plan {remedy.plan}"
