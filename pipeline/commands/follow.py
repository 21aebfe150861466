"""`latentmill follow`: traces one input through the tables of a project, as the pipeline's `Chain` describes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from typing import Any

import click

from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.terminal import tell
from stages.pipelines import Chain, Query, load

NAMED = 5  # rows that are named if a text matches several


@click.command("follow")
@click.argument("text", required=False)
@with_project
def command(text: str | None, project: Project) -> None:
    """Show what every stage computed from one input. TEXT names the input, for instance by its path or a part of the path; the
    pipeline decides what else TEXT may be.
    """
    for line in follow(project, text or ""):
        tell(line)


def follow(project: Project, text: str, query: Query | None = None) -> Iterator[str]:
    """What every stage computed from one input. Raises ValueError if `text` matches none, or several. `query`: of its catalog."""
    from pipeline.commands.catalog import dicts, open_catalog

    if not project.pipeline.follow:
        raise ValueError(f"the pipeline {project.pipeline.name} has no description of how to follow an input (Pipeline.follow)")
    chain: Chain = load(project.pipeline.follow)
    if not text:
        raise ValueError(f"follow needs a text: {chain.text}; with make: make follow WHAT=TEXT")
    query = query or functools.partial(dicts, open_catalog(project))
    row = find_row(project, chain, query, text)
    built = {each["stage"] for each in query("select stage from tables where built")}
    for table, described in chain.describe.items():
        lines = list(described(query, row)) or ["none"] if table in built else [f"not built yet; run: make {table}"]
        for number, line in enumerate(lines):
            yield f"{table if number == 0 else '':9} {line}"


def find_row(project: Project, chain: Chain, query: Query, text: str) -> dict[str, Any]:
    """The row that `text` names. Raises ValueError with the matches if there are several, with similar names if there is none."""
    rows = chain.find(query, project.resource, text)
    if len(rows) == 1:
        return rows[0]
    if rows:
        named = ", ".join(str(row[chain.label]) for row in rows[:NAMED]) + (", ..." if len(rows) > NAMED else "")
        raise ValueError(
            f"{text!r} matches {len(rows)} rows of {chain.table}: {named}; give a longer text that matches one of them"
        )
    labels = [str(each["label"]) for each in query(f"select {chain.label} as label from {chain.table} order by label desc")]
    if not labels:
        raise ValueError(f"the table {chain.table} is empty; run: make {chain.table}")
    whole = {label.rpartition("/")[2]: label for label in labels} | {label: label for label in labels}
    near = dict.fromkeys(whole[name] for name in difflib.get_close_matches(text, whole, n=NAMED, cutoff=0.4))
    raise ValueError(f"{text!r} is not {chain.text} of this project{'; the nearest: ' + ', '.join(near) if near else ''}")
