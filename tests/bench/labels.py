"""Names of benchmark rows in tables: size, configuration, machine; and one row as a line in a terminal."""

from __future__ import annotations

from typing import Any

from stages.tuner.blockwise.device import BUFFER_MB

Row = dict[str, Any]


def terminal_line(row: Row | None) -> str:
    """Format one row for the terminal: what was measured, seconds, GB, seconds of the first step. None: the column heads."""
    if row is None:
        return f"{'':14} {'':12} {'':44} {'s':>8} {'GB':>7} {'first s':>8}"
    head = f"{row['family']:14} {'' if row['kind'] == 'text_encoder' else size(row):12} {name(row):44}"
    if "error" in row:
        return f"{head} failed: {row['error']}"
    seconds, peak, first = (row.get(column) for column in ("s", "peak_gb", "first_s"))
    return f"{head} {number(seconds, '.4f'):>8} {number(peak, '.2f'):>7} {number(first, '.1f'):>8}{rates(row)}"


def rates(row: Row) -> str:
    """What a row of the kind "commit" or "workers" says beside seconds and memory."""
    if "rows_s" in row:
        return f"  {row['rows_s']:.0f} rows/s, {row['mb_s']:.0f} MB/s"
    return f"  {row['speed']:.2f} x one worker, {row['overhead_ms']:.1f} ms a unit" if "overhead_ms" in row else ""


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def size(row: Row) -> str:
    """The image's size: "512 px" for a square, "1024 x 1008" otherwise."""
    return f"{row['width']} px" if row["width"] == row["height"] else f"{row['width']} x {row['height']}"


def name(row: Row) -> str:
    """The configuration of a training step, "loader", "checksums", or an encoder with its dtype."""
    kind = row["kind"].replace("_", " ")
    if kind == "workers":
        return f"{row['workers']} Ray worker{'s' if row['workers'] > 1 else ''}"
    if kind in ("train", "loader", "checksums", "commit"):
        return configuration(row) if kind == "train" else kind
    words = [kind, row["dtype"], *([f"{row['bits']}-bit"] if row["bits"] < 16 else [])]
    words += [word for word, key in (("exact", "exact"), ("streamed", "stream")) if row.get(key)]
    words += [f"{rows} text rows"] if (rows := row.get("text_rows")) else []
    words += [f"{prompts} prompts"] if (prompts := row.get("prompts", 1)) > 1 else []
    return ", ".join([*words, *([f"PyTorch {row['plan']}"] if row["backend"] == "torch" else [])])


def identity(row: Row) -> tuple[str, ...]:
    """Family, size and name of a row: of several rows that agree in these, the last counts."""
    return row["family"], size(row), name(row)


def configuration(row: Row) -> str:
    """The configuration of a training step, such as "blocks, 4-bit, memory-limited". Usual values are left out."""
    words = [row["plan"] if row["backend"] == "mlx" else f"PyTorch {row['plan']}"]
    words += [f"{row['bits']}-bit"] if row["bits"] < 16 else []
    words += [row["optimizer"]] if row["optimizer"] != "adamw" else []
    words += ["memory-limited"] if row["memory_limited"] else []
    words += ["unfused"] if row["unfused"] else []
    words += ["streamed"] if row.get("stream") else []
    words += [f"{rows} text rows"] if (rows := row.get("text_rows")) else []
    words += [f"{ranks} ranks"] if (ranks := row.get("ranks", 1)) > 1 else []
    return ", ".join([*words, *_command_buffers(row)])


def _command_buffers(row: Row) -> list[str]:
    """The size of MLX's command buffers on CUDA, where it is not the usual one of the configuration."""
    if row["backend"] != "mlx" or not row.get("chip", "").startswith("NVIDIA"):
        return []
    megabytes, usual = row.get("buffer_mb", ""), BUFFER_MB if row["memory_limited"] else ""
    if megabytes == usual:
        return []
    return [f"buffers of {megabytes} MB" if megabytes else "default buffers"]


def origin(row: Row) -> str:
    """Where a row was measured: chip, framework with version, date, commit."""
    framework = "PyTorch" if row.get("backend") == "torch" else "MLX"
    commit = f", commit {row['commit']}" if row.get("commit") else ""
    return f"{row['chip']}, {framework} {row['version']}, {row['date']}{commit}"
