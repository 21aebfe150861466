"""`latentmill panel`: the answers to questions that are asked often, named by the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.commands.query import STYLES, format_answer
from pipeline.options import with_project
from pipeline.terminal import format_table

if TYPE_CHECKING:
    from pipeline.project.project import Project


@click.command("panel")
@click.argument("name", required=False)
@click.option("--format", "style", type=click.Choice(STYLES), default="table", show_default=True)
@with_project
def command(name: str | None, style: str, project: Project) -> None:
    """Show a panel: the answer to a question that is asked often. Without NAME, list the panels.

    Panels belong to the project's pipeline.
    """
    if name:
        answer = project.panel(name)
        click.echo(format_answer(answer.column_names, [tuple(row.values()) for row in answer.to_pylist()], style))
    else:
        click.echo(format_table(("panel", "shows"), [(panel.name, panel.title) for panel in project.pipeline.panels]))
