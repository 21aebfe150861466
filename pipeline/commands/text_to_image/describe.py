"""`latentmill adapter FILE`: what an adapter's file holds, which models it fits, and where in the model it changes most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.store.disk import format_bytes
from pipeline.terminal import format_table, tell
from stages.settings import several

if TYPE_CHECKING:
    from stages.models.family import Adapter

BAR = 24  # characters of the longest bar
# Beginning of its keys -> whose names they are
NAMES = (
    ("lora_unet_", "kohya"),
    ("lycoris_", "LyCORIS"),
    ("base_model.model.", "PEFT"),
    ("diffusion_model.", "ComfyUI"),
    ("transformer.", "diffusers"),
)
KINDS = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr"}
HEADER = ("family", "project", "run", "step", "trigger", "resolution", "beneath", "strength_for", "software")


@click.command("adapter")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--linears", is_flag=True, help="Also show each Linear with its rank.")
def command(file: Path, linears: bool) -> None:
    """Show what an adapter's FILE holds. Format, the models that it fits, rank, and by block the norm of what it adds to the
    weights, with a bar. --strength-for of generate, merge and export weighs blocks.
    """
    for line in describe(file.expanduser(), linears):
        tell(line)


def describe(file: Path, linears: bool = False) -> Iterator[str]:
    """Raises ValueError for a file that no family can read."""
    from stages.models import adapters
    from stages.models.weights import read_file
    from stages.tuner.adapters.combine import norm

    if not file.is_file():
        raise ValueError(f"FILE must be an adapter's file, got {str(file)!r}: it does not exist")
    raw, header = read_file(file)
    (arrays, scales), fits, blocks = read_with_family(file)
    names = next((whose for start, whose in NAMES if any(key.startswith(start) for key in raw)), "this program")
    dtypes = " and ".join(sorted({str(value.dtype).rpartition(".")[2] for value in raw.values()}))
    yield f"{file.name}: {KINDS[adapters.variant(arrays)]} in the names of {names}, {dtypes}, {format_bytes(file.stat().st_size)}"
    yield f"fits: {', '.join(fits) or 'no family that is known here'}"
    if told := [f"{key} {header[key]}" for key in HEADER if header.get(key)]:
        yield f"header: {'; '.join(told)}"
    if key := adapters.first_not_finite(arrays):
        yield f"{key} holds values that are not finite: it cannot be used"
        return
    ranks = adapters.ranks(arrays)
    norms = {name: norm(arrays, name, scale) for name, scale in scales.items()}
    factors = sorted(set(scales.values()))
    scale = f"{factors[0]:g}" if len(factors) == 1 else f"{factors[0]:g} to {factors[-1]:g}"
    yield f"{several(len(scales), 'Linear')}, rank {_counted(ranks)}, scale {scale}, norm {_length(norms.values()):.4g}"
    yield "The norm is that of what is added to the weights; of a DoRA, before rows get their lengths."
    of_block: dict[str, list[str]] = {}
    for name in scales:
        of_block.setdefault(next((each for each in blocks if name.startswith(f"{each}.")), name), []).append(name)
    lengths = {block: _length(norms[name] for name in own) for block, own in of_block.items()}
    most = max(lengths.values()) or 1.0
    rows = []
    for block in sorted(of_block, key=adapters.natural):
        own = {name: ranks[name] for name in of_block[block] if name in ranks}
        rows.append((block, len(of_block[block]), _counted(own), f"{lengths[block]:.4g}", bar(lengths[block] / most)))
    yield format_table(("block", "Linears", "rank", "norm", "changes"), rows, right=("norm",))
    if linears:
        each = [(name, ranks.get(name), f"{norms[name]:.4g}") for name in sorted(scales, key=adapters.natural)]
        yield format_table(("Linear", "rank", "norm"), each, right=("norm",))


def read_with_family(file: Path) -> tuple[Adapter, list[str], Sequence[str]]:
    """The adapter, the families that it fits, and the names of the blocks of the first of these."""
    from stages.text_to_image.families import FAMILIES
    from stages.text_to_image.weights import meta_transformer
    from stages.tuner.adapters.lora import check_fits

    read: dict[str, Adapter | ValueError] = {}
    fits: list[str] = []
    blocks: Sequence[str] = ()
    for name, family in FAMILIES.items():
        if family.code not in read:
            try:
                read[family.code] = family.architecture.read_adapter(file)
            except ValueError as error:
                read[family.code] = error
        if isinstance(found := read[family.code], ValueError):
            continue
        model = meta_transformer(None, family)
        try:
            check_fits(model.linears(), *found)
        except ValueError:
            continue
        fits.append(name)
        blocks = blocks or [block.name for block in model.blocks]
    if fits:
        fitting = read[FAMILIES[fits[0]].code]
        assert not isinstance(fitting, ValueError)
        return fitting, fits, blocks
    for found in read.values():
        if not isinstance(found, ValueError):
            return found, [], _numbered(found[1])
    raise ValueError(f"{file} is no adapter of a model that is known here: {next(iter(read.values()))}")


def _numbered(names: Mapping[str, float]) -> list[str]:
    """Beginnings up to the first number: layers.3 of layers.3.attention.to_q."""
    parts = [name.split(".") for name in names]
    ends = [next((at for at, part in enumerate(each) if part.isdigit()), len(each) - 1) for each in parts]
    return list(dict.fromkeys(".".join(each[: end + 1]) for each, end in zip(parts, ends, strict=True)))


def bar(share: float) -> str:
    return "█" * max(round(share * BAR), share > 0)


def _counted(ranks: Mapping[str, int]) -> str:
    """Such as "32" or "16 (20 Linears), 32 (40 Linears)"."""
    counts = Counter(ranks.values())
    if len(counts) < 2:
        return str(next(iter(counts), "none"))
    return ", ".join(f"{rank} ({several(count, 'Linear')})" for rank, count in sorted(counts.items()))


def _length(values: Iterable[float]) -> float:
    return math.sqrt(sum(value**2 for value in values))
