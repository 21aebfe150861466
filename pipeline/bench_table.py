"""Rows of the benchmark as a page: one table for each family's training steps, one for encoding and reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


def page(rows: list[Row]) -> Iterator[str]:
    """The lines of a Markdown page. Of several rows of one set-up the last counts."""
    good = [row for row in rows if "error" not in row]
    training = [row for row in good if row["kind"] == "train"]
    for family in dict.fromkeys(row["family"] for row in training):
        yield from training_table(family, [row for row in training if row["family"] == family])
    yield from others_table([row for row in good if row["kind"] != "train"])
    for row in rows:
        if "error" in row:
            yield f"Failed: {row['family']} {size(row)}, {label(row)}: {row['error']}"
    yield "Measured by `python -m pipeline.bench` (`--gpu` for all of it, `--case` for one row), on:"
    yield ""
    for about in sorted({origin(row) for row in good}):
        yield f"- {about}"


def training_table(family: str, rows: list[Row]) -> Iterator[str]:
    """Seconds a step, gigabytes at the peak: a line per set-up, a column per size."""
    sizes = sorted({(row["width"] * row["height"], size(row)) for row in rows})
    cells = {(label(row), size(row)): f"{row['s']:.3f} / {row['peak_gb']:.1f}" for row in rows}
    yield f"## Training {family}: s / GB"
    yield ""
    yield "One image, AdamW in float32 unless it says another; medians. tight: live memory held to what was foretold."
    yield "Ours ran with MLX_MAX_MB_PER_BUFFER=200, which keeps less in flight, but where it says default buffers."
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
    for row in rows:
        numbers = [f"{row[name]:.3g}" if name in row else "" for name in ("s", "peak_gb", "first_s")]
        what = row["kind"].replace("_", " ") + f", {row['family']}"
        what += "" if row["kind"] == "text_encoder" else f", {size(row)}"
        what += f", {row['dtype']}" if row["kind"] != "loader" else ""
        yield f"| {what} | " + " | ".join(numbers) + " |"
    yield ""


def size(row: Row) -> str:
    """The picture's."""
    return f"{row['width']} px" if row["width"] == row["height"] else f"{row['width']} x {row['height']}"


def label(row: Row) -> str:
    """A set-up in words."""
    words = [row["plan"] if row["backend"] == "mlx" else f"PyTorch {row['plan']}"]
    words += [f"{row['bits']}-bit"] if row["bits"] < 16 else []
    words += [row["optimizer"]] if row["optimizer"] != "adamw" else []
    words += ["tight"] if row["tight"] else []
    words += ["unfused"] if row["unfused"] else []
    ours = row["backend"] == "mlx" and row.get("chip", "").startswith("NVIDIA")
    words += ["default buffers"] if ours and not row.get("buffer_mb") else []
    return ", ".join(words)


def origin(row: Row) -> str:
    """Chip, versions, date, commit."""
    name = "PyTorch" if row["backend"] == "torch" else "MLX"
    commit = f", commit {row['commit']}" if row.get("commit") else ""
    return f"{row['chip']}, {name} {row['version']}, {row['date']}{commit}"
