"""The commands of the toy pipeline."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pipeline import Project
from pipeline.errors import Stopped
from pipeline.process import interruptible


@click.command("longest")
@click.option("--project", "-p", "path", default=".", help="The project's folder.")
def longest(path: str) -> None:
    (row,) = Project(path).sql("select text from lines order by length(text) desc, text limit 1").to_pylist()
    click.echo(row["text"])


@click.command("mark")
@click.argument("word")
@click.option("--until", "file", type=click.Path(path_type=Path), help="Wait until this file exists.")
@click.option("--project", "-p", "path", default=".", type=click.Path(path_type=Path), help="The project's folder.")
def mark(word: str, file: Path | None, path: Path) -> None:
    """Append lines to PROJECT/marks: "WORD begins", and "WORD ends" or "WORD stops"."""

    def note(text: str) -> None:
        with (path / "marks").open("a") as marks:
            marks.write(f"{word} {text}\n")

    note("begins")
    with interruptible() as stop:
        while file and not file.exists():
            if stop.is_set():
                note("stops")
                raise Stopped(f"{word}: stopped")
            time.sleep(0.01)
    note("ends")
    click.echo(f"{word} is marked")
