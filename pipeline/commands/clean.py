"""Deletes what no present row names. Adapters are results, not caches: they go only when asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.project.project import Project
from pipeline.store.disk import TEMPORARY, size_of
from pipeline.store.lock import Lock, lock_holder
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from pipeline.terminal import spell_bytes

RESULTS = ("train", "samples")  # made by hours of work, and what a user came for


def clean(project: Project, *, runs: bool, dry_run: bool) -> Iterator[str]:
    """Free disk; a line for each thing that went (or, with `dry_run`, would go). ValueError while a stage is running."""
    if not dry_run:
        for lock in (project.path / "tables").glob("*/*/lock"):  # readers hold none, but every stage that reads also writes
            if who := lock_holder(lock):
                raise ValueError(f"{lock.parent} is being written by {who}; wait for it or stop it")
    freed = 0
    for stage_name in project.stage_names:
        try:
            current = project.current(stage_name)
        except ValueError as error:
            if not (project.path / "tables" / stage_name).is_dir():  # nothing to leave alone
                continue
            yield f"{stage_name}: left alone, since its recipe is unknown: {error}"
            continue
        strange = others(current.folder)
        if strange and not current.exists:
            # A mistake in project.toml makes every table another configuration's; and a run that nothing follows is the last.
            yield f"{stage_name}: {spelled(strange)} left alone, since the present one has no table yet"
        elif strange and stage_name in RESULTS and not runs:
            yield f"{stage_name}: {spelled(strange)} left alone; --runs deletes what they trained and drew"
        else:
            for folder in strange:
                freed += size_of(folder)
                yield f"{stage_name}: {folder.name}, another configuration, {spell_bytes(size_of(folder))}"
                if not dry_run:
                    remove(folder)
        if (stage_name not in RESULTS or runs) and current.exists and current.usage()["dead"]:
            yield f"{stage_name}: {current.usage()['dead']} rows that nothing names any more"
            freed += current.reclaimable_bytes() if dry_run else collected(current, project.recipe(stage_name))
    yield f"{'would free' if dry_run else 'freed'} {spell_bytes(freed)}"


def others(current: Path) -> list[Path]:
    """The folders of other recipes beside the current one."""
    if not current.parent.is_dir():
        return []
    return sorted(p for p in current.parent.iterdir() if p.is_dir() and p.name != current.name)


def spelled(folders: list[Path]) -> str:
    """How many other configurations there are, and their size."""
    count = f"{len(folders)} other configuration{'s' if len(folders) > 1 else ''}"
    return f"{count} ({spell_bytes(sum(map(size_of, folders)))})"


def remove(folder: Path) -> None:
    """Delete a table: out of every reader's sight first, so that a kill leaves no half of one."""
    with Lock(folder / "lock"):
        gone = folder if folder.name.startswith(TEMPORARY) else folder.with_name(f"{TEMPORARY}{folder.name}")
        (folder / "manifest.json").unlink(missing_ok=True)
        folder.rename(gone)
    shutil.rmtree(gone)


def collected(table: TableFolder, recipe: dict[str, object]) -> int:
    """Forget the rows of one table that nobody wants; the bytes that this freed."""
    with Writer(table, recipe) as writer:
        return writer.collect()
