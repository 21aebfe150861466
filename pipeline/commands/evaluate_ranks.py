"""`latentmill evaluate` of the pipeline retrieval: P@1, MRR@10, R@10 and nDCG@10 of each search, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from pipeline.errors import NotBuilt
from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.terminal import format_table

SEARCHES = ("semantic", "lexical", "hybrid")
HEAD = ("search", "encoder", "P@1", "MRR@10", "R@10", "nDCG@10")
QUARTILES = 4

Row = dict[str, Any]
Groups = dict[tuple[str, str], list[Row]]  # (mode, encoder) -> rows of the test split, sorted by pair_id


@click.command("evaluate")
@with_project
def command(project: Project) -> None:
    """Compare semantic, lexical and hybrid search on held-out queries, and print the report. It reads the table
    `ranks`, which `make ranks` builds.
    """
    for line in evaluate(project):
        click.echo(line)


def evaluate(project: Project) -> Iterator[str]:
    """A report on the table `ranks`: measures, differences between searches, MRR@10 by overlap. Raises NotBuilt."""
    table = project.current("ranks")
    if not table.exists:
        raise NotBuilt("evaluate needs the table ranks, which is not built for this configuration; run: make ranks", "ranks")
    groups = group_rows(table.rows().to_pylist())
    if not groups:
        yield "no pair is in the test split: set pairs.test"
        return
    for mode in sorted({mode for mode, _ in groups}, reverse=True):
        own = {encoder: rows for (other, encoder), rows in groups.items() if other == mode}
        yield from report(mode, own)
        yield ""


def group_rows(rows: list[Row]) -> Groups:
    found: Groups = defaultdict(list)
    # "base" comes first; by pair_id within a group, which pairs the queries of two searches.
    for row in sorted(rows, key=lambda row: (row["encoder"] != "base", row["encoder"], row["pair_id"])):
        if row["split"] == "test":
            found[row["mode"], row["encoder"]].append(row)
    return dict(found)


def report(mode: str, encoders: dict[str, list[Row]]) -> Iterator[str]:
    first = next(iter(encoders.values()))
    name = "plain" if mode == "plain" else "hard: every unit's own name is removed"
    yield f"{name}; {len(first)} test queries among {max(row['candidates'] for row in first)} units; 95 % intervals"
    cells = [line("lexical", "", ranks(first, "lexical"))]
    for encoder, rows in encoders.items():
        weight = next((row["weight"] for row in rows if row["weight"] is not None), None)
        if weight is None:
            continue
        cells.append(line("semantic", short(encoder), ranks(rows, "semantic")))
        cells.append(line(f"hybrid, {weight:.2f} semantic", short(encoder), ranks(rows, "hybrid")))
    yield from format_table(HEAD, cells).splitlines()
    if len(cells) == 1:
        yield "the documents without names have no vectors: tokens.hard = true encodes them"
        return
    yield from differences(encoders)
    yield from quartiles(encoders)


def short(encoder: str) -> str:
    return encoder if encoder == "base" else f"tuned {encoder[:8]}"


def ranks(rows: list[Row], search: str) -> np.ndarray:
    return np.array([row[search] for row in rows], float)


def line(search: str, encoder: str, found: np.ndarray) -> tuple[str, ...]:
    """One row of the table; a cell is a mean and its interval, such as "0.512 [0.480, 0.544]"."""
    from stages.retrieval.search.measures import MEASURES, bootstrap, wilson

    cells = []
    for name, measure in MEASURES.items():
        values = measure(found)
        mean = float(values.mean())
        # P@1 and R@10 are shares, the others means.
        low, high = wilson(mean, len(values)) if name in ("P@1", "R@10") else bootstrap(values)
        cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return search, encoder, *cells


def differences(encoders: dict[str, list[Row]]) -> Iterator[str]:
    """MRR@10 between the searches of each encoder, and between each tuned encoder and the base."""
    yield "difference in MRR@10, paired bootstrap:"
    for encoder, rows in encoders.items():
        for one, other in (("semantic", "lexical"), ("hybrid", "lexical"), ("hybrid", "semantic")):
            yield difference(f"{one} - {other}, {short(encoder)}", ranks(rows, one), ranks(rows, other))
    base = encoders.get("base")
    for encoder, rows in encoders.items() if base else ():
        for search in ("semantic", "hybrid") if encoder != "base" and base else ():
            yield difference(f"{short(encoder)} - base, {search}", ranks(rows, search), ranks(base or [], search))


def difference(name: str, one: np.ndarray, other: np.ndarray) -> str:
    from stages.retrieval.search.measures import bootstrap, reciprocal

    # Both have the same queries in the same order, so the difference is paired.
    values = reciprocal(one) - reciprocal(other)
    low, high = bootstrap(values)
    return f"  {name}: {values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def quartiles(encoders: dict[str, list[Row]]) -> Iterator[str]:
    """MRR@10 in quarters of the queries by word overlap with the code, for the last encoder."""
    from stages.retrieval.search.measures import reciprocal

    encoder, rows = list(encoders.items())[-1]
    yield f"MRR@10 by the share of the query's words that occur in the code, {short(encoder)}:"
    order = np.argsort([row["overlap"] for row in rows], kind="stable")
    for part in np.array_split(order, QUARTILES):
        some = [rows[place] for place in part]
        if some:
            means = ", ".join(f"{search} {reciprocal(ranks(some, search)).mean():.3f}" for search in SEARCHES)
            yield f"  {some[0]['overlap']:.2f} to {some[-1]['overlap']:.2f} ({len(some)} queries): {means}"
