"""Deletes what no present row names. Adapters are results, not caches: they go only when asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.lock import Lock
from pipeline.project import Project
from pipeline.terminal import spell_bytes

RESULTS = ("train", "samples")  # made by hours of work, and what a user came for


def clean(project: Project, *, runs: bool, dry_run: bool) -> Iterator[str]:
    """Free disk; a line for each thing that went (or, with `dry_run`, would go). ValueError while a stage is running."""
    for lock in (project.path / "tables").glob("*/*/lock"):
        with Lock(lock):  # readers hold no lock, but every stage that reads also writes
            pass
    freed = 0
    for noun in project.nouns:
        try:
            current = project.current(noun)
        except ValueError as error:
            yield f"{noun}: left alone, since its recipe is unknown: {error}"
            continue
        if noun in RESULTS and not runs:
            continue
        for folder in others(current.folder):
            size = bytes_of(folder)
            freed += size
            yield f"{noun}: {folder.name}, another configuration, {spell_bytes(size)}"
            if not dry_run:
                shutil.rmtree(folder)
        if noun not in RESULTS and current.exists and current.usage()["dead"]:
            yield f"{noun}: {current.usage()['dead']} rows that nothing names any more"
            if not dry_run:
                with current.writer(project.recipe(noun)) as writer:
                    freed += writer.collect()
    yield f"{'would free' if dry_run else 'freed'} {spell_bytes(freed)}"


def others(current: Path) -> list[Path]:
    """The folders of other recipes beside the current one."""
    if not current.parent.is_dir():
        return []
    return sorted(p for p in current.parent.iterdir() if p.is_dir() and p.name != current.name)


def bytes_of(folder: Path) -> int:
    """All files below a folder, bytes."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
