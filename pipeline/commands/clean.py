"""`latentmill clean`: deletes rows and tables that the present settings do not use. Results are deleted only with --runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.options import with_project
from pipeline.store.disk import TEMPORARY, abandoned, delete, delete_temporary_files, format_bytes, size_of
from pipeline.store.lock import Lock, lock_holder

if TYPE_CHECKING:
    from pipeline.project.project import Project
    from pipeline.store.table import TableFolder


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
    has finished. Results such as trained adapters are kept, unless --runs is given. With --dry-run, the command lists
    what it would delete, and deletes nothing.
    """
    for line in clean(project, runs=runs, dry_run=dry_run):
        click.echo(line)


def clean(project: Project, *, runs: bool, dry_run: bool) -> Iterator[str]:
    """Delete the rows and tables of `project` that its present settings do not use. Yield a line of text for each
    deletion, and for tables that are kept although they are not used. The last line gives the bytes freed. If `dry_run`
    is True, nothing is deleted. Raises ValueError if a stage is running.

    If `runs` is True, results of other settings, such as trained adapters, are deleted too. With `dry_run`, the lines
    tell what would be deleted.
    """
    for lock in (project.path / "tables").glob("*/*/lock"):  # a running stage holds the lock of the table that it writes
        if holder := lock_holder(lock):
            raise ValueError(f"{lock.parent} is being written by {holder}; wait for it or stop it")
    freed = 0
    for line, count in _clean_leftovers(project, dry_run):
        freed += count
        yield line
    for name in project.stage_names:
        for line, count in _clean_table(project, name, runs or name not in project.pipeline.results, dry_run):
            freed += count
            yield line
    yield f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}"


def _clean_leftovers(project: Project, dry_run: bool) -> Iterator[tuple[str, int]]:
    """Delete temporary files of killed commands, and damaged files that were replaced. Yield `(line for the user,
    bytes)` for each deletion. `project` is the opened project folder. If `dry_run` is True, nothing is deleted, and the
    pairs tell what would be deleted. Temporary files that a running command has locked are kept. Raises ValueError if a
    table to clean is being written.
    """
    tables = project.path / "tables"
    for folder in (project.path, project.path / "exports", project.path / "weights", tables, *tables.glob("[!.]*/")):
        for path in abandoned(folder):
            size = size_of(path)
            yield f"{path.relative_to(project.path)}, left by a killed command, {format_bytes(size)}", size
            if not dry_run:
                delete(path)
    for folder in sorted(path for path in tables.glob("*/[!.]*") if path.is_dir() and not path.is_symlink()):
        leftovers = [*folder.rglob(f"{TEMPORARY}*"), *folder.glob("damaged")]
        size = sum(map(size_of, leftovers))
        if not leftovers:
            continue
        yield f"{folder.relative_to(project.path)}: temporary and damaged files, {format_bytes(size)}", size
        if not dry_run:
            with Lock(folder / "lock"):
                delete_temporary_files(folder)
                delete(folder / "damaged")


def _clean_table(project: Project, name: str, delete: bool, dry_run: bool) -> Iterator[tuple[str, int]]:
    """Delete the rows and tables of the stage `name` that the present settings do not use. Yield a pair `(line for the
    user, bytes freed)` for each deletion. `project` is the opened project folder. `delete` is the permission to delete:
    if `delete` is False, all rows and tables of the stage are kept. The caller passes False for results, such as
    trained adapters, unless the user gave --runs. If `dry_run` is True, nothing is deleted, and the pairs say what
    would be deleted.

    Tables of other settings are kept in three cases: `delete` is False, the table of the present settings is not built
    yet, or this table cannot be determined. If tables are kept, one pair has a line with the reason, and 0 bytes. With
    `dry_run`, the bytes of a pair say how much would be freed.
    """
    try:
        current = project.current(name)
    except ValueError as error:
        if (project.path / "tables" / name).is_dir():
            yield f"{name}: kept, because its recipe is unknown: {error}", 0
        return
    yield from _clean_others(name, current, delete, dry_run)
    if not delete or not current.exists:
        return
    dead, rows = current.usage()["dead"], current.index.read_newest()
    if dead or current.unnamed_files(rows, rows):
        freed = current.reclaimable_bytes() if dry_run else _collect(current, project.recipe(name))
        yield f"{name}: {f'{dead} rows that are no longer wanted' if dead else 'files that no row names'}", freed


def _clean_others(name: str, current: TableFolder, delete: bool, dry_run: bool) -> Iterator[tuple[str, int]]:
    """Delete the tables of the stage `name` that were built with other settings. Yield a pair `(line for the user,
    bytes freed)` for each table. `current` is the stage's table for the present settings. `delete` says whether the
    other tables may be deleted. If `delete` is False, all of them are kept, and one pair says why. `dry_run` is True to
    list the deletions only: the pairs are yielded, but nothing is deleted.

    If `current` is not built yet, the other tables are kept even if `delete` is True. A pair about kept tables has a
    line with the reason and 0 bytes. If the stage has no tables of other settings, nothing is yielded.
    """
    from pipeline.store.catalog import link_table

    others = _other_folders(current.folder)
    if others and not current.exists:  # a typing error in project.toml makes all tables those of other settings
        yield f"{name}: {_describe(others)} kept, because the table of the present settings is not built yet", 0
    elif others and not delete:
        yield f"{name}: {_describe(others)} kept; --runs deletes results of other configurations", 0
    else:
        for folder in others:
            size = size_of(folder)
            yield f"{name}: {folder.name}, another configuration, {format_bytes(size)}", size
            if not dry_run:
                _delete_table(folder)
        if others and not dry_run:
            link_table(current)  # the link for LanceDB may lead to a deleted table


def _other_folders(current: Path) -> list[Path]:
    """Return the folders of the stage's tables that were made with other settings, sorted. `current` is the folder of
    the table for the present settings. If the stage has no tables, the result is empty.
    """
    if not current.parent.is_dir():
        return []
    return sorted(
        path
        for path in current.parent.iterdir()
        if path.is_dir() and path.name != current.name and not path.name.startswith(TEMPORARY)
    )


def _describe(folders: list[Path]) -> str:
    count = f"{len(folders)} other configuration{'s' if len(folders) > 1 else ''}"
    return f"{count} ({format_bytes(sum(map(size_of, folders)))})"


def _delete_table(folder: Path) -> None:
    """Delete the table in `folder`. Raises ValueError if a process is writing the table.

    The folder is renamed and its manifest removed first. So readers never find an incomplete table, even if this process is
    killed.
    """
    with Lock(folder / "lock"):
        hidden = folder.with_name(f"{TEMPORARY}{folder.name}")
        (folder / "manifest.json").unlink(missing_ok=True)
        folder.rename(hidden)
    shutil.rmtree(hidden)


def _collect(table: TableFolder, recipe: dict[str, object]) -> int:
    """Delete the rows of `table` that its last finished run did not want, and return the number of bytes freed.
    `recipe` is the table's recipe: a dict of what decides its rows, such as settings and the hashes of weights. Raises
    ValueError if another process is writing the table.
    """
    from pipeline.store.writer import Writer

    with Writer(table, recipe) as writer:
        return writer.collect()
