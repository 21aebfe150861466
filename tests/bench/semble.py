"""nDCG@10 by file of `find` on semble's questions: `python -m tests.bench.semble BENCHMARKS REPOSITORIES [NAME ...]`.

BENCHMARKS is the folder benchmarks/ of a checkout of MinishLab/semble, REPOSITORIES a folder of checkouts, each with the name and
at the revision that repos.json says. Of ten answers the files count, in their order, each once. The first call indexes the
repositories, which takes many minutes of CPU time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands.retrieval.find import CodeFolder

CUT = 10


def ndcg(files: list[str], right: list[str]) -> float:
    """`files`: in the order of the answers. Two paths are one file if either ends with the other, as in semble's measure."""
    found = [
        any(f"/{one}".endswith(f"/{each}") for one, each in ((file, path), (path, file))) for path in right for file in files
    ]
    ranks = [int(row.argmax()) for row in np.array(found, bool).reshape(len(right), len(files)) if row.any()]
    gains = 1 / np.log2(2 + np.arange(CUT))
    return float(gains[ranks].sum() / gains[: len(right)].sum())


def measured(root: Path, questions: list[dict[str, Any]]) -> list[float]:
    """One per question. Raises ValueError for a folder without code."""
    found = []
    with CodeFolder(root).current() as code:
        for each in questions:
            answers = code.search(each["query"], CUT, threshold=0.0)
            files = list(dict.fromkeys(Path(answer.row["file"]).as_posix() for answer in answers))
            right = [path if isinstance(path, str) else path["path"] for path in (*each["relevant"], *each.get("secondary", ()))]
            found.append(ndcg(files, right))
    return found


@click.command()
@click.argument("benchmarks", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("repositories", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("names", nargs=-1)
def main(benchmarks: Path, repositories: Path, names: tuple[str, ...]) -> None:
    everything: list[float] = []
    for about in json.loads((benchmarks / "repos.json").read_text(encoding="utf-8")):
        name, root = about["name"], repositories / about["name"] / (about.get("benchmark_root") or "")
        if (names and name not in names) or not root.is_dir():
            continue
        own = measured(root, json.loads((benchmarks / "annotations" / f"{name}.json").read_text(encoding="utf-8")))
        everything += own
        click.echo(f"{name}, {about['language']}: {len(own)} questions, {np.mean(own):.3f}")
    click.echo(f"{len(everything)} questions: nDCG@{CUT} {np.mean(everything):.3f}")


if __name__ == "__main__":
    main()
