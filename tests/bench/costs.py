"""Sections of the benchmark's page on what saves memory: its cost in time, and how far it changes results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.bench.labels import Row, configuration, origin, size

INT8 = "latent, int8 embeddings"
# Kinds of rows that only these sections show.
KINDS = (
    "velocity",
    "latent",
    "picture",
    "exactness",
    "streaming",
    "cpu",
    "kernel_limit",
    "embedding",
    "checksums",
    INT8,
    "float16",
)

CPU = """\
`python -m tests.bench.cpu`: a training step of the LoRA, float32, equal shapes, targets and optimizer. PyTorch runs diffusers'
transformer with peft. The two are processes that take steps in turns, so other work on the machine slows both. Each number is
ours / PyTorch's = ratio. Seconds: the median of 20 steps. CPU seconds: the least. GB: the largest memory of the process.
"""
STREAMED = """\
With `stream_blocks = true` every step reads each block's weights from disk twice, in the forward and in the backward pass. On
the H200: `python -m tests.bench.measure --case`, median seconds of a step; the files had just been written. On the CPU:
`python -m tests.bench.streaming`, median CPU seconds of a step, both ways in turns.
"""
STRIPS = """\
`python -m tests.bench.strips`, float32 with MLX's defaults (TF32 on the H200). The autoencoder computes large images in strips of
at most so many MB, and a GPU starts so many before the first is done. Estimated: the forecast of the peak for this size.
"""
KERNELS = """\
`python -m tests.bench.kernel_limit`: a training step whose products take at most so many TFLOP a kernel, as on Metal, beside the
step of this device, in turns. One block of each kind with the true widths of the family. On a CPU seconds are CPU seconds; its
image is small. The limit is smaller there, to cut the largest product as often as in a step at 1024 px.
"""
HALF = """\
`python -m tests.bench.float16`: the bundled model learns the example's images in float16 and in float32, with the same images,
noise and noise levels. No loss is scaled. Loss: the mean of the last 20 steps. Apart: the largest difference of a step's losses.
Lost: the share of the adapter's gradient that is zero in float16 only; cosine: of the two gradients; both the worst of three
steps. Skipped: steps whose gradient was not finite. Float16 is no setting of `[train]`; a CPU computes it slowly.
"""
DIFFERENCES = """\
`python -m tests.bench.differences`. rms: root mean square of the difference; of: that of the exact values. Velocity: one forward
pass of a transformer with random weights of true shapes, against bfloat16. Latent and picture (0 to 255): the bundled model
`micro`, 20 steps, four prompts, two seeds, against its full weights. Exactness: a latent in float32 with MLX's defaults against
one with `[latents] exact = true`, which is the default; commit bd63a66 encoded in strips of 32 MB. Embedding: the values of
`micro` stored with `[embeddings] stored = "int8"`, and the latents drawn with them, against bfloat16.
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


def cost_sections(rows: list[Row]) -> Iterator[str]:
    yield from checksums_section(rows)
    yield from cpu_section([row for row in rows if row["kind"] == "cpu"])
    yield from streamed_section(rows)
    yield from strips_section([row for row in rows if of_strips(row)])
    yield from kernels_section([row for row in rows if row["kind"] == "kernel_limit"])
    yield from float16_section([row for row in rows if row["kind"] == "float16"])
    yield from differences_section([row for row in rows if row["kind"] in KINDS and "rms" in row])


def checksums_section(rows: list[Row]) -> Iterator[str]:
    """A line for each family and size with a row and a training step to compare with."""
    newest = {(row["family"], size(row)): row for row in rows if row["kind"] == "checksums"}
    steps = [row for row in rows if row["kind"] == "train" and row["backend"] == "mlx" and row.get("ranks", 1) == 1]
    pairs = [(row, [step for step in steps if (step["family"], size(step)) == key]) for key, row in newest.items()]
    lines = [checksums_line(row, min(found, key=lambda step: float(step["s"]))) for row, found in pairs if found]
    yield from heading("Checksums beside a training step", CHECKSUMS, lines)
    head = (
        "| | MB | read without | with | added | alone | waited without | with | work | step, ms | waited | added |"
        " checksums where | step where |"
    )
    yield from table(head, iter(lines))


def checksums_line(row: Row, step: Row) -> str:
    keys = ("unchecked_s", "checked_s", "s", "alone_s", "waited_unchecked_s", "waited_s")
    cells = [f"{row['family']}, {size(row)}", f"{row['sample_bytes'] / 1e6:.2f}", *(f"{1e3 * row[key]:.3f}" for key in keys)]
    cells += [f"{1e3 * row['step_s']:.0f}", f"{1e3 * step['s']:.1f}, {configuration(step)}"]
    cells += [f"{row[key] / step['s']:.2%}" for key in ("waited_s", "s")]
    return f"| {' | '.join(cells)} | {origin(row)} | {origin(step)} |"


def cpu_section(rows: list[Row]) -> Iterator[str]:
    """If several rows have the same number of threads, the last is shown."""
    newest = list({(row["threads"], row["batch"], row["pixels"]): row for row in rows}.values())
    yield from heading("Beside PyTorch on a CPU", CPU, newest)
    yield from table("| | seconds | CPU seconds | GB | where |", (cpu_line(row) for row in newest))


def cpu_line(row: Row) -> str:
    what = f"{row['family']}, {row['pixels']} px, batch {row['batch']}, threads: {row['threads']}"
    pairs = (
        f"{row[f'mlx_{key}']:.3f} / {row[f'torch_{key}']:.3f} = {row[f'{key}_ratio']:.2f}" for key in ("s", "cpu_s", "peak_gb")
    )
    return f"| {what} | {' | '.join(pairs)} | {origin(row)} |"


def of_strips(row: Row) -> bool:
    """It then has no limit on live memory."""
    return "strip_mb" in row and not row["memory_limited"]


def streamed_section(rows: list[Row]) -> Iterator[str]:
    training = [row for row in rows if row["kind"] in ("train", "streaming")]
    pairs = [(row, kept) for row in training if row.get("stream") and (kept := in_memory(row, training))]
    yield from heading("Frozen blocks on disk (stream_blocks)", STREAMED, pairs)
    yield from table("| | in memory | on disk | where |", (streamed_line(row, kept) for row, kept in pairs))


def in_memory(streamed: Row, rows: list[Row]) -> Row | None:
    """The newest row with the same settings and machine whose blocks were in memory."""
    same = ("kind", "family", "bits", "px", "width", "height", "plan", "optimizer", "text_rows", "chip", "run")
    found = [row for row in rows if not row.get("stream") and all(row.get(key) == streamed.get(key) for key in same)]
    return found[-1] if found else None


def streamed_line(streamed: Row, kept: Row) -> str:
    pixels = streamed.get("px") or streamed["width"]
    return (
        f"| {streamed['family']}, {pixels} px, {streamed['bits']} bits | {cost(kept)} | {cost(streamed)} | {origin(streamed)} |"
    )


def cost(row: Row) -> str:
    return f"{row['cpu_s']:.3f} CPU s" if "cpu_s" in row else f"{row['s']:.3f} s, {row['peak_gb']:.2f} GB"


def strips_section(rows: list[Row]) -> Iterator[str]:
    yield from heading("Strips of the autoencoder", STRIPS, rows)
    lines = (
        f"| {row['kind']}, {row['width']} px | {row['strip_mb']} | {row['in_flight']} | {row['s']:.4f} | {row['peak_gb']:.2f} |"
        f" {row['estimated_gb']:.2f} |"
        for row in rows
    )
    yield from table("| | MB | in flight | s | GB | estimated GB |", lines)


def kernels_section(rows: list[Row]) -> Iterator[str]:
    yield from heading("Kernels of limited work", KERNELS, rows)
    lines = (
        f"| {row['family']}, {row['px']} px | {row['tflop'] or 'none'} | {row['s']:.3f} | {row['least_s']:.3f} | {origin(row)} |"
        for row in rows
    )
    yield from table("| | TFLOP a kernel | s | least s | where |", lines)


def float16_section(rows: list[Row]) -> Iterator[str]:
    yield from heading("Training in float16 without loss scaling", HALF, rows)
    lines = (
        f"| {row['family']}, {row['px']} px, batch {row['batch']}, {row['steps']} steps, seed {row['seed']} |"
        f" {row['float16_loss']:.4f} | {row['float32_loss']:.4f} | {row['most_apart']:.2g} | {max(row['zero_share']):.2%} |"
        f" {min(row['cosine']):.6f} | {row['skipped']} | {origin(row)} |"
        for row in rows
    )
    yield from table("| | loss | in float32 | apart | lost | cosine | skipped | where |", lines)


def differences_section(rows: list[Row]) -> Iterator[str]:
    yield from heading("What fewer bits and inexact products change", DIFFERENCES, rows)
    yield from table("| | rms | of | share | largest | where |", (difference_line(row) for row in rows))


def difference_line(row: Row) -> str:
    seconds = f"{row['exact_s']:.3f} s exact, {row['default_s']:.3f} s by default" if "exact_s" in row else ""
    how = seconds or f"{row['bits']} bits"
    numbers = " | ".join(f"{row[key]:.3g}" for key in ("rms", "of", "share", "most"))
    return f"| {row['kind']}, {row['family']}, {row['px']} px, {how} | {numbers} | {origin(row)} |"


def heading(title: str, text: str, rows: Sequence[object]) -> Iterator[str]:
    if rows:
        yield from (f"## {title}", "", *text.splitlines(), "")


def table(head: str, lines: Iterator[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield from (head, "|" + "---|" * (head.count("|") - 1), *found, "")
