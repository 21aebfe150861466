"""`latentmill merge`, `resize` and `extract`: new LoRA files from trained ones, or from a fine-tuned transformer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.adapters import STRENGTH_FOR, dtype_option, file_stem, find_adapter, pair_strengths
from pipeline.commands.text_to_image.export import STYLES, in_folder, read, use_of, write_arrays
from pipeline.options import with_project
from pipeline.terminal import tell

if TYPE_CHECKING:
    import mlx.core as mx

    from pipeline.project.project import Project
    from stages.models.family import Adapter, Family
    from stages.tuner.adapters.combine import Cut

MADE = "made_from"  # the key of a file's metadata that says what it was made from
LARGEST_RANK = 4096
RANK_HELP = "The largest rank of a Linear in the new file."


def shared_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        dtype_option("bfloat16"),
        click.option(
            "--style", type=click.Choice(list(STYLES)), default="diffusers", show_default=True, help="Names of tensors."
        ),
        click.option("--out", type=click.Path(path_type=Path), help="A .safetensors file or a folder.  [default: exports/]"),
    ):
        function = option(function)
    return function


@click.command("merge")
@click.argument("adapters", nargs=-1)
@click.option("--strength", "strengths", type=float, multiple=True, help="Factor of each adapter, in their order.  [default: 1]")
@click.option("--rank", type=int, help=f"{RANK_HELP}  [default: the sum of their ranks, which is exact]")
@STRENGTH_FOR
@shared_options
@with_project
def merge_command(
    adapters: tuple[str, ...],
    strengths: tuple[float, ...],
    rank: int | None,
    strength_for: dict[str, float],
    project: Project,
    **form: Any,
) -> None:
    """Merge several LoRAs into one file. ADAPTERS are files, or last, best and average of the run; best@fast is the
    best one of the run called fast. The new LoRA changes the model by the sum of their changes, each times its
    strength.
    """
    if len(adapters) < 2:
        raise ValueError(
            f"merge needs two adapters or more, got {len(adapters)}: latentmill merge best style.safetensors --strength 1 "
            "--strength 0.5"
        )
    files = [(find_adapter(project, text), strength) for text, strength in pair_strengths(adapters, strengths)]

    def make() -> tuple[Adapter, str]:
        from stages.tuner.adapters import combine

        joined = combine.join([(*read(project.family, file), strength) for file, strength in files])
        joined = combine.weighted(*joined, strength_for) if strength_for else joined
        if rank is None:
            return joined, f"rank {_largest_rank(joined)}, the sum of the ranks: nothing is lost"
        return _cut(combine.resize(*joined, rank))

    more: dict[str, Any] = {"strength_for": json.dumps(strength_for, sort_keys=True)} if strength_for else {}
    write(project, "merge", rank, files, make, **more, **form)


@click.command("average")
@click.option(
    "--width",
    type=click.FloatRange(0.01, 0.28),
    default=0.1,
    show_default=True,
    help="Width of the average, relative to the length of the run: 0.05 is near the end, 0.25 over most of it.",
)
@click.option("--step", type=int, help="The last checkpoint of the average.  [default: that of the last step]")
@shared_options
@with_project
def average_command(width: float, step: int | None, project: Project, **form: Any) -> None:
    """Write the average of a run's checkpoints, for any width, after training. Later checkpoints count more, by a power of
    the step. An average is often smoother than the last step. Draw with the file: latentmill generate --adapter FILE.
    """
    from stages.tuner.checkpoint import ADAPTER, find_checkpoints

    table = project.folder("train").folder
    found = {each.step: each for each in find_checkpoints(table / "artifacts") if step is None or each.step <= step}
    if len(found) < 2:
        raise ValueError(f"average needs two checkpoints or more, found {len(found)}: see [train] checkpoint_every")
    if damaged := next((each for each in found.values() if not each.intact(ADAPTER)), None):
        raise ValueError(f"the checkpoint of step {damaged.step} is damaged; run: latentmill verify --repair")

    def make() -> tuple[Adapter, str]:
        from stages.tuner.adapters import combine

        steps = sorted(found)
        weights = combine.power_weights(steps, width)
        parts = (read(project.family, found[each].folder / ADAPTER) for each in steps)
        shown = ", ".join(f"{each} {weight:.2g}" for each, weight in zip(steps, weights, strict=True) if weight >= 0.01)
        return combine.average(parts, weights), f"steps and their weights: {shown}"

    files = [(found[each].folder / ADAPTER, 1.0) for each in sorted(found)]
    write(project, "average", None, files, make, width=f"{width:g}", **form)


@click.command("resize")
@click.argument("adapter", default="last")
@click.option("--rank", type=int, required=True, help=RANK_HELP)
@shared_options
@with_project
def resize_command(adapter: str, rank: int, project: Project, **form: Any) -> None:
    """Write a LoRA with a lower rank. ADAPTER is last, best or average of the run, or a file. The largest singular
    values of each Linear's change are kept, and the error is stated.
    """
    file = find_adapter(project, adapter)

    def make() -> tuple[Adapter, str]:
        from stages.tuner.adapters import combine

        whole = read(project.family, file)
        if rank >= (largest := _largest_rank(whole)):
            raise ValueError(f"--rank must be below {largest}, the rank of {file.name}, got {rank}")
        return _cut(combine.resize(*whole, rank))

    write(project, "resize", rank, [(file, 1.0)], make, **form)


@click.command("extract")
@click.argument("tuned", type=click.Path(path_type=Path))
@click.option("--rank", type=int, default=32, show_default=True, help=RANK_HELP)
@shared_options
@with_project
def extract_command(tuned: Path, rank: int, project: Project, **form: Any) -> None:
    """Write the difference between a fine-tuned transformer and the project's base as a LoRA. TUNED is a folder in the
    diffusers layout or a single file. A LoRA of the given rank can hold only a part of the difference. The part that is
    lost is printed as the error.
    """
    from stages.models.weights import weight_files

    tuned = tuned.expanduser()
    if not tuned.exists():
        raise ValueError(f"TUNED must be a folder or a file with a transformer's weights, got {tuned}: it does not exist")

    def make() -> tuple[Adapter, str]:
        cut, others = difference(project.component("transformer"), tuned, project.family, rank)
        if not cut.arrays:
            raise ValueError(f"{tuned} has the weights of the base: there is nothing to extract")
        adapter, line = _cut(cut)
        return adapter, line + (f"; {others} weights outside the blocks' Linears changed too and are left out" if others else "")

    base = project.weight_recipe("transformer")["sha256"]
    write(project, "extract", rank, [(file, 1.0) for file in weight_files(tuned)], make, base=base, **form)


def difference(base: Path, tuned: Path, family: Family, rank: int) -> tuple[Cut, int]:
    """The LoRA, and the number of changed tensors that it cannot hold (biases). Raises ValueError for another architecture."""
    import mlx.core as mx

    from stages.tuner.adapters import combine

    load = family.architecture.load_transformer
    before: dict[str, mx.array] = {}

    def keep(name: str, weight: mx.array) -> mx.array:
        before[name] = weight
        return weight

    linears = load(base, family, arrange=keep).linears()
    cut, others = combine.Cut({}, {}), 0

    def compare(name: str, weight: mx.array) -> mx.array:
        nonlocal cut, others
        change = weight.astype(mx.float32) - before.pop(name).astype(mx.float32)
        if (linear := name.removesuffix(".weight")) in linears:
            cut |= combine.extract(linear, change, rank)
        else:
            others += bool(mx.any(change != 0).item())
        return mx.zeros(0)  # frees the weight

    # One weight of the tuned transformer is in memory at a time, beside the base as a whole.
    load(tuned, family, arrange=compare)
    return cut, others


def write(
    project: Project,
    operation: str,
    rank: int | None,  # the largest of a Linear; None: the sum of the ranks
    files: Sequence[tuple[Path, float]],
    make: Callable[[], tuple[Adapter, str]],  # computes (arrays, scales) and a line about the error
    *,
    out: Path | None,
    style: str,
    dtype: str,
    **more: str,
) -> None:
    """Compute a LoRA and write it to a file, unless the file exists and was made from the same files in the same way."""
    from stages.hashing import file_sha256
    from stages.models.weights import read_file

    if rank is not None and not 1 <= rank <= LARGEST_RANK:
        raise ValueError(f"--rank must be from 1 to {LARGEST_RANK}, got {rank}")
    sources = [[file_sha256(file), strength] for file, strength in files]
    recipe = {"operation": operation, "rank": rank, "sources": sources, "style": style, "dtype": dtype, **more}
    made = json.dumps(recipe, sort_keys=True)
    folder = out or project.path / "exports"
    of_rank = f"-rank{rank}" if rank else ""
    name = f"{file_stem(project.name)}-{operation}{of_rank}-{hashlib.sha256(made.encode()).hexdigest()[:8]}.safetensors"
    target = in_folder(folder, name)
    if target.exists():
        found = ""
        with contextlib.suppress(ValueError):  # it is no safetensors file
            found = read_file(target)[1].get(MADE, "")
        if found != made:
            raise ValueError(f"{target} exists and was made from something else; move it away or choose another name")
        tell(f"{target} is up to date")
        return
    adapter, line = make()
    about = {"project": project.name, "family": project.family.name, MADE: made, **use_of(project)}
    write_arrays(adapter, project.family, target, style, dtype=dtype, about=about, say=tell)
    tell(line)
    tell(f"wrote {target}")


def _largest_rank(adapter: Adapter) -> int:
    from stages.models.adapters import ranks

    return max(ranks(adapter[0]).values(), default=0)


def _cut(cut: Cut) -> tuple[Adapter, str]:
    name, worst = cut.worst
    line = f"rank {_largest_rank((cut.arrays, cut.scales))}: the relative error is {cut.error:.2%}, at most {worst:.2%} in {name}"
    return (cut.arrays, cut.scales), line
