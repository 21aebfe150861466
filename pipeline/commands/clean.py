"""`latentmill clean`: deletes rows and tables that the present settings do not use. Results are deleted only with --runs."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline.commands import own
from pipeline.commands.status import settled, states
from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.store.disk import TEMPORARY, abandoned, delete, delete_abandoned, format_bytes, size_of
from pipeline.store.lock import lock_holder, locked
from pipeline.terminal import tell
from stages.pipelines import load


@click.command("clean")
@click.option(
    "--runs",
    is_flag=True,
    help="Also delete results of other settings, such as trained adapters, if the present settings have a result.",
)
@click.option("--dry-run", is_flag=True, help="List what would be deleted, and delete nothing.")
@with_project
def command(runs: bool, dry_run: bool, project: Project) -> None:
    """Delete rows and tables of the project that its present settings do not use. A stage has a separate table for each
    choice of settings. Its tables for other settings are deleted only if a run of the stage with the present settings
    has finished. Results such as trained adapters are kept, unless --runs is given.
    """
    for line in clean(project, runs=runs, dry_run=dry_run):
        tell(line)


def clean(project: Project, *, runs: bool, dry_run: bool) -> Iterator[str]:
    """A line for each deletion, and for each table kept. Raises ValueError if a stage is running."""
    for lock in (project.path / "tables").glob("*/*/lock"):  # a running stage holds the lock of the table that it writes
        if holder := lock_holder(lock):
            raise ValueError(f"{lock.parent} is being written by {holder}; wait for it or stop it")
    stale = {each.stage_name for each in states(project) if each.stale_inputs or not settled(each)}
    parts = [_clean_leftovers(project, dry_run)]
    for name in project.stage_names:
        parts.append(_clean_table(project, name, runs or name not in project.pipeline.results, name in stale, dry_run))
    freed = 0
    for line, count in itertools.chain.from_iterable(parts):
        freed += count
        yield line
    yield f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}"


def _clean_leftovers(project: Project, dry_run: bool) -> Iterator[tuple[str, int]]:
    """(line, bytes) for files of killed commands, files that no setting uses, and damaged files that were replaced."""
    tables = project.path / "tables"
    places = [*(project.path / name for name in ("", "exports", "weights", "weights/converted")), tables, *tables.glob("[!.]*/")]
    folders = [place for place in places if not place.is_symlink()]
    # Temporary files that a running command has locked are not abandoned.
    left = ((path, "left by a killed command") for folder in folders for path in abandoned(folder))
    find_unused = own(project.config.project.pipeline).unused
    unused = load(find_unused)(project) if find_unused else ()
    for path, why in itertools.chain(left, ((path, "which no present setting uses") for path in unused)):
        size = size_of(path)
        yield f"{path.relative_to(project.path)}, {why}, {format_bytes(size)}", size
        if not dry_run:
            delete(path)
    tables_of = [path for stage in folders if stage.parent == tables for path in stage.glob("[!.]*")]
    for folder in sorted(path for path in tables_of if path.is_dir() and not path.is_symlink()):
        leftovers = [*abandoned(folder, below=True), *folder.glob("damaged")]
        size = sum(map(size_of, leftovers))
        if not leftovers:
            continue
        yield f"{folder.relative_to(project.path)}: temporary and damaged files, {format_bytes(size)}", size
        if not dry_run:
            with locked(folder / "lock"):
                delete_abandoned(folder, below=True)
                delete(folder / "damaged")


def _clean_table(project: Project, name: str, allowed: bool, stale: bool, dry_run: bool) -> Iterator[tuple[str, int]]:
    """(line, bytes) for each deletion in a stage's tables, and for tables of other settings that are kept, with the reason."""
    from pipeline.store.table import Writer, link_table

    try:
        current = project.current(name)
    except ValueError as error:
        if (project.path / "tables" / name).is_dir():
            yield f"{name}: kept, because its recipe is unknown: {error}", 0
        return
    if current.folder.parent.is_symlink():
        yield f"{name}: kept, because {current.folder.parent} is a link", 0
        return
    others = sorted(
        path for path in current.folder.parent.glob("*/") if path != current.folder and not path.name.startswith(TEMPORARY)
    )
    count = f"{name}: {len(others)} other configuration{'s' if len(others) > 1 else ''}"
    described = f"{count} ({format_bytes(sum(map(size_of, others)))}) kept"
    if others and not current.exists:  # a typing error in project.toml makes all tables those of other settings
        yield f"{described}, because the table of the present settings is not built yet", 0
    elif others and not allowed:
        yield f"{described}; --runs deletes results of other configurations", 0
    else:
        for folder in others:
            size = size_of(folder)
            yield f"{name}: {folder.name}, another configuration, {format_bytes(size)}", size
            if not dry_run:
                _delete_table(folder)
        if others and not dry_run:
            link_table(current)  # the link for LanceDB may lead to a deleted table
    if not allowed or not current.exists:
        return
    dead, rows = current.usage()["dead"], current.index.read_newest()
    if dead and stale:  # some of them may be those that the present settings want
        yield f"{name}: {dead} rows that the last run did not use kept, because the table is not up to date", 0
    elif dead or current.unnamed_files(rows, rows):
        if dry_run:
            freed = current.reclaimable_bytes()
        else:
            with Writer(current, project.recipe(name)) as writer:
                freed = writer.collect()
        yield f"{name}: {f'{dead} rows that are not used any more' if dead else 'files that no row names'}", freed


def _delete_table(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
        return
    with locked(folder / "lock"):
        hidden = folder.with_name(f"{TEMPORARY}{folder.name}")
        # Without a manifest it is no table, then it is out of sight: readers never find a part of one, even if this process
        # is killed.
        (folder / "manifest.json").unlink(missing_ok=True)
        folder.rename(hidden)
    shutil.rmtree(hidden)
