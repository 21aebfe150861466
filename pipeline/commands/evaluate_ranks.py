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
    """Yield the lines of a report on search quality. The table `ranks` of `project`, the opened project folder, has the
    rank of the correct result for each query. The report has one part for each mode. In the mode "plain", the documents
    are complete. In the mode "hard", each document that answers a query lacks the name of its function. Raises NotBuilt
    if the table does not exist.

    A part has a table of retrieval measures, and the differences between searches. It also has MRR@10 for queries that
    share few or many words with the code.
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
    """Group the rows of the test split, and return a dict: (mode, encoder) -> rows. `rows` are rows of the table
    `ranks`, one per mode, encoder and pair of query and correct result. The mode is "plain", or "hard" if names were
    removed from the documents. The encoder is "base" (without an adapter), or the sha256 of an adapter. "base" comes
    first. The rows of a group are sorted by `pair_id`.
    """
    found: Groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["encoder"] != "base", row["encoder"], row["pair_id"])):
        if row["split"] == "test":
            found[row["mode"], row["encoder"]].append(row)
    return dict(found)


def report(mode: str, encoders: dict[str, list[Row]]) -> Iterator[str]:
    """Yield the lines of the report on one mode of the evaluation. `mode` is "plain" or "hard". In the mode "plain",
    the searched documents are complete. A document is the text of a piece of code, such as a function. In the mode
    "hard", every document that answers a query lacks the name of its function or class. `encoders` maps each encoder to
    its rows of the table `ranks` in this mode. An encoder is "base" (without an adapter), or the sha256 of an adapter.
    """
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
    """Return the name of an encoder for the report. `encoder` is "base" or the sha256 of an adapter. The name is
    "base", or "tuned" and the first 8 digits of the sha256.
    """
    return encoder if encoder == "base" else f"tuned {encoder[:8]}"


def ranks(rows: list[Row], search: str) -> np.ndarray:
    """Return the rank of each query's correct result, counted from 1, as a float array in the order of `rows`. A
    missing rank is NaN. `rows` are rows of the table `ranks`. `search` is "semantic", "lexical" or "hybrid".
    """
    return np.array([row[search] for row in rows], float)


def line(search: str, encoder: str, found: np.ndarray) -> tuple[str, ...]:
    """Return one row of the report's table: `search`, `encoder`, then P@1, MRR@10, R@10 and nDCG@10. A measure is a
    text with the mean and its 95 % interval, such as "0.512 [0.480, 0.544]". `found` holds the rank of the correct
    result for each query.
    """
    from stages.retrieval.search.measures import MEASURES, bootstrap, wilson

    cells = []
    for name, measure in MEASURES.items():
        values = measure(found)
        mean = float(values.mean())
        low, high = wilson(mean, len(values)) if name in ("P@1", "R@10") else bootstrap(values)
        cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return search, encoder, *cells


def differences(encoders: dict[str, list[Row]]) -> Iterator[str]:
    """Yield a heading, then one line per comparison of two searches on the same queries. Each line gives the difference
    in MRR@10 with its 95 % bootstrap interval. Semantic, lexical and hybrid search are compared with each encoder. Each
    encoder with an adapter is also compared with the encoder "base". `encoders` maps each encoder to its rows of the
    table `ranks`.
    """
    yield "difference in MRR@10, paired bootstrap:"
    for encoder, rows in encoders.items():
        for one, other in (("semantic", "lexical"), ("hybrid", "lexical"), ("hybrid", "semantic")):
            yield difference(f"{one} - {other}, {short(encoder)}", ranks(rows, one), ranks(rows, other))
    base = encoders.get("base")
    for encoder, rows in encoders.items() if base else ():
        for search in ("semantic", "hybrid") if encoder != "base" and base else ():
            yield difference(f"{short(encoder)} - base, {search}", ranks(rows, search), ranks(base or [], search))


def difference(name: str, one: np.ndarray, other: np.ndarray) -> str:
    """Return a line with the mean difference in MRR@10 of two searches and its 95 % bootstrap interval. `one` and
    `other` hold the ranks of the correct results. Both must have the same queries in the same order. `other` is
    subtracted from `one`. `name` is the label of the line.
    """
    from stages.retrieval.search.measures import bootstrap, reciprocal

    values = reciprocal(one) - reciprocal(other)
    low, high = bootstrap(values)
    return f"  {name}: {values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def quartiles(encoders: dict[str, list[Row]]) -> Iterator[str]:
    """Yield lines of text: a heading, then one line for each quarter of the queries. The queries are sorted by the
    share of their words that occur in the code, the lowest first. A line has the MRR@10 of semantic, lexical and hybrid
    search. `encoders` maps each encoder to its rows of the table `ranks`. Only the rows of the last encoder in this
    dict are used.
    """
    from stages.retrieval.search.measures import reciprocal

    encoder, rows = list(encoders.items())[-1]
    yield f"MRR@10 by the share of the query's words that occur in the code, {short(encoder)}:"
    order = np.argsort([row["overlap"] for row in rows], kind="stable")
    for part in np.array_split(order, QUARTILES):
        some = [rows[place] for place in part]
        if some:
            means = ", ".join(f"{search} {reciprocal(ranks(some, search)).mean():.3f}" for search in SEARCHES)
            yield f"  {some[0]['overlap']:.2f} to {some[-1]['overlap']:.2f} ({len(some)} queries): {means}"
