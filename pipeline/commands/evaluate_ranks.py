"""`latentmill evaluate` of the pipeline retrieval: P@1, MRR@10, R@10 and nDCG@10 of each search, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from pipeline.options import with_project
from pipeline.project.project import NotBuilt, Project
from pipeline.terminal import format_table

SEARCHES = ("semantic", "lexical", "hybrid")
HEAD = ("search", "encoder", "P@1", "MRR@10", "R@10", "nDCG@10")
QUARTILES = 4

Row = dict[str, Any]
Groups = dict[tuple[str, str], list[Row]]  # (mode, encoder) -> rows of the test split, sorted by pair_id


@click.command("evaluate")
@with_project
def command(project: Project) -> None:
    """Compare semantic, lexical and hybrid search on held-out queries. `make ranks` ranks them first."""
    for line in evaluate(project):
        click.echo(line)


def evaluate(project: Project) -> Iterator[str]:
    """Yield the lines of a report on the table `ranks`: a table of measures per mode, paired differences, and MRR@10 by the
    overlap of the words of query and code. Raises NotBuilt if the table does not exist.
    """
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
    """Group the rows of the test split by mode and encoder, the base first."""
    found: Groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["encoder"] != "base", row["encoder"], row["pair_id"])):
        if row["split"] == "test":
            found[row["mode"], row["encoder"]].append(row)
    return dict(found)


def report(mode: str, encoders: dict[str, list[Row]]) -> Iterator[str]:
    """Yield the lines of the report on one mode. `encoders` maps each encoder to its rows."""
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
    """Return the name of an encoder for people: "base", or the start of its adapter's sha256."""
    return encoder if encoder == "base" else f"tuned {encoder[:8]}"


def ranks(rows: list[Row], search: str) -> np.ndarray:
    """Return the ranks of the own units in a search, in the order of `rows`."""
    return np.array([row[search] for row in rows], float)


def line(search: str, encoder: str, found: np.ndarray) -> tuple[str, ...]:
    """Return a line of the report's table: each measure with its interval, Wilson's for shares and bootstrap for means."""
    from stages.retrieval.search.measures import MEASURES, bootstrap, wilson

    cells = []
    for name, measure in MEASURES.items():
        values = measure(found)
        mean = float(values.mean())
        low, high = wilson(mean, len(values)) if name in ("P@1", "R@10") else bootstrap(values)
        cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return search, encoder, *cells


def differences(encoders: dict[str, list[Row]]) -> Iterator[str]:
    """Yield a line per comparison of two searches on the same queries: the difference in MRR@10 with its paired interval."""
    yield "difference in MRR@10, paired bootstrap:"
    for encoder, rows in encoders.items():
        for one, other in (("semantic", "lexical"), ("hybrid", "lexical"), ("hybrid", "semantic")):
            yield difference(f"{one} - {other}, {short(encoder)}", ranks(rows, one), ranks(rows, other))
    base = encoders.get("base")
    for encoder, rows in encoders.items() if base else ():
        for search in ("semantic", "hybrid") if encoder != "base" and base else ():
            yield difference(f"{short(encoder)} - base, {search}", ranks(rows, search), ranks(base or [], search))


def difference(name: str, one: np.ndarray, other: np.ndarray) -> str:
    """Return a line about the difference in MRR@10 of two searches, whose ranks are of the same queries in the same order."""
    from stages.retrieval.search.measures import bootstrap, reciprocal

    values = reciprocal(one) - reciprocal(other)
    low, high = bootstrap(values)
    return f"  {name}: {values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def quartiles(encoders: dict[str, list[Row]]) -> Iterator[str]:
    """Yield lines with MRR@10 by quartile of the overlap of query and code: the first quartile shares the fewest words."""
    from stages.retrieval.search.measures import reciprocal

    encoder, rows = list(encoders.items())[-1]
    yield f"MRR@10 by the share of the query's words that occur in the code, {short(encoder)}:"
    order = np.argsort([row["overlap"] for row in rows], kind="stable")
    for part in np.array_split(order, QUARTILES):
        some = [rows[place] for place in part]
        if some:
            means = ", ".join(f"{search} {reciprocal(ranks(some, search)).mean():.3f}" for search in SEARCHES)
            yield f"  {some[0]['overlap']:.2f} to {some[-1]['overlap']:.2f} ({len(some)} queries): {means}"
