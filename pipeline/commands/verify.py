"""`latentmill verify`: compares all files of a project with their checksums, and makes damaged ones again on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.catalog import table_schemas
from pipeline.options import with_project
from pipeline.store.disk import stamp
from pipeline.terminal import Say, silent, tell

if TYPE_CHECKING:
    from pipeline.project.project import Project
    from pipeline.store.table import TableFolder

DAMAGED = 1  # the exit code if something is damaged
NAMED = 3  # rows that a line names


@click.command("verify")
@click.option("--repair", is_flag=True, help="Remove damaged rows and files, and run the stages that make them again.")
@with_project
def command(repair: bool, project: Project) -> int:
    """Compare all files of a project with their checksums. The files are shards (Arrow files with tensors), rows,
    checkpoints, adapters, previews and weights. One line per damaged file names the file, its damaged rows, and the
    tables made from them. With --repair, damaged rows and files are removed and made again. The exit code is 1 if a
    file is damaged at the end, else 0.
    """
    if found := verify(project, repair, tell, progress=True):
        tell(f"{len(found)} damaged" + ("" if repair else "; run: latentmill verify --repair"))
        return DAMAGED
    tell("everything that has a checksum agrees with it")
    return 0


@dataclass(frozen=True)
class Finding:
    table: str  # or "weights"
    folder: Path
    file: str  # relative to `folder`
    problem: str
    rows: tuple[str, ...] = ()  # keys of the damaged rows
    affects: tuple[str, ...] = ()  # tables made from `table`

    def __str__(self) -> str:
        line = f"{self.table}: {self.folder / self.file} {self.problem}"
        if self.rows:
            more = f" and {len(self.rows) - NAMED} more" if len(self.rows) > NAMED else ""
            line += f"; rows {', '.join(self.rows[:NAMED])}{more}"
        return line + (f"; used by {', '.join(self.affects)}" if self.affects else "")


def verify(project: Project, repair: bool, say: Say = silent, progress: bool = False) -> list[Finding]:
    """The damaged files; with `repair`, those that remain after damaged rows and files are made again."""
    found = list(find_damage(project, say))
    for finding in found:
        say(str(finding))
    if repair and found:
        repair_project(project, found, say, progress)
        project.refresh()
        found = list(find_damage(project))
        for finding in found:
            say(f"still damaged: {finding}")
    return found


def find_damage(project: Project, say: Say = silent) -> Iterator[Finding]:
    """A table that is being written is left out."""
    from pipeline.store.lock import lock_holder
    from pipeline.store.table import TableFolder
    from stages.hashing import file_sha256

    for name, schema in table_schemas(project).items():
        built = [n for n in project.stage_names if any((project.path / "tables" / n).glob("*/manifest.json"))]
        affected = tuple(n for n in built if name in project.pipeline.upstream(n))
        for path in sorted((project.path / "tables" / name).glob("[!.]*/")):
            table = TableFolder(path, schema)
            if holder := lock_holder(path / "lock"):
                say(f"{name}: {path} is left out: it is being written by {holder}")
                continue
            found = [Finding(name, path, each.file, each.problem, each.keys, affected) for each in table.examine()]
            yield from found
            if name in project.stage_names:
                yield from _damaged_results(project, table, {each.file for each in found}, affected)
    for name, (*known, digest) in project.hashes.known["files"].items():
        path = Path(name)
        # Weights that were replaced since they were hashed give their tables another recipe.
        if path.is_file() and [*stamp(path)] == known and file_sha256(path) != digest:
            yield Finding("weights", path.parent, path.name, "differs from its sha256; fetch it again")


def _damaged_results(project: Project, table: TableFolder, known: set[str], affects: tuple[str, ...]) -> Iterator[Finding]:
    from stages.tuner import checkpoint

    artifacts, name = table.folder / "artifacts", table.schema.name
    if not (artifacts / checkpoint.FOLDER).is_dir():
        return
    for path in sorted((artifacts / checkpoint.FOLDER).glob("[!.]*/[!.]*/")):  # else nothing can be written in its place
        yield Finding(name, table.folder, path.relative_to(table.folder).as_posix(), "is no regular file", (), affects)
    for step, problem in sorted(checkpoint.damaged_checkpoints(artifacts).items()):
        file = f"artifacts/{checkpoint.folder_name(step)}/{checkpoint.STATE}"
        if not any(each.startswith(file.rpartition("/")[0]) for each in known):
            yield Finding(name, table.folder, file, f"or a file beside it is damaged: {problem}", (), affects)
    if not (artifacts / checkpoint.ADAPTER).exists() and table.exists and project.stage(name).result == checkpoint.ADAPTER:
        yield Finding(name, table.folder, f"artifacts/{checkpoint.ADAPTER}", "is missing", (), affects)


def repair_project(project: Project, found: Sequence[Finding], say: Say, progress: bool) -> None:
    """Remove damaged rows and files, and compute those of the present settings again; damaged weights stay as they are."""
    from pipeline import runner
    from pipeline.store.table import TableFolder, Writer
    from pipeline.terminal import console_for

    for name, schema in table_schemas(project).items():
        folders = {each.folder for each in found if each.table == name}
        for folder in sorted(folders):
            own = [each for each in found if each.folder == folder]
            table = TableFolder(folder, schema)
            recipe = table.manifest()["recipe"] if table.exists else {}
            with Writer(table, recipe) as writer:
                keys = {key for each in own for key in each.rows} if table.schema.tensors else set()
                writer.remove([each.file for each in own if each.file.startswith(("artifacts/", "shards/"))], keys)
        if name not in project.stage_names:
            continue
        # The stages run in order: a stage reads the inputs that were repaired before it.
        project.refresh()
        try:
            current = project.current(name).folder
        except ValueError:  # an input is missing: the stage is not built
            continue
        if current in folders:
            with console_for(name, progress) as console:
                made = runner.run(project, name, console).written
                lost = "what was damaged is removed, and no row that is needed was lost"
                say(f"{name}: {made} rows were made again" if made else f"{name}: {lost}")
                runner.repair(project, name, console)
