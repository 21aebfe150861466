"""What training takes of memory: by phase and step, as a table, a plot and plain advice. `latentmill memory`.

Random weights in the family's true shape, since memory depends on shapes alone; nothing is read from disk but settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import stages  # noqa: F401  (before mlx.core)
from pipeline import plot
from pipeline.bench_train import Rig, bits_of
from pipeline.plot import Chart, Curve, Panel
from pipeline.terminal import spell_bytes
from stages.models.families import Family, family
from stages.models.flux2 import Flux2Config
from stages.tuner.backprop import Plan
from stages.tuner.memory import Footprint, Meter, budget
from stages.tuner.planner import weight_bytes

if TYPE_CHECKING:
    from pipeline.project import Project

ROWS, PICTURE = "memory.parquet", "memory.png"
SIDES = (512, 768, 1024)  # pixels: what is advised on
BITS = (16, 8, 4)
COLORS = {"batch": plot.GREEN, "gradients": plot.BLUE, "optimizer": plot.ORANGE}
PANELS = (("peak", "peak"), ("active after", "active"))  # title, column
SCALES = (("MB", 1e6), ("10 MB", 1e7), ("100 MB", 1e8), ("GB", 1e9), ("10 GB", 1e10))  # of the plot's axis


@dataclass(frozen=True)
class Setup:
    """What is trained, as far as memory cares. `plan` is backprop's, or auto; `limit`: bytes that training may take."""

    family: Family
    pixels: int
    bits: int = 16
    rank: int = 32
    optimizer: str = "adamw"
    plan: str = "auto"
    steps: int = 6
    limit: int = 0

    @property
    def may_take(self) -> int:
        """The limit, or the device's memory less headroom."""
        return self.limit or budget()


def of_project(project: Project, given: dict[str, Any]) -> Setup:
    """A project's settings, at its largest resolution; what is `given` instead of None holds instead."""
    train, sides = project.config.sections["train"], project.config.sections["buckets"].resolutions
    limit = budget(train.memory_gb) if train.memory_gb else 0
    own = Setup(project.family, max(sides), train.base_bits, train.rank, train.optimizer.kind, str(train.memory), limit=limit)
    return replace(own, **{name: value for name, value in given.items() if value is not None})


def command(project: Project | None, given: dict[str, Any]) -> Iterator[str]:
    """What `latentmill memory` says. ValueError for settings that are wrong or cannot fit."""
    settled = given | {"bits": int(given["bits"]) if given["bits"] else None}
    name = settled.pop("family")
    chosen_family = family(name or "klein-base-4b") if name or not project else None
    if project:
        setup = of_project(project, settled | {"family": chosen_family})
        folder = project.path / "tables" / "memory"
    else:
        assert chosen_family
        setup = replace(Setup(chosen_family, SIDES[0]), **{key: value for key, value in settled.items() if value is not None})
        folder = Path("memory")
    if setup.pixels < 32 or setup.pixels % 16:
        raise ValueError(f"memory: {setup.pixels} pixels are wrong; a multiple of 16 is wanted, 512 for instance")
    if setup.steps < 1 or setup.rank < 1:
        raise ValueError(f"memory: {setup.steps} steps of rank {setup.rank} are wrong; 1 or more of both is wanted")
    yield from report(setup, folder)


def profile(rig: Rig, plan: Plan, steps: int) -> Meter:
    """Train some steps, phase by phase. The first also fills caches."""
    meter = Meter()
    for number in range(1, steps + 1):
        meter.step = number
        rig.step(plan, meter)
    return meter


def chosen(setup: Setup, foretold: Footprint) -> Plan:
    """The plan that is asked for; for auto the fastest that fits."""
    if setup.plan == "auto":
        return foretold.plan(setup.may_take)
    return int(setup.plan) if setup.plan.isdigit() else setup.plan


def report(setup: Setup, folder: Path) -> Iterator[str]:
    """Profile, write the rows and the plot into `folder`, and say it all, line by line. ValueError if it cannot fit."""
    rig = Rig(setup.family, setup.bits, setup.rank, setup.optimizer, (setup.pixels, setup.pixels))
    foretold = rig.footprint()
    plan = chosen(setup, foretold)
    meter = profile(rig, plan, setup.steps)
    del rig
    yield f"{setup.family.title}, {setup.pixels} px, {setup.bits} bits, rank {setup.rank}, {setup.optimizer}, plan {plan}"
    yield from lines(meter)
    yield f"peak {spell_bytes(meter.peak)}, foretold {spell_bytes(foretold.need(plan))}, of it held {spell_bytes(foretold.held)}"
    yield from leaks(meter)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"family": setup.family.name, "pixels": setup.pixels, "bits": setup.bits, "rank": setup.rank, "plan": str(plan)}
    pq.write_table(pa.Table.from_pylist([facts | {"optimizer": setup.optimizer} | row for row in meter.rows]), folder / ROWS)
    plot.save(chart(meter, f"{setup.family.title}, {setup.pixels} px, {setup.bits} bits, plan {plan}"), folder / PICTURE)
    yield f"rows: {folder / ROWS}   plot: {folder / PICTURE}"
    yield from advice(setup)


def lines(meter: Meter) -> Iterator[str]:
    """The meter as a table."""
    yield f"{'step':>4}  {'phase':10} {'before':>9} {'after':>9} {'peak':>9} {'cache':>9}"
    for row in meter.rows:
        sizes = " ".join(f"{spell_bytes(row[name]):>9}" for name in ("before", "active", "peak", "cache"))
        yield f"{row['step']:>4}  {row['phase']:10} {sizes}"


def leaks(meter: Meter) -> Iterator[str]:
    """What grows from step to step, with the phase that grows."""
    for phase, count in meter.leaks().items():
        yield f"LEAK: {phase} keeps {spell_bytes(count)} more every step"
    if not meter.leaks():
        yield "no phase keeps more from step to step"


def chart(meter: Meter, title: str) -> Chart:
    """The peak of every phase and what stays after it, over the steps."""
    unit, scale = next((pair for pair in SCALES if meter.peak <= 25 * pair[1]), SCALES[-1])
    top = meter.peak / scale * 1.1
    phases = list(dict.fromkeys(row["phase"] for row in meter.rows))
    return Chart(
        "Memory of training by phase",
        title,
        f"steps, 0 the first, 1 the last of {meter.step}",
        [Panel(f"{title}, {unit}", _curves(meter, phases, what, scale), top) for title, what in PANELS],
        columns=2,
        size=(330, 200),
    )


def _curves(meter: Meter, phases: list[str], what: str, scale: float) -> list[Curve]:
    found = []
    for phase in phases:
        y = [row[what] / scale for row in meter.rows if row["phase"] == phase]
        x = [n / max(1, len(y) - 1) for n in range(len(y))]
        found.append(Curve(phase, COLORS.get(phase, plot.PURPLE), x, y, note=f"{max(y):.3g}"))
    return found


def advice(setup: Setup) -> Iterator[str]:
    """What a step would need at other resolutions and bits, and what that means for this device."""
    needs = {bits: {side: print_of(setup, side, rig, bits) for side in SIDES} for bits, rig in _rigs(setup)}
    limit = setup.may_take
    yield f"a step may take {spell_bytes(limit)} and needs, computing every block twice (blocks) or none (whole):"
    for bits, prints in needs.items():
        cells = [f"{side} px {spell_bytes(p.need('blocks'))} / {spell_bytes(p.need('whole'))}" for side, p in prints.items()]
        yield f"  base_bits = {bits}: " + ", ".join(cells)
    for side in SIDES:
        fits = next((bits for bits in BITS if needs[bits][side].need("blocks") <= limit), None)
        if fits is None:
            least = needs[BITS[-1]][side].need("blocks")
            yield f"{side} px would not fit: with base_bits = {BITS[-1]} it needs {spell_bytes(least)}"
        else:
            plan = needs[fits][side].plan(limit)
            yield f"{side} px would fit" + (f" with base_bits = {fits}" if fits < 16 else "") + f", plan {plan}"


def _rigs(setup: Setup) -> Iterator[tuple[int, Rig]]:
    """One block of each kind, by bits: enough to learn what all of them need."""
    whole = Flux2Config.from_dict(setup.family.transformer)
    small = replace(whole, num_layers=min(1, whole.num_layers), num_single_layers=min(1, whole.num_single_layers))
    for bits in BITS:
        yield bits, Rig(setup.family, bits, setup.rank, setup.optimizer, (SIDES[0], SIDES[0]), small)


def print_of(setup: Setup, side: int, rig: Rig, bits: int) -> Footprint:
    """The whole model's footprint from that of one block of each kind."""
    rig.size = (side, side)
    one = rig.footprint()
    whole = Flux2Config.from_dict(setup.family.transformer)
    kinds = ("double",) * whole.num_layers + ("single",) * whole.num_single_layers
    adapter = sum(one.grads[kind] for kind in kinds)
    states = sum(math.prod(value.shape) * value.dtype.size for value in rig.state.values()) / sum(one.grads.values())
    weights = weight_bytes([(shape, bits_of(name, bits)) for name, shape in whole.shapes().items()], rig.dtype.size)
    return replace(one, held=weights + int(adapter * (1 + states)), kinds=kinds)
