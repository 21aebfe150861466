"""The command of the toy pipeline."""

from __future__ import annotations

import click

from pipeline import Project


@click.command("longest")
@click.option("--project", "-p", "path", default=".", help="The project's folder.")
def longest(path: str) -> None:
    (row,) = Project(path).sql("select text from lines order by length(text) desc, text limit 1").to_pylist()
    click.echo(row["text"])
