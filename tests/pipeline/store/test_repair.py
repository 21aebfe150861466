"""Damage of a table's files is noticed before a value is used, and a writer repairs it: what can be read is kept."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.checksums import Checksums
from pipeline.store.rows import missing
from pipeline.store.shards import ShardReader
from pipeline.store.table import TableFolder, Writer
from schemas.table import column
from tests.pipeline.store.stores import (
    BATCHES,
    NOTES,
    PAIRS,
    VECTORS,
    check_tensors,
    files,
    flip,
    lance_files,
    names,
    notes,
    numbers,
    run,
    state,
    texts,
    vectors,
    written,
)

RECIPE = {"stage": "vectors"}


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["vectors", "notes"])
def test_an_empty_newest_lance_manifest_loses_the_last_commit_at_most_and_none_that_is_in_a_shard(tmp_path: Path, name: str):
    schema, make = BATCHES[name]
    table = written(tmp_path / "t", *range(5), schema=schema)
    before = table.rows()
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(5, 9):
            writer.append(make(number))
    empty(lance_files(table, "_versions/*.manifest")[0])
    assert table.rows().equals(before)
    assert run(table, make(8)).num_rows == (9 if schema.tensors else 8)
    assert missing(pa.table(make(*range(9))).select(schema.key), table.rows()).num_rows == 0
    assert table.rows().num_rows == 9


@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*", "*/*"])
def test_an_index_that_cannot_be_read_at_all_is_rebuilt_from_the_shards(tmp_path: Path, pattern: str):
    table = written(tmp_path / "t", *range(12))
    run(table, vectors(3, 4, add=1000), wanted=names(*range(8)))  # newer than the rows of the first shard
    before = table.rows()
    for path in lance_files(table, pattern):
        empty(path)
    with pytest.raises(ValueError, match=r"rows.lance cannot be read at version \d+: .*; run the stage again") as error:
        table.rows()
    assert "\n" not in str(error.value)
    with Writer(table, RECIPE) as writer:
        assert not table.exists  # its version is gone, and another may get the number
        assert numbers(writer.stored) == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 3, 4]
        writer.finish(names(*range(8)), {})
    assert table.rows().equals(before)
    check_tensors(table)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, len(path.read_bytes()) // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x" * 64),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize(("kind", "message"), [("longer", None), ("cut", "is cut short"), ("deleted", "is missing")])
def test_rows_of_a_lost_shard_are_hidden_and_missing_again_and_a_reader_of_them_says_so_in_one_line(tmp_path, kind, message):
    table = written(tmp_path / "t", *range(15))
    rows = table.rows()
    DAMAGE[kind](sorted(table.shards.glob("*.arrow"))[1])
    if message:
        with pytest.raises(ValueError, match=rf"vectors: .*00000002-\w+.arrow {message}.*latentmill verify --repair") as error:
            ShardReader(table.folder, rows, VECTORS)
        assert "\n" not in str(error.value)
        assert numbers(table.rows()) == numbers(table.committed()) == [*range(5), *range(10, 15)]
        check_tensors(table)
    stored = run(table, vectors(5, 6, 7, 8, 9), wanted=names(*range(15)))
    assert numbers(missing(names(*range(15)), stored)) == [5, 6, 7, 8, 9]
    assert numbers(table.rows()) == list(range(15))
    check_tensors(table)


def test_the_rows_of_a_shard_that_the_index_does_not_name_are_added(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)
    other = written(tmp_path / "other", 2, 3)
    for path in other.shards.glob("*.arrow"):
        shutil.copy(path, table.shards / f"00000002-{path.name[9:]}")
    assert sorted(numbers(run(table))) == [1, 2, 3]
    check_tensors(table)
    (table.shards / ".tmp-1-00000009-x.arrow").mkdir()  # of a killed writer: no shard
    assert list(table.examine()) == [] and table.usage()["shards"] == 2


def test_a_damaged_manifest_is_reported_and_rewritten_by_the_next_run(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)
    before, content = table.manifest(), table.manifest_file.read_bytes()
    for place in range(0, len(content), 7):
        flip(table.manifest_file, place)
        try:
            assert TableFolder(table.folder, table.schema).manifest() == before  # a space or a line end
        except ValueError as error:
            assert "is damaged" in str(error)
        table.manifest_file.write_bytes(content)
    for damage in (b"", b"{", b"[]", b'{"rows": 1}'):
        table.manifest_file.write_bytes(damage)
        assert not table.exists
        with pytest.raises(ValueError, match=r"manifest.json is damaged \(.*\); run the stage again"):
            table.rows()
        assert numbers(run(table)) == numbers(table.rows()) == [1, 2]


@pytest.mark.parametrize("schema", [VECTORS, PAIRS])
def test_a_flipped_bit_in_a_tensor_is_noticed_when_that_row_is_read_also_after_a_cleaning_that_moves_it(tmp_path: Path, schema):
    table = written(tmp_path / "t", *range(5), schema=schema)
    row, tensor = table.rows().to_pylist()[2], schema.tensors[-1]
    flip(table.shards / row["shard"], row[tensor.offset] + 3)
    reader = table.tensors()
    with pytest.raises(ValueError, match=rf"{schema.name}: .* row row-00002 in .*arrow .*checksum; run: latentmill") as error:
        reader.read("row-00002", tensor.name)
    assert "\n" not in str(error.value)
    assert [int(reader.read(f"row-{n:05d}", tensor.name).max()) for n in (0, 1, 3, 4)] == [0, 1, 3, 4]
    run(table, wanted=names(2))
    with Writer(table, {}) as writer:
        assert writer.collect() > 0
    assert numbers(table.rows()) == [2]
    with pytest.raises(ValueError, match="differs from its checksum"):
        table.tensors().read("row-00002", tensor.name)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*", "_transactions/*"])
def test_a_damaged_lance_file_is_no_full_disk_and_prints_nothing(tmp_path: Path, pattern: str, kind: str, capfd):
    table = TableFolder(tmp_path / "t", NOTES)
    run(table, notes(1, 2), flush_seconds=0)
    for path in lance_files(table, pattern):
        DAMAGE[kind](path)
    try:
        assert texts(table) == ["text 1", "text 2"]
    except ValueError as error:
        assert "run the stage again" in str(error) and "\n" not in str(error)
    if run(table, notes(3)).num_rows == 0:
        run(table, notes(1, 2))
    assert texts(table) == ["text 1", "text 2", "text 3"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_row_whose_file_is_damaged_is_missing_and_only_that_row(tmp_path: Path, kind: str):
    table = files(tmp_path / "t", 1, 2, 3)
    DAMAGE[kind](table.folder / "artifacts" / "2.txt")
    if kind != "flipped":
        assert table.rows()["name"].to_pylist() == table.committed()["name"].to_pylist() == ["1", "3"]
    assert run(table)["name"].to_pylist() == ["1", "3"]


def test_cleaning_deletes_the_files_of_deleted_rows_and_those_that_no_row_names(tmp_path: Path):
    table = files(tmp_path / "t", 1, 2, inside="texts/")
    with Writer(table, {}) as writer:
        writer.write_artifact("texts/3.txt", lambda path: path.write_text("of a run that was killed") and None)
        writer.write_artifact("all.txt", lambda path: path.write_text("no file of a row") and None)
        writer.finish(pa.table({"name": ["2"]}), {})
        assert writer.collect() > 0
    assert [path.name for path in sorted((table.folder / "artifacts").rglob("*.txt"))] == ["all.txt", "2.txt"]
    assert set(table.checksums.known()) >= {"artifacts/all.txt", "artifacts/texts/2.txt"}
    assert "artifacts/texts/3.txt" not in table.checksums.known()


def test_a_damaged_file_that_no_row_names_is_set_aside_and_its_bytes_are_kept(tmp_path: Path):
    table = files(tmp_path / "t", 1)
    with Writer(table, {}) as writer:
        writer.write_artifact("grid.png", lambda path: path.write_text("a grid of pictures") and None)
    path = table.folder / "artifacts" / "grid.png"
    flip(path, 3)
    damaged = path.read_bytes()
    with Writer(table, {}):
        assert not path.exists()
    assert (table.folder / "damaged" / "artifacts" / "grid.png").read_bytes() == damaged


def test_damaged_lines_of_the_checksums_are_ignored_and_new_ones_are_readable_after_a_torn_line(tmp_path: Path):
    checksums = Checksums(tmp_path)
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(str(number))
        checksums.record({f"{number}.txt": tmp_path / f"{number}.txt"})
    generator = random.Random(0)
    for _ in range(10):
        flip(checksums.file, generator.randrange(checksums.file.stat().st_size))
    checksums.file.write_bytes(checksums.file.read_bytes()[:-9])
    assert all(not Checksums(tmp_path).damage(f"{number}.txt") for number in range(20))
    checksums.record({"5.txt": tmp_path / "5.txt"})
    (tmp_path / "5.txt").write_text("6")
    assert Checksums(tmp_path).damage("5.txt") == "differs from its checksum"


def test_checksums_of_deleted_files_do_not_pile_up(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("pipeline.store.checksums.SLACK", 4)
    table = TableFolder(tmp_path / "t", NOTES)
    for turn in range(12):
        run(table, notes(turn))
    assert len(table.checksums.file.read_text().splitlines()) < 20


@pytest.mark.parametrize("first", [0, 5000])
def test_rows_of_a_commit_that_a_power_cut_broke_off_are_never_read(tmp_path: Path, first: int):
    """If no fsync came before the power cut, pages of a file can be zeros. Lance does not notice zeros inside a data file."""
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, {}) as writer:
        writer.append(notes(*range(first)))
    before = set(lance_files(table, "*/*"))
    with Writer(table, {}) as writer:
        writer.append(notes(*range(first, first + 5000)))
    new = sorted(set(lance_files(table, "*/*")) - before)
    table.checksums.forget([str(path.relative_to(table.folder)) for path in new])  # they are recorded after the last fsync
    (data,) = (path for path in new if path.suffix == ".lance")
    content = bytearray(data.read_bytes())
    start = len(content) * 4 // 5  # the values of a column of numbers
    content[start : start + 2048] = bytes(2048)
    data.write_bytes(bytes(content))
    table = TableFolder(table.folder, NOTES)
    assert table.committed().num_rows == first
    assert list(table.examine()) == []
    assert run(table).num_rows == first


@pytest.mark.parametrize("error", [MemoryError(), TypeError("a mistake"), AssertionError()])
def test_an_error_of_the_program_is_not_taken_for_damage(tmp_path: Path, monkeypatch, error: Exception):
    import lance

    table = written(tmp_path, 1, schema=NOTES)

    def fail(*given, **named):
        raise error

    monkeypatch.setattr(lance, "dataset", fail)
    with pytest.raises(type(error)):
        table.rows()


def test_a_panic_in_lance_while_old_versions_are_deleted_stops_no_run(tmp_path: Path, monkeypatch):
    import lance

    class PanicException(BaseException):
        """As pyo3 raises it."""

    clean, failed = lance.LanceDataset.cleanup_old_versions, list[int]()

    def panic(self, **named):
        if not failed:
            failed.append(1)
            raise PanicException("index out of bounds")
        return clean(self, **named)

    monkeypatch.setattr(lance.LanceDataset, "cleanup_old_versions", panic)
    table = written(tmp_path / "t", 1, schema=NOTES)
    assert failed and texts(table) == ["text 1"]


def test_a_finished_table_keeps_its_rows_when_its_checksums_are_lost(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2, schema=NOTES)
    table.checksums.file.unlink()
    assert texts(table) == ["text 1", "text 2"] and list(table.examine()) == []
    assert run(table).num_rows == 2


def test_a_table_with_other_columns_is_named_with_what_to_do_and_nothing_of_it_is_changed(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2, schema=NOTES)
    other = TableFolder(table.folder, replace(NOTES, columns=(*NOTES.columns, column("more", pa.string(), "a column more"))))
    before = state(table.folder)
    for use in (other.rows, other.committed, lambda: list(other.examine()), lambda: Writer(other, {}).__enter__()):
        with pytest.raises(ValueError, match=r"rows.lance has other columns .*more string.*; move .* away and run") as error:
            use()
        assert "\n" not in str(error.value)
    assert state(table.folder) == before and texts(table) == ["text 1", "text 2"]
