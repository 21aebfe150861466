"""The rows of the benchmark of the retriever as a Markdown page: `python -m tests.bench.retriever --table FILE`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.labels import Row, origin

INTRODUCTION = """\
# Benchmark of the retriever

On one H200, training and encoding are faster than with PyTorch, compiled; on one thread of a CPU they are slower. The tables
say by how much, and what a limit of memory costs.

Generated from bench-retriever.jsonl by `python -m tests.bench.retriever --table data/measurements/bench-retriever.jsonl`.
`python -m tests.bench.retriever` measures. Weights and token ids are random and every token is real. PyTorch "transformers" is
`T5EncoderModel` with the same LoRA. Seconds are medians. Encoding is of documents alone. A limit is the memory at which MLX
starts no further operation until an earlier one has ended. On a CPU, the peak is of the whole process.
"""


def page(rows: list[Row]) -> Iterator[str]:
    good = [row for row in rows if "error" not in row]
    yield from INTRODUCTION.splitlines()
    for size, dtype in dict.fromkeys((row["size"], row["dtype"]) for row in good):
        some = [row for row in good if (row["size"], row["dtype"]) == (size, dtype)]
        yield ""
        yield f"## T5 {size}, {dtype}, {some[0]['query']} and {some[0]['document']} tokens, rank {some[0]['rank']}"
        yield ""
        yield "| | pairs | limit, GB | samples/s | seconds | peak GB |"
        yield "|---|---:|---:|---:|---:|---:|"
        yield from (line(row) for row in some)
    yield ""
    yield "Machines and versions:"
    yield ""
    yield from (f"- {where}" for where in sorted({origin(row) for row in good}))


def line(row: Row) -> str:
    words = [row["kind"], "MLX" if row["backend"] == "mlx" else "PyTorch", row["plan"]]
    words += [f"micro-batch {row['micro_batch']}"] if row["micro_batch"] else []
    words += ["without cuDNN's attention"] if row.get("unfused") else []
    words += [f"threads: {row['threads']}"] if row.get("threads") else []
    limit = f"{row['memory_gb']:g}" if row["memory_gb"] else ""
    peak = f"{row['peak_gb']:.2f}" if row.get("peak_gb") else ""
    rate = f"{row['samples_per_s']:.{0 if row['samples_per_s'] >= 100 else 1}f}"
    return f"| {', '.join(words)} | {row['batch']} | {limit} | {rate} | {row['s']:.4f} | {peak} |"
