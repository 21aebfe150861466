"""The rows of the benchmark as a Markdown page: `python -m tests.bench.measure --table data/measurements/bench.jsonl`.

The page has a table that compares one family with PyTorch, a table of training steps per family, one of its stages, and one each
for encoding and reading, for checksums, and for PyTorch on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from stages.tuner.blockwise.device import BUFFER_MB, BUFFER_VARIABLE
from tests.bench.cases import KINDS
from tests.bench.labels import Row, configuration, identity, name, number, origin, size
from tests.bench.suites import COMPARED

PYTORCH = {1024: "PyTorch compiled+checkpoint", 512: "PyTorch compiled"}  # by width: the configuration to compare with
PLAIN = {"plan": "plain", "bits": 16, "memory_limited": False, "unfused": False, "buffer_mb": "", "optimizer": "adamw"}
FUSED = 128  # cuDNN's fused attention needs a multiple of so many tokens
ORDER = ("train", "draw", "text_encoder", "autoencoder", "decode")  # of kinds in the table of a family's stages
INTRODUCTION = """\
# Benchmark

On one H200, a training step of klein base 4B at 1024 px takes about as long as PyTorch's compiled one with gradient checkpointing
and about as much memory; a 4-bit base halves the memory. The first table has both, the others every family, size and plan.

Generated from bench.jsonl by `python -m tests.bench.measure --table data/measurements/bench.jsonl`. `tests/bench/gpu.sh`
measures all of it on a CUDA machine; `make bench` measures a few small cases on any machine, and
`python -m tests.bench.measure --case` any other. [costs.md](experiments/costs.md) has what saving memory costs.
On CUDA every run starts without compiled kernels, so the first step of its first case includes their compilation.
"""
COMPARISON = """\
Ratios are seconds / gigabytes relative to another row of this run. To PyTorch: compiled with gradient checkpointing at 1024 px,
compiled at 512 px. To plain: MLX's ordinary gradient of the whole graph, not compiled. To 16 bits: the same plan with a 16-bit
base. Per token: seconds per token, relative to the nearest size whose tokens are a multiple of 128. First: seconds of the first
step, compilation included.
"""
STAGES = """\
Every stage alone on the GPU, with one image or one caption of the longest length that the family reads, medians. Arrays: the peak
in GB as MLX counts. Driver: the peak of the memory that the driver counts for the process. Announced: what `latentmill plan`
says of it, from shapes alone. PyTorch: diffusers' module with random weights, its blocks compiled, for training by blocks with
gradient checkpointing; for captions transformers' model, not compiled. Ratio: of the seconds, ours to PyTorch's.
"""
TRAINING = f"""\
One image per step; AdamW in float32 unless another optimizer is named; medians. memory-limited: live memory is held to the
plan's estimate, and on CUDA {BUFFER_VARIABLE}={BUFFER_MB} limits the work in flight, unless another size is named.
"""


CHECKSUMS = """\
A training step needs a latent and a caption, here of 512 tokens, whose checksums are computed when they are read; `make bench`
measures this. CPU milliseconds for one sample, medians: reading from mapped files into MLX, without and with checksums, in turns;
what the checksums add; the checksums alone, of values in memory and in no cache. The data loader reads in a background thread
while the device computes. So a step waits only for what that thread has not finished: the milliseconds waited, without and with
checksums, while the work of a step takes as long as named. Shares are those of the wait with checksums, and of the CPU time that
they add in the background, of the shortest training step of this family and size in this file, one image per step, by any memory
plan. The last columns say where each was measured.
"""
CPU = """\
`python -m tests.bench.cpu`: a training step of the LoRA, float32, equal shapes, targets and optimizer. PyTorch runs diffusers'
transformer with peft. The two are processes that take steps in turns, so other work on the machine slows both. Each number is
ours / PyTorch's = ratio. Seconds: the median of 20 steps. CPU seconds: the least. GB: the largest memory of the process.
"""


def page(rows: list[Row]) -> Iterator[str]:
    """If several rows have the same configuration, the last is shown. Kinds that no benchmark measures any more are left out."""
    known, cpu = [row for row in rows if row["kind"] in KINDS], [row for row in rows if row["kind"] == "cpu"]
    good = [row for row in known if "error" not in row]
    training = [row for row in good if row["kind"] == "train"]
    yield from INTRODUCTION.splitlines()
    yield ""
    for run in comparison_runs(training):
        yield from comparison_table(run)
    for family in dict.fromkeys(row["family"] for row in training):
        yield from training_table(family, [row for row in training if row["family"] == family])
    for family, ours in counted(good).items():
        yield from stages_table(family, ours, good)
    yield from encoding_table([row for row in good if row["kind"] not in ("train", "checksums")])
    yield from checksums_table(good, training)
    newest = {(row["threads"], row["batch"], row["pixels"]): row for row in cpu}
    yield from section("Beside PyTorch on a CPU", CPU, "| | seconds | CPU seconds | GB | where |", map(cpu_line, newest.values()))
    yield from failures(known)
    yield "Machines, versions and commits:"
    yield ""
    yield from (f"- {where}" for where in sorted({origin(row) for row in [*good, *cpu]}))


def section(title: str, text: str, head: str, lines: Iterable[str]) -> Iterator[str]:
    """A heading, a text and a table; nothing if the table has no lines."""
    if found := list(lines):
        yield from (f"## {title}", "", *text.splitlines(), *([""] if text else []))
        yield from (head, "|" + "---|" * (head.count("|") - 1), *found, "")


def comparison_runs(training: list[Row]) -> list[list[Row]]:
    compared = [row for row in training if row["family"] == COMPARED and row["backend"] == "torch"]
    runs = {row["family"]: row["run"] for row in compared if row.get("run")}
    return [[row for row in training if (row["family"], row.get("run")) == pair] for pair in runs.items()]


def comparison_table(run: list[Row]) -> Iterator[str]:
    found, lines = {(size(row), configuration(row)): row for row in run}, []
    for row in found.values():
        peers = [(size(row), PYTORCH.get(row["width"], ""))]
        peers += [(size(row), configuration(row | PLAIN) if row["backend"] == "mlx" else "")]
        peers += [(size(row), configuration(row | {"bits": 16}) if row["bits"] < 16 else "")]
        numbers = [f"{row['s']:.3f}", f"{row['peak_gb']:.1f}", number(row.get("first_s"), ".1f")]
        cells = [*numbers, *(ratio(row, found.get(peer)) for peer in peers), per_token(row, run)]
        lines.append(f"| {size(row)} | {configuration(row)} | " + " | ".join(cells) + " |")
    head = "| | | s | GB | first | to PyTorch | to plain | to 16 bits | per token |"
    yield from section(f"Comparison: {run[0]['family']}, one run", f"{origin(run[0])}.\n{COMPARISON}", head, lines)


def counted(rows: list[Row]) -> dict[str, list[Row]]:
    """Of our rows that say what was announced and what the driver counted; of equal configurations the last."""
    ours = {identity(row): row for row in rows if {"announced_gb", "footprint_gb"} <= row.keys()}
    return {family: [row for row in ours.values() if row["family"] == family] for family, *_ in ours}


def stages_table(family: str, ours: list[Row], rows: list[Row]) -> Iterator[str]:
    """Yield the section of one family's stages, with the driver's peaks, and PyTorch of the same run beside."""
    theirs = [row for row in rows if row.get("backend") == "torch" and row.get("run")]
    torch, lines = {(row["run"], row["kind"], row["plan"], *stage_shape(row)): row for row in theirs}, []
    for row in sorted(ours, key=lambda row: (ORDER.index(row["kind"]), -row["width"])):
        kind, plan = row["kind"], "compiled+checkpoint" if row["plan"] == "blocks" and row["kind"] == "train" else "compiled"
        keys = ((row["run"], kind, each, *stage_shape(row)) for each in (plan, "eager"))
        peer = next((torch[key] for key in keys if key in torch), None)
        sizes = [row["peak_gb"], row["footprint_gb"], row["announced_gb"], row["announced_gb"] / row["footprint_gb"]]
        cells = [f"{row['s']:.3f}", *(f"{each:.2f}" for each in sizes)]
        cells += [f"{peer['s']:.3f}", f"{row['s'] / peer['s']:.2f}", f"{peer['footprint_gb']:.2f}"] if peer else [""] * 3
        what = f"train, {name(row)}" if kind == "train" else name(row)
        lines.append(f"| {stage_size(row)} | {what.replace(', memory-limited', '')} | {' | '.join(cells)} |")
    text = f"{', '.join(sorted({origin(row) for row in ours}))}.\n{STAGES}"
    head = "| | | s | arrays | driver | announced | to driver | PyTorch, s | ratio | PyTorch, driver |"
    yield from section(f"Every stage of {family}", text, head, lines)


def stage_shape(row: Row) -> tuple[Any, ...]:
    return row["family"], stage_size(row), row.get("exact"), row.get("text_rows")


def stage_size(row: Row) -> str:
    return "" if row["kind"] == "text_encoder" else size(row)


def ratio(row: Row, peer: Row | None) -> str:
    """Multiples of another row's seconds and GB."""
    if peer is None or peer is row:
        return ""
    return f"{row['s'] / peer['s']:.2f} / {row['peak_gb'] / peer['peak_gb']:.2f}"


def per_token(row: Row, run: list[Row]) -> str:
    """A multiple of those at the nearest size with a multiple of FUSED tokens; "" if it is such a size, or the run has none."""
    tokens = row.get("tokens", 0)
    peers = [other for other in run if configuration(other) == configuration(row) and other.get("tokens")]
    fused = [other for other in peers if other["tokens"] % FUSED == 0]
    if tokens % FUSED == 0 or not fused:
        return ""
    peer = min(fused, key=lambda other: abs(other["tokens"] - tokens))
    return f"{row['s'] / tokens / (peer['s'] / peer['tokens']):.2f}"


def training_table(family: str, rows: list[Row]) -> Iterator[str]:
    """A line per configuration, a column per size, "seconds / GB"."""
    sizes = sorted({(row["width"] * row["height"], size(row)) for row in rows})
    cells = {(configuration(row), size(row)): f"{row['s']:.3f} / {row['peak_gb']:.1f}" for row in rows}
    lines = (
        f"| {label} | " + " | ".join(cells.get((label, each), "") for _, each in sizes) + " |"
        for label in dict.fromkeys(configuration(row) for row in rows)
    )
    head = f"| | {' | '.join(label for _, label in sizes)} |"
    yield from section(f"Training {family}: seconds per step / GB at the peak", TRAINING, head, lines)


def encoding_table(rows: list[Row]) -> Iterator[str]:
    lines = []
    for row in {identity(row): row for row in rows}.values():
        numbers = [number(row.get(column), ".3g") for column in ("s", "peak_gb", "first_s")]
        kind, *dtype = name(row).split(", ")
        words = [kind, row["family"], *([] if row["kind"] == "text_encoder" else [size(row)]), *dtype]
        lines.append(f"| {', '.join(words)} | " + " | ".join(numbers) + " |")
    yield from section("Encoding and reading", "", "| | s | GB | first s |", lines)


def checksums_table(rows: list[Row], training: list[Row]) -> Iterator[str]:
    """A line for each family and size with a row and a training step to compare with."""
    newest = {(row["family"], size(row)): row for row in rows if row["kind"] == "checksums"}
    steps = [row for row in training if row["backend"] == "mlx" and row.get("ranks", 1) == 1]
    pairs = [(row, [step for step in steps if (step["family"], size(step)) == key]) for key, row in newest.items()]
    lines = [checksums_line(row, min(found, key=lambda step: float(step["s"]))) for row, found in pairs if found]
    head = "| | MB | read without | with | added | alone | waited without | with | work | step, ms | waited | added |"
    yield from section("Checksums beside a training step", CHECKSUMS, f"{head} checksums where | step where |", lines)


def checksums_line(row: Row, step: Row) -> str:
    keys = ("unchecked_s", "checked_s", "s", "alone_s", "waited_unchecked_s", "waited_s")
    cells = [f"{row['family']}, {size(row)}", f"{row['sample_bytes'] / 1e6:.2f}", *(f"{1e3 * row[key]:.3f}" for key in keys)]
    cells += [f"{1e3 * row['step_s']:.0f}", f"{1e3 * step['s']:.1f}, {configuration(step)}"]
    cells += [f"{row[key] / step['s']:.2%}" for key in ("waited_s", "s")]
    return f"| {' | '.join(cells)} | {origin(row)} | {origin(step)} |"


def cpu_line(row: Row) -> str:
    what = f"{row['family']}, {row['pixels']} px, batch {row['batch']}, threads: {row['threads']}"
    pairs = (
        f"{row[f'mlx_{key}']:.3f} / {row[f'torch_{key}']:.3f} = {row[f'{key}_ratio']:.2f}" for key in ("s", "cpu_s", "peak_gb")
    )
    return f"| {what} | {' | '.join(pairs)} | {origin(row)} |"


def failures(rows: list[Row]) -> Iterator[str]:
    """Of configurations without a measurement in `rows`."""
    measured = {identity(row) for row in rows if "error" not in row}
    failed = {identity(row): row for row in rows if "error" in row and identity(row) not in measured}
    yield from (f"- Failed: {row['family']} {size(row)}, {name(row)}: {row['error']}" for row in failed.values())
    yield from [""] if failed else []
