"""`latentmill lint`: looks for mistakes in the images and captions of a project."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.commands.panel import answer_panel
from pipeline.commands.query_text import STYLES, format_answer
from pipeline.options import with_project
from pipeline.terminal import Terminal

if TYPE_CHECKING:
    from pipeline.project.project import Project

STAGE = "checks"


@click.command("lint")
@click.option("--format", "style", type=click.Choice(STYLES), default="table", show_default=True, help="Format of the answer.")
@with_project
def command(style: str, project: Project) -> None:
    """Look for mistakes in the images and captions. They are near-duplicates, blur, bad exposure, borders, small or
    very long pictures, equal captions, captions without the trigger. The table `checks` is brought up to date first.
    Each row that is printed is an image with warnings. Images with warnings are still used. To exclude images, set the
    condition `where` in the section [buckets]. --format prints the rows as a table, as CSV or as JSON.
    """
    from pipeline import runner

    for name in [*project.pipeline.upstream(STAGE), STAGE]:
        with Terminal(name) as terminal:
            runner.run(project, name, terminal)
        project.refresh()
    rows = answer_panel(project, STAGE)
    if rows.num_rows:
        click.echo(format_answer(rows.column_names, [tuple(row.values()) for row in rows.to_pylist()], style))
    else:
        click.echo("no image has a warning")
