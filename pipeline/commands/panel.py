"""`latentmill panel`: runs a stored query of the project's pipeline by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.commands.query import answer
from pipeline.commands.query_text import STYLES, format_answer
from pipeline.options import with_project
from pipeline.project.parse import nearest
from pipeline.terminal import format_table

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.project.project import Project


@click.command("panel")
@click.argument("name", required=False, envvar="LATENTMILL_NAME")
@click.option("--format", "style", type=click.Choice(STYLES), default="table", show_default=True, help="Format of the answer.")
@with_project
def command(name: str | None, style: str, project: Project) -> None:
    """Show the answer to a stored query of the pipeline. Such a query is called a panel. NAME is the name of the panel,
    such as `loss`. Without NAME, all panels of the project's pipeline are listed. --format prints the answer as a
    table, as CSV or as JSON.
    """
    if name:
        rows = answer_panel(project, name)
        click.echo(format_answer(rows.column_names, [tuple(row.values()) for row in rows.to_pylist()], style))
    else:
        click.echo(format_table(("panel", "shows"), [(panel.name, panel.title) for panel in project.pipeline.panels]))


def answer_panel(project: Project, name: str) -> pa.Table:
    """The rows of a panel. Raises ValueError, with the nearest name, if it does not exist, NotBuilt if it needs a table."""
    panels = {panel.name: panel for panel in project.pipeline.panels}
    if name not in panels:
        raise ValueError(f"there is no panel {name!r}{nearest(name, panels)}; there are {', '.join(panels) or 'none'}")
    return answer(project, panels[name].sql)
