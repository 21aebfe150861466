"""A disk that refuses to write: one line says so, and what was committed stays."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import BATCHES, NOTES, notes

RECIPE = {"stage": "vectors"}


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system refuses to write files beyond this size, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 1200, 1300, 2500, 4500])
@pytest.mark.parametrize("name", BATCHES)
def test_a_full_disk_is_one_line_and_what_was_committed_stays(tmp_path: Path, name: str, limit: int):
    schema, make = BATCHES[name]
    table = TableFolder(tmp_path / "t", schema)
    with Writer(table, RECIPE) as writer:
        writer.append(make(1, 2, 3))
        writer.finish(None, {})
    before = table.rows()
    kept = r"disk full while writing \w+: \d+ rows are kept; free 1 MB or more and run again"
    with pytest.raises(ValueError, match=kept) as error, no_file_above(limit), Writer(table, RECIPE, shard_bytes=1) as writer:
        for number in range(4, 30):
            writer.append(make(number, number + 100, number + 200, number + 300, number + 400))
            writer.flush()
        writer.finish(None, {})
        writer.write_artifact("big.png", lambda path: path.write_bytes(bytes(10000)) and None)
    assert "\n" not in str(error.value)
    assert not list(table.folder.rglob(".tmp-*"))
    assert table.rows().equals(before) or table.rows().num_rows > 100
    with Writer(table, RECIPE) as writer:
        assert writer.stored.num_rows >= int(str(error.value).split(": ")[1].split()[0]) >= 3
        writer.append(make(999))
        writer.finish(None, {})
    assert table.rows().num_rows == table.manifest()["rows"] >= 4


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "disk full while writing notes: 1 rows are kept; free 1 MB or more and run again"),
        (errno.EROFS, "cannot write notes in .*: read-only file system; 1 rows are kept"),
        (errno.EACCES, "cannot write notes in .*: permission denied; 1 rows are kept"),
    ],
)
def test_an_error_of_the_last_fsync_is_one_line(tmp_path: Path, monkeypatch, number: int, message: str):
    table = TableFolder(tmp_path / "t", NOTES)

    def refuse(path: Path) -> None:
        raise OSError(number, "no")

    with pytest.raises(ValueError, match=message), Writer(table, RECIPE) as writer:
        writer.append(notes(1))
        writer.flush()
        monkeypatch.setattr("pipeline.store.disk.sync", refuse)
        writer.write_artifact("a.png", lambda path: path.write_bytes(b"x") and None)
    assert not (table.folder / "artifacts/a.png").exists()
    assert not list(table.folder.rglob(".tmp-*"))


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "t").write_text("I was here first")
    with pytest.raises(ValueError, match="cannot write notes in"), Writer(TableFolder(tmp_path / "t" / "x", NOTES), RECIPE):
        pass
