"""`latentmill clean`: delete rows and tables that the present settings do not use. Results are deleted only with --runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.options import with_project
from pipeline.store.disk import TEMPORARY, size_of
from pipeline.store.lock import Lock, lock_holder
from pipeline.terminal import format_bytes

if TYPE_CHECKING:
    from pipeline.project.project import Project
    from pipeline.store.table import TableFolder


@click.command("clean")
@click.option(
    "--runs", is_flag=True, help="Delete old results too, such as trained adapters, where the present settings have theirs."
)
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@with_project
def command(runs: bool, dry_run: bool, project: Project) -> None:
    """Free disk space: delete rows and tables that the present settings do not use.

    A table of other settings is deleted only if the present settings have one in its place. Trained results are kept.
    """
    for line in clean(project, runs=runs, dry_run=dry_run):
        click.echo(line)


def clean(project: Project, *, runs: bool, dry_run: bool) -> Iterator[str]:
    """Delete the rows and tables that the present settings do not use, and yield a line for each, then the bytes freed.

    `runs`: also delete old tables that the pipeline lists in `results`. `dry_run`: delete nothing, only tell what would be
    deleted. ValueError while a stage is running.
    """
    if not dry_run:
        for lock in (project.path / "tables").glob("*/*/lock"):  # a running stage holds the lock of the table that it writes
            if holder := lock_holder(lock):
                raise ValueError(f"{lock.parent} is being written by {holder}; wait for it or stop it")
    freed = 0
    for name in project.stage_names:
        for line, count in _clean_table(project, name, runs or name not in project.pipeline.results, dry_run):
            freed += count
            yield line
    yield f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}"


def _clean_table(project: Project, name: str, delete: bool, dry_run: bool) -> Iterator[tuple[str, int]]:
    """Yield a line and the bytes freed for everything of one table that is deleted, or left alone for a reason."""
    try:
        current = project.current(name)
    except ValueError as error:
        if (project.path / "tables" / name).is_dir():
            yield f"{name}: left alone, since its recipe is unknown: {error}", 0
        return
    yield from _clean_others(name, current, delete, dry_run)
    if delete and current.exists and (dead := current.usage()["dead"]):
        freed = current.reclaimable_bytes() if dry_run else _collect(current, project.recipe(name))
        yield f"{name}: {dead} rows that are no longer wanted", freed


def _clean_others(name: str, current: TableFolder, delete: bool, dry_run: bool) -> Iterator[tuple[str, int]]:
    """Delete the tables of other recipes. Yields a line and the bytes freed for each, or one line for all that are left alone."""
    from pipeline.store.catalog import link_table

    others = _other_folders(current.folder)
    if others and not current.exists:  # a slip in project.toml makes every table one of other settings
        yield f"{name}: {_describe(others)} left alone, since the present one has no table yet", 0
    elif others and not delete:
        yield f"{name}: {_describe(others)} left alone; --runs deletes results of other configurations", 0
    else:
        for folder in others:
            size = size_of(folder)
            yield f"{name}: {folder.name}, another configuration, {format_bytes(size)}", size
            if not dry_run:
                _delete_table(folder)
        if others and not dry_run:
            link_table(current)  # the link for LanceDB may lead to a deleted table


def _other_folders(current: Path) -> list[Path]:
    """The tables of other recipes beside the current one."""
    if not current.parent.is_dir():
        return []
    return sorted(path for path in current.parent.iterdir() if path.is_dir() and path.name != current.name)


def _describe(folders: list[Path]) -> str:
    count = f"{len(folders)} other configuration{'s' if len(folders) > 1 else ''}"
    return f"{count} ({format_bytes(sum(map(size_of, folders)))})"


def _delete_table(folder: Path) -> None:
    """Delete a table. It is hidden from readers first, so that a kill leaves no table that can be read in part."""
    with Lock(folder / "lock"):
        hidden = folder if folder.name.startswith(TEMPORARY) else folder.with_name(f"{TEMPORARY}{folder.name}")
        (folder / "manifest.json").unlink(missing_ok=True)
        folder.rename(hidden)
    shutil.rmtree(hidden)


def _collect(table: TableFolder, recipe: dict[str, object]) -> int:
    """Delete the dead rows of a table, and return the number of bytes that this freed."""
    from pipeline.store.writer import Writer

    with Writer(table, recipe) as writer:
        return writer.collect()
