"""How many of the questions in questions.jsonl find their answer: `python -m tests.bench.questions`.

Each is in everyday words over an installed package that no training has seen, and names the functions or classes that answer it
(file:name); both were written before any search. The questions of the set "tune" chose the rules and constants of the ranking,
those of "report" chose nothing. The first call indexes the packages, which takes some minutes of CPU time.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands.retrieval.find import CodeFolder

FILE = Path(__file__).with_suffix(".jsonl")
SHOWN = 5


def questions(chosen: str) -> dict[str, list[dict[str, Any]]]:
    """Those of a set, by package."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["set"] == chosen:
            found.setdefault(row["package"], []).append(row)
    return found


def ranks(package: str, asked: list[dict[str, Any]], mode: Any) -> list[int]:
    """The place of the first right answer among SHOWN, from 1; 0 if none is right. Raises ValueError for a label of no unit."""
    spec = find_spec(package)
    assert spec is not None and spec.origin, f"{package} is not installed"
    found = []
    with CodeFolder(Path(spec.origin).parent, mode).current() as code:
        known = {label(row) for row in code.searcher.rows.to_pylist()}
        for each in asked:
            if not known & set(each["right"]):
                raise ValueError(f"{package} has none of {each['right']}")
            answers = [label(answer.row) for answer in code.search(each["question"], SHOWN)]
            found.append(next((place for place, name in enumerate(answers, 1) if name in each["right"]), 0))
    return found


def label(row: dict[str, Any]) -> str:
    return f"{row['path'].partition('/')[2]}:{row['qualified_name']}"


@click.command()
@click.option("--set", "chosen", type=click.Choice(["report", "tune"]), default="report", show_default=True)
@click.option("--mode", type=click.Choice(["hybrid", "semantic", "lexical"]), default="hybrid", show_default=True)
@click.option("--each", is_flag=True, help="Also print every question with the place of its answer.")
def main(chosen: str, mode: str, each: bool) -> None:
    places = []
    for package, asked in questions(chosen).items():
        own = ranks(package, asked, mode)
        places += own
        first, shown = sum(place == 1 for place in own), sum(place > 0 for place in own)
        distribution = {"fontTools": "fonttools"}.get(package, package)
        click.echo(
            f"{package} {version(distribution)}: {len(own)} questions, {first} right in first place, {shown} in {SHOWN} shown"
        )
        for row, place in zip(asked, own, strict=True) if each else ():
            click.echo(f"  {place or '-'}  {row['question']}")
    first, shown = sum(place == 1 for place in places), sum(place > 0 for place in places)
    click.echo(f"{chosen}, {mode}: {len(places)} questions, {first} right in first place, {shown} in {SHOWN} shown")


if __name__ == "__main__":
    main()
