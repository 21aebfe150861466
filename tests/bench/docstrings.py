"""How well the first sentences of docstrings find their functions: `python -m tests.bench.docstrings FOLDER ...`.

At most 500 of a folder's functions of five lines or more are asked for, without titles and without words of docstrings. "Before"
is 0.5 by meaning, all words, no rule. The first call indexes the folders, which takes some minutes of CPU time.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import click
import numpy as np

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands.retrieval.find import CodeFolder
from schemas.retrieval import UNITS
from stages.retrieval.pairs import PairsConfig, reason_against
from stages.retrieval.search import lexical, measures, ranking
from stages.retrieval.texts import Row

ASKED, RANKED = 500, 300


def asked(units: list[Row]) -> list[int]:
    """The places of the functions that are asked for."""
    bodies, seen, found = Counter(unit["body"] for unit in units), set(), []
    for place, unit in enumerate(units):
        query = unit["query"]
        if not query or query in seen or bodies[unit["body"]] > 1 or unit["kind"] not in ("function", "method"):
            continue
        if not reason_against(query, unit["text"], unit["code_lines"], PairsConfig()):
            seen.add(query)
            found.append(place)
    random.Random(0).shuffle(found)
    return sorted(found[:ASKED])


def reciprocal_ranks(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(before, now, whether the function is one of tests), one each per docstring."""
    with CodeFolder(folder).current() as code, tempfile.TemporaryDirectory() as temporary:
        searcher = code.searcher
        rows = {row["unit_id"]: row for row in code.project.rows(UNITS, "find").to_pylist()}
        units = [rows[unit_id] for unit_id in searcher.rows["unit_id"].to_pylist()]
        lexical.build(Path(temporary), [unit["words"] for unit in units])
        words, own = lexical.LexicalIndex(Path(temporary), len(units)), asked(units)
        queries = [units[place]["query"] for place in own]
        assert searcher.encoder
        meaning = searcher.read(searcher.ids).scores(searcher.encoder.encode_queries(queries))
        before, now = [], []
        for place, query, scores in zip(own, queries, meaning, strict=True):
            before.append(measures.rank_of(lexical.hybrid(scores, words.scores(query), 0.5), place))
            telling = words.scores(ranking.telling(query))
            sums = lexical.hybrid(scores, telling, ranking.share(query))
            best = np.sort(np.argsort(-sums, kind="stable")[:RANKED])
            ordered = ranking.reorder(sums[best], best, searcher.units, ranking.Asked(query, telling))
            [at] = np.flatnonzero(best == place) if place in best else [None]
            now.append(measures.CUT + 1 if at is None else measures.rank_of(ordered, int(at)))
        return *(measures.reciprocal(np.array(ranks)) for ranks in (before, now)), searcher.units.aside[own]


def told(before: np.ndarray, now: np.ndarray) -> str:
    means = np.random.default_rng(0).choice(now - before, (4000, len(now))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{len(now)}: {before.mean():.3f}, {now.mean():.3f}, {(now - before).mean():+.3f} [{low:+.3f}, {high:+.3f}]"


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        before, now, aside = reciprocal_ranks(folder)
        click.echo(f"{folder.name}, {told(before, now)}; without tests, {told(before[~aside], now[~aside])}")


if __name__ == "__main__":
    main()
