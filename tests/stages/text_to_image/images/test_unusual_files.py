"""Files and folders that a user rarely has: too large, of the system, deep, linked, unreadable, or no files at all."""

import gzip
import io
import os
import struct
from pathlib import Path

import numpy as np
import pillow_heif
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from stages.text_to_image.images.stage import STAGE
from stages.text_to_image.imaging import decode, packed
from tests.harness import run
from tests.stages.text_to_image.images.folders import draw
from tests.stages.text_to_image.imaging.pictures import chunk, saved, tar


def test_a_file_above_the_limit_is_refused_unread_and_a_link_into_proc_too(project, probed):
    with (project.source / "sparse.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(40_000_000_000)
    (project.source / "environment.png").symlink_to("/proc/self/environ")
    (project.source / "memory.png").symlink_to("/proc/kcore")
    draw(project.source / "good.png")
    rows = project.run()
    assert rows["good.png"]["rejected"] is None and rows["environment.png"]["rejected"] == "unreadable"
    assert rows["sparse.png"]["rejected"] == "too_large"
    assert rows["sparse.png"]["detail"] == "40,000,000,000 bytes, more than images.max_bytes = 1,000,000,000"
    assert rows["memory.png"]["rejected"] in ("too_large", "unreadable")  # by the system's version
    assert [Path(name).name for name in probed] == ["good.png"]


def test_a_file_from_a_far_year_is_an_image_like_any_other(project):
    path = draw(project.source / "future.png")
    os.utime(path, ns=(0, int(17e18)))
    if path.stat().st_mtime_ns < 2**63:
        pytest.skip("this file system has no year 2508")
    assert project.run()["future.png"]["rejected"] is None
    assert not project.run()


def test_folders_nested_a_thousand_deep_are_searched(project, monkeypatch):
    monkeypatch.chdir(project.source)
    for _ in range(1010):
        Path("d").mkdir()
        os.chdir("d")
    draw(Path("a.png"))
    assert [row["rejected"] for row in project.run().values()] == [None]
    Path("a.png").unlink()
    for _ in range(1010):  # pytest cannot delete them
        os.chdir("..")
        Path("d").rmdir()


@pytest.mark.parametrize("replace", [lambda path: None, os.mkfifo])
def test_a_file_deleted_or_replaced_by_a_pipe_between_scan_and_read_is_an_unreadable_row(replace, project):
    draw(project.source / "a.png")
    gone = draw(project.source / "b.png", 1)
    made = project.context()
    gone.unlink()
    replace(gone)
    rows = {row["path"]: row for row in run(STAGE, made).to_pylist()}
    assert rows["a.png"]["rejected"] is None
    assert rows["b.png"]["rejected"] == "unreadable" and rows["b.png"]["image_id"] == ""


def test_an_unreadable_file_is_tried_again_although_it_did_not_change_unless_it_is_gone(project, monkeypatch):
    def without_decoder():
        raise decode.ImageError("unsupported", "no decoder")

    pillow_heif.register_heif_opener()
    draw(project.source / "a.png")
    (project.source / "b.heic").write_bytes(saved(Image.new("RGB", (80, 80), "lime"), "HEIF"))
    (project.source / "c.mp4").write_bytes(b"film")
    with monkeypatch.context() as patch:
        patch.setattr(decode, "_register_heif", without_decoder)
        project.run()
        assert project.verdicts()["b.heic"] == "unsupported"
        assert project.run() == {}
    assert STAGE.redo(project.context())["path"].to_pylist() == ["b.heic", "c.mp4"]
    (project.source / "c.mp4").unlink()
    assert list(project.run()) == ["b.heic"]
    assert project.verdicts()["b.heic"] is None and STAGE.redo(project.context()).num_rows == 0


def test_linked_folders_are_followed_unless_they_are_the_systems_loops_end_and_a_named_pipe_is_never_opened(project, probed):
    draw(project.source / "a.png")
    draw(project.folder / "elsewhere" / "b.png", 1)
    (project.source / "link").symlink_to(project.folder / "elsewhere")
    (project.folder / "elsewhere" / "back").symlink_to(project.source)
    (project.source / "self.png").symlink_to(project.source / "self.png")
    os.mkfifo(project.source / "pipe.png")
    assert sorted(project.run()) == ["a.png", "link/b.png", "self.png"]
    assert project.verdicts()["self.png"] == "unreadable" and "pipe.png" not in " ".join(probed)
    (project.source / "linked").symlink_to("/proc")
    with pytest.raises(ValueError, match="linked leads to /proc, a folder of the system: change its permissions, or move it out"):
        project.run()


def test_a_file_name_that_is_not_utf_8_becomes_an_unreadable_row(project):
    draw(project.source / "a.png")
    try:
        Path(os.fsdecode(os.fsencode(project.source) + b"/b\xff.png")).write_bytes(b"x")
    except OSError:  # some file systems allow no such name: then there is nothing to refuse
        return
    project.run()
    row = project.stored.to_pylist()[1]
    assert (row["path"], row["rejected"]) == ("b\\xff.png", "unreadable") and "not UTF-8" in row["detail"]


def table(write, values: list[bytes], **options) -> bytes:
    file = io.BytesIO()
    write(pa.table({"image": pa.array(values, pa.binary())}), file, **options)
    return file.getvalue()


def arrow(found: pa.Table, file: io.BytesIO, compression: str | None = None) -> None:
    with pa.ipc.new_stream(file, found.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(found)


PNG = saved(Image.linear_gradient("L"))


def animated(frames: int) -> bytes:
    """A PNG whose header says that it has so many frames."""
    return PNG[:33] + chunk(b"acTL", struct.pack(">II", frames, 0)) + PNG[33:]


def scans(count: int) -> bytes:
    """A progressive JPEG that repeats its last scan: small, and long to decode."""
    whole = saved(Image.radial_gradient("L").resize((3000, 3000)), "JPEG", progressive=True, quality=5)
    at = whole.rindex(b"\xff\xda")
    return whole[:at] + whole[at:-2] * count + b"\xff\xd9"


ZEROS = [bytes(2_000_000)]
HOSTILE = {
    "cut.tar": (lambda: tar(("a.png", PNG), ("b.png", PNG))[:2000], ["unreadable", None]),
    "zipped.tar": (lambda: gzip.compress(tar(("a.png", PNG)))[:-9], ["unreadable"]),
    "empty.tar": (lambda: b"", ["unreadable"]),
    "cut.parquet": (lambda: table(pq.write_table, [PNG])[:-20], ["unreadable"]),
    "bits.parquet": (lambda: table(pq.write_table, [PNG]).replace(b"image", b"\xff\xff\xff\xff\xff"), ["unreadable"]),
    "zeros.parquet": (lambda: table(pq.write_table, ZEROS, compression="zstd", use_dictionary=False), ["unreadable"]),
    "cut.arrow": (lambda: table(arrow, [PNG])[:-500], ["unreadable"]),
    "zeros.arrow": (lambda: table(arrow, ZEROS, compression="zstd"), ["unreadable"]),
    "offsets.arrow": (
        lambda: table(arrow, [b"\5" * 8, PNG]).replace(b"\0\0\0\0\x08\0\0\0", b"\0\0\0\0\xf8\xff\xff\xff"),
        ["unreadable"],
    ),
    "junk.arrow": (lambda: b"ARROW1\0\0" + b"\xff" * 500, ["unreadable"]),
    "frames.png": (lambda: animated(2**31), [None]),
    "scans.jpg": (lambda: scans(300), ["bomb"]),
    "comment.ppm": (lambda: b"P6\n#" + b"x" * 2_000_000 + b"\n64 64 255\n" + bytes(3 * 64 * 64), ["unreadable"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_container_or_a_hostile_picture_is_a_row_with_its_reason_and_the_other_pictures_are_read(
    name, project, monkeypatch
):
    draw(project.source / "good.png")
    write, expected = HOSTILE[name]
    monkeypatch.setattr(packed, "GROUP_BYTES", 1_000_000)
    (project.source / name).write_bytes(write())
    rows = project.run()
    assert rows["good.png"]["rejected"] is None
    found = [row for path, row in sorted(rows.items()) if path.startswith(name)]
    assert [row["rejected"] for row in found] == expected
    assert not name.startswith("zeros.") or "when it is decoded: it holds no pictures" in found[0]["detail"]
    assert all(row["detail"] and "\n" not in row["detail"] for row in found if row["rejected"])


def test_one_picture_in_many_rows_of_a_parquet_file_is_in_memory_once(tmp_path):
    picture, rows = np.random.default_rng(0).bytes(100_000), 1_000
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([picture], pa.binary())).cast(
        pa.binary()
    )
    pq.write_table(pa.table({"image": column}), tmp_path / "a.parquet", store_schema=False)
    del column
    before = pa.total_allocated_bytes()
    assert packed.read_member(tmp_path / "a.parquet" / "000000007.png") == picture
    assert pa.total_allocated_bytes() - before < rows * len(picture) / 10
