"""Damage of a table's files is noticed before a value is used, and the next run writes what was damaged again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.checksums import Checksums
from pipeline.store.table import TableFolder
from pipeline.store.verify import examine
from pipeline.store.writer import Writer
from schemas.table import TableSchema, column
from tests.pipeline.store.stores import (
    NOTES,
    PAIRS,
    check_tensors,
    lance_files,
    names,
    notes,
    numbers,
    texts,
    vectors,
    written,
)

FILES = TableSchema(
    name="files",
    doc="A table whose rows name files.",
    key=("name",),
    columns=(column("name", pa.string(), "the key"), column("path", pa.string(), "the file of the row")),
    artifact="path",
)


def flip(path: Path, place: int = -20) -> None:
    """Change one bit of a file; `place` counts from its end if it is negative."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(bytes(content))


def files(folder: Path, *numbers: int, inside: str = "") -> TableFolder:
    """Return a finished table with the schema FILES and one row per number. Each row has a small file in the folder
    `inside` of the artifacts.
    """
    table = TableFolder(folder, FILES)
    with Writer(table, {}) as writer:
        for number in numbers:
            name = f"{inside}{number}.txt"
            writer.write_artifact(name, lambda path, text=f"text {number}": path.write_text(text) and None)
            writer.append(pa.RecordBatch.from_pylist([{"name": str(number), "path": name}], schema=FILES.batch))
        writer.finish(None, {})
    return table


@pytest.mark.parametrize("schema", [None, PAIRS])
def test_a_flipped_bit_in_a_tensor_is_noticed_when_that_row_is_read_and_in_no_other_row(tmp_path: Path, schema):
    table = written(tmp_path / "t", *range(5), **({"schema": schema} if schema else {}))
    row = table.rows().to_pylist()[2]
    tensor = table.schema.tensors[-1]
    flip(table.shards / row["shard"], row[tensor.offset] + 3)
    reader = table.tensors()
    with pytest.raises(
        ValueError, match=rf"{table.schema.name}: .* row row-00002 in .*arrow .*checksum; run: latentmill"
    ) as error:
        reader.read("row-00002", tensor.name)
    assert "\n" not in str(error.value)
    assert [int(reader.read(f"row-{n:05d}", tensor.name).max()) for n in (0, 1, 3, 4)] == [0, 1, 3, 4]


def test_cleaning_moves_a_damaged_tensor_with_its_old_checksum(tmp_path: Path):
    table = written(tmp_path / "t", *range(5))
    row = table.rows().to_pylist()[2]
    flip(table.shards / row["shard"], row["byte_offset"] + 3)
    with Writer(table, {}) as writer:
        writer.finish(names(2), {})
        assert writer.collect() > 0
    assert numbers(table.rows()) == [2]
    with pytest.raises(ValueError, match="differs from its checksum"):
        table.tensors().read("row-00002")


APPEND: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, len(path.read_bytes()) // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x" * 64),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("kind", APPEND)
@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*", "_transactions/*"])
def test_a_damaged_lance_file_is_no_full_disk_and_prints_nothing(tmp_path: Path, pattern: str, kind: str, capfd):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, {}, flush_seconds=0) as writer:
        writer.append(notes(1, 2))
        writer.finish(None, {})
    for path in lance_files(table, pattern):
        APPEND[kind](path)
    try:
        assert texts(table) == ["text 1", "text 2"]
    except ValueError as error:
        assert "run the stage again" in str(error) and "\n" not in str(error)
    with Writer(table, {}) as writer:
        if writer.stored.num_rows == 0:
            writer.append(notes(1, 2))
        writer.append(notes(3))
        writer.finish(None, {})
    assert texts(table) == ["text 1", "text 2", "text 3"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", APPEND)
def test_a_row_whose_file_is_damaged_is_missing_and_only_that_row(tmp_path: Path, kind: str):
    table = files(tmp_path / "t", 1, 2, 3)
    APPEND[kind](table.folder / "artifacts" / "2.txt")
    if kind != "flipped":
        assert table.rows()["name"].to_pylist() == table.committed()["name"].to_pylist() == ["1", "3"]
    with Writer(table, {}) as writer:
        assert writer.stored["name"].to_pylist() == ["1", "3"]


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


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_flipped_bit_in_a_manifest_is_noticed(tmp_path: Path, place: int):
    table = written(tmp_path / "t", 1, 2)
    before = table.manifest()
    flip(table.manifest_file, place % len(table.manifest_file.read_bytes()))
    try:
        assert table.manifest() == before  # a space or a line end
    except ValueError as error:
        assert "is damaged" in str(error)


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


def test_checksums_of_deleted_files_do_not_pile_up(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    for turn in range(60):
        with Writer(table, {}) as writer:
            writer.append(notes(turn))
            writer.finish(None, {})
    assert len(table.checksums.file.read_text().splitlines()) < 200


def test_a_file_that_was_rewritten_is_not_damaged(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, {}) as writer:
        for text in ("one", "two"):
            writer.write_artifact("a.txt", lambda path, text=text: path.write_text(text) and None)
    with Writer(table, {}):
        assert (table.folder / "artifacts" / "a.txt").read_text() == "two"


def test_vectors_written_before_and_after_a_repair_are_equal(tmp_path: Path):
    table = written(tmp_path / "t", *range(10))
    flip(lance_files(table, "data/*")[0], 40)
    with pytest.raises(ValueError, match="run the stage again"):
        table.rows()
    with Writer(table, {}) as writer:
        writer.append(vectors(3))
        writer.finish(None, {})
    assert sorted(numbers(table.rows())) == list(range(10))
    check_tensors(table)


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
    assert list(examine(table)) == []
    with Writer(table, {}) as writer:
        assert writer.stored.num_rows == first


@pytest.mark.parametrize("error", [MemoryError(), TypeError("a mistake"), AssertionError()])
def test_an_error_of_the_program_is_not_taken_for_damage(tmp_path: Path, monkeypatch, error: Exception):
    import lance

    table = written(tmp_path, 1, schema=NOTES)

    def fail(*given, **named):
        raise error

    monkeypatch.setattr(lance, "dataset", fail)
    with pytest.raises(type(error)):
        table.rows()
