"""`latentmill families`: lists the model families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

import stages
from pipeline.terminal import format_table
from stages.pipelines import load

if TYPE_CHECKING:
    from stages.models.family import Family


@click.command("families")
def command() -> None:
    """List the model families, their licences and weights."""
    click.echo(format_table(("family", "model", "licence", "weights"), family_rows()))


def family_rows() -> Iterator[tuple[Any, ...]]:
    """Yield (name, title, licence, source of the weights) for every model family of every built-in pipeline."""
    for name in stages.PIPELINES:
        pipeline = stages.pipeline(name)
        families: Mapping[str, Family] = load(pipeline.families) if pipeline.families else {}
        for family in families.values():
            yield family.name, family.title, family.licence, family.source
