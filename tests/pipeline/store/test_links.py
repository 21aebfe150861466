"""A project from elsewhere leads no writer out of its tables, and no odd file in them hangs or breaks a command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands.clean import _delete_table
from pipeline.project.project import Project
from pipeline.project.runs import read_record
from pipeline.store.checksums import Checksums
from pipeline.store.lock import locked, texts_lock
from pipeline.store.shards import shard_damage
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


@pytest.mark.parametrize("name", ["tables", "exports", "weights", "tracking", "queue"])
def test_a_folder_of_a_project_that_leads_out_of_it_is_refused(name, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "project.toml").write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "project" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"{name} is a link out of the project"):
        Project(tmp_path / "project")
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_took_the_place_of_an_artifact_is_set_aside_and_can_be_written_again(make, tmp_path):
    table = files(tmp_path / "tables" / "files" / "recipe", 0, 1)
    inside = files(tmp_path / "tables" / "files" / "other", 0, inside="deep/")
    for path in (table.folder / "artifacts" / "0.txt", inside.folder / "artifacts" / "deep" / "0.txt"):
        path.unlink()
        make(path)
    found = [damage.file for damage in inside.examine()]
    with Writer(inside, {}) as writer:
        writer.remove(found, [])
        writer.write_artifact("deep/0.txt", lambda path: path.write_text("new") and None)
    with Writer(table, {}) as writer:
        assert writer.stored["name"].to_pylist() == ["1"]
        writer.write_artifact("0.txt", lambda path: path.write_text("new") and None)
    assert (table.folder / "artifacts" / "0.txt").read_text() == "new"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_took_the_place_of_lances_version_hint_neither_stops_a_writer_nor_is_told_by_lance(make, tmp_path, capfd):
    table = files(tmp_path / "tables" / "files" / "recipe", 0)
    hint = table.index.path / "_versions" / "latest_version_hint.json"
    hint.unlink()
    make(hint)
    files(table.folder, 1)
    assert hint.is_file()
    assert capfd.readouterr().err == ""
    shutil.rmtree(hint.parent)
    hint.parent.write_text("no folder of Lance")
    assert files(table.folder, 2).rows()["name"].to_pylist() == ["2"]


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "checksums.jsonl", "shards/1.arrow"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_damage_and_is_never_waited_for(name, make, tmp_path):
    table = files(tmp_path / "tables" / "files" / "recipe", 0)
    path = table.folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    assert shard_damage(path, 0) == "is no regular file"
    assert read_record(table) is None or name != "manifest.json"
    if name != "checksums.jsonl":
        assert table.checksums.damage(name) == "is no regular file"
    assert not table.exists or name != "manifest.json"


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
    "line", ["[" * 60_000, '{"file": ["a"], "bytes": 1, "xxh3": ""}', '{"file": "a", "bytes": 1e999, "xxh3": ""}']
)
def test_an_odd_line_of_checksums_or_an_odd_manifest_is_damage(line, tmp_path):
    table = files(tmp_path / "tables" / "files" / "recipe", 0)
    known = table.checksums.known()
    with (table.folder / "checksums.jsonl").open("a") as file:
        file.write(line + "\n")
    assert Checksums(table.folder).known() == known
    table.manifest_file.write_text(line)
    assert not TableFolder(table.folder, FILES).exists


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
