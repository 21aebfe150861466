"""What a sweep does with a project, one function per fork: build it, run a command, and check that nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from pipeline.store.rows import newest_per_key
from tests import projects
from tests.pipeline.forks import mark, note

Acknowledged = dict[str, int]  # folder of a table below tables/ -> rows that were committed
STAGES = ("images", "captions", "checks", "buckets", "latents", "embeddings", "train", "samples", "scores")
COMMANDS = (  # that write, and read a finished project
    ("clean",),
    ("clean", "--runs"),
    ("verify",),
    ("verify", "--repair"),
    ("export",),
    ("export", "--merged"),
    ("publish",),
    ("resize", "--rank", "1"),
    ("report",),
    ("captions", "--edit", "exports/captions.csv"),
    ("query", "select path, width from images", "--csv", "exports/answer.csv"),
    ("query", "select path, width from images", "--parquet", "exports/answer.parquet"),
    ("generate", "a red cup"),
)
SETTINGS = (
    ('"a red thing"', '"a"'),
    ("[64, 96]", "[64]"),
    ("steps = 6", "steps = 4"),
    ("width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1\nbase = false"),
    ("caption_dropout = 0.2", "caption_dropout = 0.2\n\n[train.ema]"),
    ("\n[embeddings]\n", "\n[latents]\nbatch_size = 1\n\n[embeddings]\nbatch_size = 1\n"),
)


def make(folder: Path, weights: Path, images: int = 3, family: str = "tiny") -> Path:
    """A small project whose stages commit several times, and whose adapter has a moving average."""
    projects.make(folder, weights, images, family)
    for old, new in SETTINGS:
        projects.edit(folder, old, new)
    return folder


def command(path: str, words: Sequence[str], before: Acknowledged, caption: str = "") -> None:
    """Ends the process with the exit code; notes, and writes into the record of steps, the committed rows from `before` on.
    Files that `words` name lie in the project.
    """
    from pipeline import cli
    from pipeline.commands import clean
    from pipeline.store.table import Writer

    seen, tables = dict(before), Path(path) / "tables"
    commit, replace, delete, leave = Writer._commit, Writer._replace, clean._delete_table, os._exit

    def say(folder: Path, rows: int, files: Mapping[str, str] = MappingProxyType({})) -> None:
        seen[str(folder.relative_to(tables))] = rows
        note(seen)
        mark(json.dumps({"rows": seen, "files": dict(files), "caption": caption}))

    def committed(writer: Writer) -> None:
        commit(writer)
        say(writer.table.folder, writer.stored.num_rows)

    def replaced(writer: Writer, rows: Any) -> None:
        count = newest_per_key(rows, writer.schema.key).num_rows
        if count < writer.stored.num_rows:  # rows that are no longer wanted are deleted
            say(writer.table.folder, count)
        replace(writer, rows)

    def deleted(folder: Path) -> None:
        say(folder, 0)
        delete(folder)

    def left(code: int) -> None:
        files = [each for each in (Path(path) / "exports").glob("*") if each.is_file() and not code]
        mark(json.dumps({"rows": seen, "files": {each.name: _digest(each) for each in files}, "caption": caption}))
        leave(code)

    os.chdir(path)
    note(seen)
    Writer._commit, Writer._replace = committed, replaced  # type: ignore[method-assign]
    clean._delete_table, os._exit = deleted, left  # type: ignore[assignment]
    cli.main([*words, "--project", path])


def write(path: str, text: str) -> None:
    with Path(path).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def recover(path: str, rows: Acknowledged, files: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """What was lost or is left, whether `verify` names damage before the next run, and the digests of all results."""
    from pipeline.commands.clean import clean
    from pipeline.project.project import Project

    problems = lost(path, rows)
    for name, digest in files.items():
        file = Path(path) / "exports" / name
        problems += [] if file.is_file() and _digest(file) == digest else [f"exports/{name} is lost"]
    named = bool(damaged(path))
    found = completed(path)
    problems += damaged(path)
    list(clean(Project(Path(path)), runs=True, dry_run=False))
    return {"problems": problems + leftovers(path), "named": named, "digests": found}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def lost(path: str, acknowledged: Acknowledged) -> list[str]:
    """One line for each table that has fewer rows than were committed."""
    from pipeline.commands.status import states
    from pipeline.project.project import Project
    from pipeline.store.table import TableFolder
    from stages.pipelines import load

    project = Project(Path(path))
    states(project)
    found = []
    for name, rows in acknowledged.items():
        if not rows:  # deleted on purpose
            continue
        kind, others = name.split("/")[0], project.pipeline.tables
        schema = load(others[kind]) if kind in others else project.stage(kind).writes
        there = TableFolder(project.path / "tables" / name, schema).committed().num_rows
        found += [f"{name}: {there} of {rows} rows"] if there < rows else []
    return found


def damaged(path: str) -> list[str]:
    from pipeline.api import Project

    return [str(each) for each in Project(path).verify()]


def leftovers(path: str) -> list[str]:
    """Temporary, damaged and unnamed files, after `clean --runs`."""
    from pipeline.project.project import Project

    project, found = Project(Path(path)), []
    for name in project.stage_names:
        table = project.current(name)
        rows = table.index.read_newest()
        found += map(str, table.unnamed_files(rows, rows))
    return found + temporary(Path(path))


def temporary(folder: Path) -> list[str]:
    return [str(each) for each in folder.rglob("*") if each.name.startswith(".tmp-") or each.name == "damaged"]


def completed(path: str) -> dict[str, str]:
    projects.build(Path(path))
    return digests(path)


def compared(folder: Path, name: str) -> pa.Table:
    rows = projects.content(folder, name)
    return rows.drop_columns([each for each in rows.column_names if each in ("inode", "mtime_ns")])  # of a copied file


def digests(path: str) -> dict[str, str]:
    """Of each table with its artifacts, and of an export."""
    from pipeline.commands.text_to_image.export import export_run
    from pipeline.project.project import Project

    folder, found = Path(path), {}
    for name in Project(folder).stage_names:
        rows = compared(folder, name)
        made = hashlib.sha256(repr(rows.to_pylist()).encode())
        table = Project(folder).current(name)
        root, files = table.folder / "artifacts", set(table.folder.glob("artifacts/**/*"))
        if column := table.schema.artifact:  # a deleted row's file stays until the next clean
            files = {*root.glob("*"), *(root / each for each in rows[column].to_pylist())}
        for file in sorted(files):
            if file.suffix in (".safetensors", ".png", ".npy"):
                made.update(str(file.relative_to(root)).encode() + file.read_bytes())
        found[name] = made.hexdigest()
    out = export_run(Project(folder), folder / "exports", "diffusers", dtype="float32")
    return found | {"export": hashlib.sha256(out.read_bytes()).hexdigest()}
