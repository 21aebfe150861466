"""Rows of the benchmark as text: a line in a terminal; a page with a table for what the trainer is judged by, one for each
family's training steps, one for encoding and reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stages.tuner.blockwise.backprop import BUFFER, SOONER_MB

Row = dict[str, Any]
PEERS = {1024: "PyTorch compiled+checkpoint", 512: "PyTorch compiled"}  # by width: whom ours must stand beside
FUSED = 128  # CUDA's fused attention wants a multiple of so many tokens


def line(row: Row | None) -> str:
    """One row in a terminal; the heads of its columns for None."""
    if row is None:
        return f"{'':14} {'':12} {'':34} {'s':>8} {'GB':>7} {'first s':>8}"
    head = f"{row['family']:14} {'' if row['kind'] == 'text_encoder' else size(row):12} {named(row):34}"
    if "error" in row:
        return f"{head} failed: {row['error']}"
    seconds, peak, first = (row.get(name) for name in ("s", "peak_gb", "first_s"))
    return f"{head} {number(seconds, '.4f'):>8} {number(peak, '.2f'):>7} {number(first, '.1f'):>8}"


def page(rows: list[Row]) -> Iterator[str]:
    """The lines of a Markdown page. Of several rows of one set-up the last counts."""
    good = [row for row in rows if "error" not in row]
    training = [row for row in good if row["kind"] == "train"]
    yield "# Benchmark"
    yield ""
    yield "Generated from bench.jsonl by `latentmill bench --table bench.jsonl`. On a CUDA machine `bench/gpu.sh` measures all of"
    yield "it in one command; `latentmill bench` (`make bench`) a few small cases anywhere, `--case` any other. On CUDA a command"
    yield "begins without compiled kernels: the first step of its first case is that of a machine that never trained."
    yield ""
    for run in judged(training):
        yield from bars_table(run)
    for family in dict.fromkeys(row["family"] for row in training):
        yield from training_table(family, [row for row in training if row["family"] == family])
    yield from others_table([row for row in good if row["kind"] != "train"])
    measured = {setup(row) for row in good}
    failed = {setup(row): row for row in rows if "error" in row and setup(row) not in measured}
    yield from (f"- Failed: {row['family']} {size(row)}, {named(row)}: {row['error']}" for row in failed.values())
    yield from [""] if failed else []
    yield "Measured on:"
    yield ""
    for about in sorted({origin(row) for row in good}):
        yield f"- {about}"


def judged(training: list[Row]) -> list[list[Row]]:
    """Of each family that stands beside PyTorch, the training steps of the last run in which it does."""
    runs = {row["family"]: row["run"] for row in training if row["backend"] == "torch" and row.get("run")}
    return [[row for row in training if (row["family"], row.get("run")) == pair] for pair in runs.items()]


def bars_table(run: list[Row]) -> Iterator[str]:
    """Set-ups of one family in one run, each beside its peers in that run: ratios of seconds / of gigabytes."""
    found = {(size(row), label(row)): row for row in run}
    yield f"## Bars: {run[0]['family']}, one run"
    yield ""
    yield f"{origin(run[0])}. Ratios are to rows of this run: seconds / gigabytes."
    yield "PyTorch: compiled with checkpoints at 1024 px, compiled at 512 px. Plain: MLX's whole graph as anyone would write it,"
    yield "nothing compiled. 16 bits: the same plan, unpacked. A token: seconds a token where their count is no multiple of 128,"
    yield "to the nearest size where it is. First: seconds of the first step, compilation included."
    yield ""
    yield "| | | s | GB | first | to PyTorch | to plain | to 16 bits | a token |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in found.values():
        px, ours = size(row), row["backend"] == "mlx"
        peers = [found.get((px, PEERS.get(row["width"], ""))), found.get((px, label({**row, **PLAIN}))) if ours else None]
        peers += [found.get((px, label(row | {"bits": 16}))) if row["bits"] < 16 else None]
        ratios = [ratio(row, peer) for peer in peers] + [a_token(row, run)]
        numbers = [f"{row['s']:.3f}", f"{row['peak_gb']:.1f}", number(row.get("first_s"), ".1f")]
        yield f"| {px} | {label(row)} | " + " | ".join(numbers + ratios) + " |"
    yield ""


PLAIN = {"plan": "plain", "bits": 16, "tight": False, "unfused": False, "buffer_mb": "", "optimizer": "adamw"}


def ratio(row: Row, peer: Row | None) -> str:
    """Seconds and gigabytes as multiples of the peer's; nothing beside oneself."""
    if peer is None or peer is row:
        return ""
    return f"{row['s'] / peer['s']:.2f} / {row['peak_gb'] / peer['peak_gb']:.2f}"


def a_token(row: Row, run: list[Row]) -> str:
    """Seconds a token, as a multiple of those of the same set-up at the nearest size that is a multiple of FUSED tokens."""
    tokens = row.get("tokens", 0)
    near = [other for other in run if label(other) == label(row) and other.get("tokens") and other["tokens"] % FUSED == 0]
    if tokens % FUSED == 0 or not near:
        return ""
    peer = min(near, key=lambda other: abs(other["tokens"] - tokens))
    return f"{row['s'] / tokens / (peer['s'] / peer['tokens']):.2f}"


def training_table(family: str, rows: list[Row]) -> Iterator[str]:
    """Seconds a step, gigabytes at the peak: a line per set-up, a column per size."""
    sizes = sorted({(row["width"] * row["height"], size(row)) for row in rows})
    cells = {(label(row), size(row)): f"{row['s']:.3f} / {row['peak_gb']:.1f}" for row in rows}
    yield f"## Training {family}: s / GB"
    yield ""
    yield "One image, AdamW in float32 unless it says another; medians. tight: live memory held to what was foretold, and on CUDA"
    yield f"{BUFFER}={SOONER_MB}, which keeps less in flight, unless it says another."
    yield ""
    yield "| | " + " | ".join(name for _, name in sizes) + " |"
    yield "|---|" + "---|" * len(sizes)
    for name in dict.fromkeys(label(row) for row in rows):
        yield f"| {name} | " + " | ".join(cells.get((name, each), "") for _, each in sizes) + " |"
    yield ""


def others_table(rows: list[Row]) -> Iterator[str]:
    """Encoding one image or caption, reading one sample."""
    if not rows:
        return
    yield "## Encoding and reading"
    yield ""
    yield "| | s | GB | first s |"
    yield "|---|---|---|---|"
    for row in {setup(row): row for row in rows}.values():
        numbers = [number(row.get(name), ".3g") for name in ("s", "peak_gb", "first_s")]
        kind, *dtype = named(row).split(", ")
        what = [kind, row["family"], *([] if row["kind"] == "text_encoder" else [size(row)]), *dtype]
        yield f"| {', '.join(what)} | " + " | ".join(numbers) + " |"
    yield ""


def number(value: float | None, form: str) -> str:
    """A number, or nothing."""
    return "" if value is None else format(value, form)


def setup(row: Row) -> tuple[str, ...]:
    """What makes two rows the same measurement."""
    return row["family"], size(row), named(row)


def size(row: Row) -> str:
    """The picture's."""
    return f"{row['width']} px" if row["width"] == row["height"] else f"{row['width']} x {row['height']}"


def named(row: Row) -> str:
    """A training step's set-up, or what else was measured."""
    kind = row["kind"].replace("_", " ")
    return label(row) if kind == "train" else kind if kind == "loader" else f"{kind}, {row['dtype']}"


def label(row: Row) -> str:
    """A set-up in words."""
    words = [row["plan"] if row["backend"] == "mlx" else f"PyTorch {row['plan']}"]
    words += [f"{row['bits']}-bit"] if row["bits"] < 16 else []
    words += [row["optimizer"]] if row["optimizer"] != "adamw" else []
    words += ["tight"] if row["tight"] else []
    words += ["unfused"] if row["unfused"] else []
    if row["backend"] == "mlx" and row.get("chip", "").startswith("NVIDIA"):
        buffer = row.get("buffer_mb", "")
        words += (
            [f"buffers of {buffer} MB" if buffer else "default buffers"] if buffer != (SOONER_MB if row["tight"] else "") else []
        )
    return ", ".join(words)


def origin(row: Row) -> str:
    """Chip, versions, date, commit."""
    name = "PyTorch" if row["backend"] == "torch" else "MLX"
    commit = f", commit {row['commit']}" if row.get("commit") else ""
    return f"{row['chip']}, {name} {row['version']}, {row['date']}{commit}"
