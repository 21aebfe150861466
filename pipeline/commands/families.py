"""`latentmill families`: lists the model families, and the weights on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import stages
from pipeline.options import JSON, give_json
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
@JSON
def command(found: bool, folders: tuple[Path, ...], as_json: bool) -> None:
    """List the model families, their licences, and the size and place of their weights. With --found, list the weights that
    lie on this machine. The usual folders are searched: the hub's cache, and the model folders of ComfyUI and Draw Things.
    Use --in to search other folders.
    """
    if folders and not found:
        raise click.UsageError("--in needs --found")
    if found and as_json:
        raise click.UsageError("--json lists the families, not what --found finds")
    if found:
        for line in found_lines(folders):
            tell(line)
    elif as_json:
        give_json([facts(each, pipeline) for pipeline, families in by_pipeline().items() for each in families])
    else:
        for pipeline, families in by_pipeline().items():  # families of two pipelines may have one name
            rows = [
                (each.name, each.title, each.licence, each.base or None, format_bytes(size) if (size := download(each)) else None)
                for each in families
            ]
            names = (f"family ({pipeline})", "model", "licence", "draws with LoRAs of", "download", "weights")
            cells = [(*row, each.source) for row, each in zip(rows, families, strict=True)]
            tell(format_table(names, cells, right=("download",)))


def facts(family: Family, pipeline: str) -> dict[str, str | int | None]:
    named = {"pipeline": pipeline, "family": family.name, "model": family.title, "licence": family.licence}
    return {**named, "base": family.base or None, "download": download(family) or None, "weights": family.source}


def download(family: Family) -> int:
    """Bytes, about; 0: nothing, or not known."""
    return sum(family.component_bytes().values()) if family.hub else 0


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


def by_pipeline() -> dict[str, list[Family]]:
    found = {each: stages.pipeline(each).families for each in stages.PIPELINES}
    return {name: list(load(table).values()) for name, table in found.items() if table}


def all_families() -> list[Family]:
    return [family for families in by_pipeline().values() for family in families]
