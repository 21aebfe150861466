"""`latentmill follow`: trace one input through the tables of a project. The pipeline's Chain says how."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from pipeline.options import with_project
from stages.stage import Chain, Query, load

if TYPE_CHECKING:
    from pipeline.project.project import Project

NAMED = 5  # rows that are named if a text matches several


@click.command("follow")
@click.argument("text", required=False, envvar="LATENTMILL_WHAT")
@with_project
def command(text: str | None, project: Project) -> None:
    """Trace one input through every table: what each stage made of it.

    TEXT names the input, for instance by its path or a part of it; the pipeline decides what else it may be.
    """
    if not text:
        chain = chain_of(project)
        raise ValueError(f"follow needs a text: {chain.text}; with make: make follow WHAT=TEXT")
    for line in follow(project, text):
        click.echo(line)


def follow(project: Project, text: str) -> Iterator[str]:
    """Yield the story of one input line by line: what every table of the pipeline's Chain holds about it.

    ValueError, in one line, if the text matches no input, or several.
    """
    chain = chain_of(project)
    ask = asking(project)
    row = find(project, chain, ask, text)
    built = {each["stage"] for each in ask("select stage from tables where built")}
    for table, tell in chain.describe.items():
        lines = tell(ask, row) if table in built else iter([f"not built yet; run: make {table}"])
        for number, line in enumerate(lines):
            yield f"{table if number == 0 else '':9} {line}"


def chain_of(project: Project) -> Chain:
    """Return the Chain of the project's pipeline. ValueError if the pipeline has none."""
    if not project.pipeline.follow:
        raise ValueError(f"the pipeline {project.pipeline.name} does not tell how to follow an input")
    chain: Chain = load(project.pipeline.follow)
    return chain


def asking(project: Project) -> Query:
    """Return a function (sql, **values) that queries the project's tables and returns rows as dictionaries."""
    from pipeline.commands.query import open_catalog

    connection = open_catalog(project)

    def ask(sql: str, **values: Any) -> list[dict[str, Any]]:
        result = connection.execute(sql, values)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    return ask


def find(project: Project, chain: Chain, ask: Query, text: str) -> dict[str, Any]:
    """Return the one row of the chain's first table that a text names. ValueError if it names none or several."""
    rows = chain.find(ask, project.resource, text)
    if len(rows) == 1:
        return rows[0]
    if rows:
        named = ", ".join(str(row[chain.label]) for row in rows[:NAMED]) + (", ..." if len(rows) > NAMED else "")
        raise ValueError(f"{text!r} matches {len(rows)} rows of {chain.table}: {named}; give more of one")
    labels = [str(each["label"]) for each in ask(f"select {chain.label} as label from {chain.table} order by label desc")]
    if not labels:
        raise ValueError(f"the table {chain.table} is empty; run: make {chain.table}")
    whole = {label.rpartition("/")[2]: label for label in labels} | {label: label for label in labels}
    near = dict.fromkeys(whole[name] for name in difflib.get_close_matches(text, whole, n=NAMED, cutoff=0.4))
    raise ValueError(f"{text!r} is not {chain.text} of this project{'; near it: ' + ', '.join(near) if near else ''}")
