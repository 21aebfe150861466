"""`latentmill verify`: compares all files of a project with their checksums, and makes damaged ones again on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.options import with_project
from pipeline.terminal import ProgressCallback

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
    found = list(find_damage(project, say=click.echo))
    for finding in found:
        click.echo(str(finding))
    if repair and found:
        repair_project(project, found, say=click.echo, progress=True)
        project.refresh()
        found = list(find_damage(project))
        for finding in found:
            click.echo(f"still damaged: {finding}")
    if found:
        click.echo(f"{len(found)} damaged" + ("" if repair else f"; run: latentmill verify --repair --project {project.path}"))
        return DAMAGED
    click.echo("everything that has a checksum agrees with it")
    return 0


@dataclass(frozen=True)
class Finding:
    """A damaged file."""

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


def find_damage(project: Project, say: Callable[[str], None] = lambda line: None) -> Iterator[Finding]:
    """If a table has no damage, its files without a checksum get one. A table that is being written is left out."""
    from pipeline.store.lock import lock_holder
    from pipeline.store.table import TableFolder
    from pipeline.store.verify import examine

    for name in project.stage_names:
        affected = tuple(_made_from(project, name))
        for path in sorted((project.path / "tables" / name).glob("[!.]*/")):
            table = TableFolder(path, project.stage(name).writes)
            if holder := lock_holder(path / "lock"):
                say(f"{name}: {path} is left out: it is being written by {holder}")
                continue
            found = [Finding(name, path, each.file, each.problem, each.keys, affected) for each in examine(table)]
            found += _damaged_results(project, table, {each.file for each in found}, affected)
            yield from found
            # Columns of an earlier version have no place for a checksum.
            if not found and table.has_current_columns:
                _record(table)
    yield from _damaged_weights(project)


def _made_from(project: Project, name: str) -> Iterator[str]:
    for other in project.stage_names:
        if name in project.pipeline.upstream(other) and any((project.path / "tables" / other).glob("*/manifest.json")):
            yield other


def _damaged_results(project: Project, table: TableFolder, known: set[str], affects: tuple[str, ...]) -> Iterator[Finding]:
    """Checkpoints with a missing file or a wrong size, adapters whose sha256 is not the one in a state.json, a missing final
    adapter.

    `known`: files that were found damaged already.
    """
    from stages.tuner import checkpoint

    artifacts, name = table.folder / "artifacts", table.schema.name
    if not (artifacts / checkpoint.FOLDER).is_dir():
        return
    for step, problem in sorted(checkpoint.damaged_checkpoints(artifacts).items()):
        file = f"artifacts/{checkpoint.FOLDER}/step-{step:06d}/{checkpoint.STATE}"
        if not any(each.startswith(file.rpartition("/")[0]) for each in known):
            yield Finding(name, table.folder, file, f"or a file beside it is damaged: {problem}", (), affects)
    results = [artifacts / each for each in (checkpoint.ADAPTER, checkpoint.EMA, checkpoint.BEST)]
    if not results[0].exists() and table.exists and project.stage(name).result == checkpoint.ADAPTER:
        yield Finding(name, table.folder, f"artifacts/{checkpoint.ADAPTER}", "is missing", (), affects)
    saved = [one.folder / file for one in checkpoint.find_checkpoints(artifacts) for file in one.state["files"]]
    for path in [*results, *saved]:
        file = path.relative_to(table.folder).as_posix()
        if path.is_file() and file not in known and (problem := checkpoint.adapter_damage(path)):
            yield Finding(name, table.folder, file, problem, (), affects)


def _damaged_weights(project: Project) -> Iterator[Finding]:
    from stages.hashing import file_sha256

    for name, (*stamp, digest) in project.hashes.known["files"].items():
        path = Path(name)
        if not path.is_file() or [(stat := path.stat()).st_size, stat.st_mtime_ns, stat.st_ino] != stamp:
            continue  # replaced since it was hashed: its tables get another recipe
        if file_sha256(path) != digest:
            yield Finding("weights", path.parent, path.name, "differs from its sha256; fetch it again")


def _record(table: TableFolder) -> None:
    from pipeline.store.writer import Writer

    # Takes the present content as correct.
    with Writer(table, table.manifest()["recipe"]) as writer:
        writer.record_checksums()


def repair_project(
    project: Project,
    found: Sequence[Finding],
    say: Callable[[str], None] = lambda line: None,
    progress: ProgressCallback | bool = False,
) -> None:
    """Remove damaged rows and files, and compute those of the present settings again.

    Tables of other settings only lose rows, which the next run with those settings makes again. Damaged weights stay as they
    are.
    """
    from pipeline import runner
    from pipeline.store.table import TableFolder
    from pipeline.store.writer import Writer
    from pipeline.terminal import console_for

    for name in project.stage_names:
        folders = {each.folder for each in found if each.table == name}
        for folder in sorted(folders):
            own = [each for each in found if each.folder == folder]
            table = TableFolder(folder, project.stage(name).writes)
            recipe = table.manifest()["recipe"] if table.exists else {}
            with Writer(table, recipe) as writer:
                keys = {key for each in own for key in each.rows} if table.schema.tensors else set()
                writer.remove([each.file for each in own if each.file.startswith(("artifacts/", "shards/"))], keys)
        # The stages run in order: a stage reads the inputs that were repaired before it.
        project.refresh()
        try:
            current = project.current(name).folder
        except ValueError:  # an input is missing: the stage is not built
            continue
        if current in folders:
            with console_for(name, progress) as console:
                say(f"{name}: {runner.run(project.allow_downloads(), name, console).written} rows were made again")
                runner.repair(project, name, console)
