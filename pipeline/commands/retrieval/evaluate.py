"""`latentmill evaluate` of the pipeline retrieval: P@1, MRR@10, R@10 and nDCG@10 of each search, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.terminal import format_table, tell
from schemas.retrieval import RANKS
from stages.intervals import bootstrap_mean

SEARCHES = ("semantic", "lexical", "hybrid")
HEAD = ("search", "encoder", "P@1", "MRR@10", "R@10", "nDCG@10")
QUARTILES = 4

Columns = dict[str, np.ndarray]  # column of `ranks` -> its values, float64, in the order of pair_id; null is nan


@click.command("evaluate")
@with_project
def command(project: Project) -> None:
    """Compare semantic, lexical and hybrid search on held-out queries, and print the report. It reads the table
    `ranks`, which `make ranks` builds.
    """
    for line in evaluate(project):
        tell(line)


def evaluate(project: Project) -> Iterator[str]:
    """A report on the table `ranks`: measures, differences between searches, MRR@10 by overlap. Raises NotBuilt."""
    found = project.rows(RANKS, "evaluate").to_pylist()
    groups: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    # "base" comes first; by pair_id within a group, which pairs the queries of two searches.
    for row in sorted(found, key=lambda row: (row["encoder"] != "base", row["encoder"], row["pair_id"])):
        if row["split"] == "test":
            encoder = row["encoder"] if row["encoder"] == "base" else f"tuned {row['encoder'][:8]}"
            groups[row["mode"]][encoder].append(row)
    if not groups:
        yield "nothing to evaluate: no unit with a docstring is in the test split; pairs.split and pairs.test say what is"
        return
    names = (*SEARCHES, "weight", "overlap", "candidates")
    for mode in sorted(groups, reverse=True):
        own = {
            encoder: {name: np.array([row[name] for row in rows], float) for name in names}
            for encoder, rows in groups[mode].items()
        }
        yield from report(mode, own)
        yield ""


def report(mode: str, encoders: dict[str, Columns]) -> Iterator[str]:
    first = next(iter(encoders.values()))
    name = "plain" if mode == "plain" else "hard: every unit's own name is removed"
    yield f"{name}; {len(first['lexical'])} test queries among {int(first['candidates'].max())} units; 95 % intervals"
    # An encoder without a weight has no vectors in this mode.
    measured = {encoder: columns for encoder, columns in encoders.items() if not np.isnan(columns["weight"]).all()}
    cells = [line("lexical", "", first["lexical"])]
    for encoder, columns in measured.items():
        weight = columns["weight"][~np.isnan(columns["weight"])][0]
        cells.append(line("semantic", encoder, columns["semantic"]))
        cells.append(line(f"hybrid, {weight:.2f} semantic", encoder, columns["hybrid"]))
    yield from format_table(HEAD, cells).splitlines()
    if not measured:
        yield "the documents without names have no vectors: tokens.hard = true encodes them"
        return
    yield from differences(measured)
    yield from quartiles(measured)


def line(search: str, encoder: str, found: np.ndarray) -> tuple[str, ...]:
    """One row of the table; a cell is a mean and its interval, such as "0.512 [0.480, 0.544]"."""
    from stages.retrieval.search.measures import MEASURES, wilson

    cells = []
    for name, measure in MEASURES.items():
        values = measure(found)
        mean = float(values.mean())
        # P@1 and R@10 are shares, the others means.
        low, high = wilson(mean, len(values)) if name in ("P@1", "R@10") else bootstrap_mean(values)
        cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return search, encoder, *cells


def differences(encoders: dict[str, Columns]) -> Iterator[str]:
    """MRR@10 between the searches of each encoder, and between each tuned encoder and the base."""
    from stages.retrieval.search.measures import reciprocal

    pairs = [
        (f"{one} - {other}, {encoder}", columns[one], columns[other])
        for encoder, columns in encoders.items()
        for one, other in (("semantic", "lexical"), ("hybrid", "lexical"), ("hybrid", "semantic"))
    ]
    if base := encoders.get("base"):
        pairs += [
            (f"{encoder} - base, {search}", columns[search], base[search])
            for encoder, columns in encoders.items()
            for search in ("semantic", "hybrid")
            if encoder != "base"
        ]
    yield "difference in MRR@10, paired bootstrap:"
    for name, one, other in pairs:
        # Both have the same queries in the same order, so the difference is paired.
        values = reciprocal(one) - reciprocal(other)
        low, high = bootstrap_mean(values)
        yield f"  {name}: {values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def quartiles(encoders: dict[str, Columns]) -> Iterator[str]:
    """MRR@10 in quarters of the queries by word overlap with the code, for the last encoder."""
    from stages.retrieval.search.measures import reciprocal

    encoder, columns = list(encoders.items())[-1]
    yield f"MRR@10 by the share of the query's words that occur in the code, {encoder}:"
    overlap = columns["overlap"]
    for part in np.array_split(np.argsort(overlap, kind="stable"), QUARTILES):
        if len(part):
            means = ", ".join(f"{search} {reciprocal(columns[search][part]).mean():.3f}" for search in SEARCHES)
            yield f"  {overlap[part[0]]:.2f} to {overlap[part[-1]]:.2f} ({len(part)} queries): {means}"
