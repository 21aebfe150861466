"""`latentmill crops`: shows what training sees of each image, as contact sheets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.options import with_project
from pipeline.terminal import Terminal

if TYPE_CHECKING:
    from pipeline.project.project import Project

STAGE = "buckets"


@click.command("crops")
@click.argument("out", required=False, type=click.Path(path_type=Path, file_okay=False))
@with_project
def command(out: Path | None, project: Project) -> None:
    """Draw all crops on contact sheets. A sheet is a PNG file with at most 40 images of one resolution. The most
    cropped images come first. What is cut away is faded. OUT is a new or empty folder for the sheets. Without OUT, the
    sheets are written into the folder exports/crops of the project. The earlier content of this folder is deleted. The
    table `buckets` is brought up to date first.
    """
    from pipeline import runner

    for name in [*project.pipeline.upstream(STAGE), STAGE]:
        with Terminal(name) as terminal:
            runner.run(project, name, terminal)
        project.refresh()
    written = write_crops(project, out)
    more = f" and {len(written) - 1} more" if len(written) > 1 else ""
    click.echo(f"wrote {written[0]}{more}")


def write_crops(project: Project, out: Path | None = None) -> list[Path]:
    """`out` must be new or empty; None: exports/crops, emptied first. Raises NotBuilt, or ValueError if no image has a crop."""
    from pipeline.commands.query import answer
    from stages.text_to_image.sheets import QUESTION, draw_sheets

    rows = answer(project, QUESTION).to_pylist()
    if not rows:
        raise ValueError("no image has a crop: all are rejected or too small; latentmill panel unused says why")
    folder = out or project.path / "exports" / "crops"
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be a new folder, but it has files")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in draw_sheets(rows, project.resource("image_folder")):
        page.save(folder / name)
        written.append(folder / name)
    return written
