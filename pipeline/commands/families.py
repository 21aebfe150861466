"""`latentmill families`: lists the model families, and the weights on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import stages
from pipeline.store.disk import format_bytes
from pipeline.terminal import format_table, tell
from stages.pipelines import load

if TYPE_CHECKING:
    from stages.models.family import Family


@click.command("families")
@click.option("--found", is_flag=True, help="List the weights that lie on this machine instead.")
@click.option(
    "--in",
    "folders",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    multiple=True,
    help="With --found, search this folder instead of the usual ones; may be repeated.",
)
def command(found: bool, folders: tuple[Path, ...]) -> None:
    """List the model families, their licences and weights. With --found, list the weights that lie on this machine. The
    usual folders are searched: the hub's cache, and the model folders of ComfyUI and Draw Things. Use --in to search
    other folders.
    """
    if folders and not found:
        raise click.UsageError("--in needs --found")
    if found:
        for line in found_lines(folders):
            tell(line)
    else:
        rows = [(each.name, each.title, each.licence, each.base or None, each.source) for each in all_families()]
        tell(format_table(("family", "model", "licence", "draws with LoRAs of", "weights"), rows))


def found_lines(folders: Sequence[Path]) -> Iterator[str]:
    """Found components, and how [project] names a complete family or a component. No folders: the usual ones."""
    from pipeline.project.found import complete_roots, places, search
    from stages.models.family import Family

    families = {record.name: record for record in all_families() if isinstance(record, Family) and record.hub}
    searched = list(folders) or places()
    found = [each for place in searched for each in search(place, families)]
    if not found:
        yield f"no weights of a family were found in {', '.join(map(str, searched)) or 'the usual folders'}"
        return
    rows = [
        (each.component, ", ".join(each.families), f"{each.size / 1e9:.3g}", each.form, each.missing or None, each.path)
        for each in found
    ]
    yield format_table(("component", "of", "GB", "form", "missing", "path"), rows, right=("GB",))
    yield f"{len(found)} components, {format_bytes(sum(each.size for each in found))}"
    for name, root in complete_roots(found, families):
        yield f'{name} is complete: family = "{name}", weights = "{root}" in [project]'
    if alone := next((each for each in found if each.component in families[each.families[0]].folders), None):
        yield f'one component alone: components = {{ {alone.component} = "{alone.path}" }} in [project]'


def all_families() -> list[Family]:
    tables = [pipeline.families for pipeline in map(stages.pipeline, stages.PIPELINES) if pipeline.families]
    return [family for table in tables for family in load(table).values()]
