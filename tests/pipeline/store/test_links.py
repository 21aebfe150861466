"""A project from elsewhere leads no writer out of its tables, and no odd file in them hangs or breaks a command."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands.clean import _delete_table
from pipeline.store.checksums import Checksums
from pipeline.store.lock import lock_holder, locked, texts_lock
from pipeline.store.table import TableFolder, Writer
from tests.pipeline.store.stores import FILES, files


@pytest.mark.parametrize("name", ["lock", "checksums.jsonl", "artifacts/0.txt", "artifacts", "rows.lance", ".", ".."])
def test_a_writer_refuses_a_link_and_leaves_its_target_alone(name, tmp_path):
    table = files(tmp_path / "tables" / "files" / "recipe", 0).folder
    place, outside = Path(os.path.normpath(table / name)), tmp_path / "outside"
    place.rename(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    place.symlink_to(outside)
    with pytest.raises(ValueError, match="is a link, and nothing is written through links in tables/: delete it"):
        Writer(TableFolder(table, FILES), {}).__enter__()
    assert {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()} == before


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: locked(folder / "tables/checksums.jsonl").__enter__(),
        lambda folder: texts_lock(folder).__enter__(),
        lambda folder: Checksums(folder / "tables").record({"a": folder / "outside"}),
        lambda folder: Checksums(folder / "tables").known(),
    ],
)
@pytest.mark.parametrize("make", [lambda path: path.symlink_to(path.parents[1] / "outside"), os.mkfifo])
def test_a_file_of_the_program_is_never_a_link_or_a_pipe(write: Callable, make: Callable, tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "tables").mkdir()
    for name in ("checksums.jsonl", "texts.lock"):
        make(tmp_path / "tables" / name)
    with pytest.raises(ValueError, match="is no regular file: delete it"):
        write(tmp_path)
    assert (tmp_path / "outside").read_text() == "mine"


@pytest.mark.parametrize(
    "text", ['{"host": "HOST", "pid": 12345678901234567890}', "[" * 60_000, "[]", "null", '{"pid": []}', None]
)
def test_the_holder_of_an_odd_lock_file_is_nobody(text, tmp_path):
    path = tmp_path / "lock"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text.replace("HOST", os.uname().nodename))
    assert lock_holder(path) == ""


def test_a_table_that_is_moved_while_it_is_written_does_not_come_back(tmp_path):
    table = files(tmp_path / "tables" / "files" / "recipe", 0).folder
    with (
        pytest.raises(ValueError, match="was moved or deleted while it was written"),
        Writer(TableFolder(table, FILES), {}) as writer,
    ):
        (tmp_path / "tables").rename(tmp_path / "moved")
        writer.write_artifact("1.txt", lambda path: path.write_text("text") and None)
    assert not (tmp_path / "tables").exists()


def test_cleaning_deletes_a_link_in_place_of_a_run_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "manifest.json").write_text("mine")
    (tmp_path / "run").symlink_to(tmp_path / "outside")
    _delete_table(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (tmp_path / "outside" / "manifest.json").read_text() == "mine"
