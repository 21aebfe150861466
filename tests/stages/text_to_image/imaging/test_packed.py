"""Images inside tars, Parquet files and Arrow files: the same rows and latents as those of a folder."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline import runner
from pipeline.on_ray import Packer
from pipeline.project.project import Project
from tests import projects
from tests.stages.text_to_image.imaging.pictures import tar

pytestmark = pytest.mark.slow

SIZE = (96, 80)
LARGE = (320, 240)  # as pixels, 200 of these take 46 MB
VARIES = 30  # megabytes by which the peaks of equal processes may differ: 300 and 325 were seen for Parquet
KINDS = ("tar", "parquet", "arrow")


def pictures(count: int, size: tuple[int, int] = SIZE) -> dict[str, bytes]:
    """Different pictures of `size` pixels, as the bytes of PNG files by name."""
    found = {}
    for n in range(count):
        pixels = np.random.default_rng(n).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR).save(file, "PNG", compress_level=1)
        found[f"{n:06d}.png"] = file.getvalue()
    return found


def pack(folder: Path, kind: str, images: dict[str, bytes], text: str = "a thing {}") -> None:
    """Write the pictures with captions as a WebDataset tar, a Parquet file, or an Arrow file of `save_to_disk`."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "tar":
        members = list(images.items())
        for n, name in enumerate(images):
            if n % 2:
                members.append((name.replace(".png", ".txt"), text.format(n).encode()))
            else:
                members.append((name.replace(".png", ".json"), json.dumps({"caption": text.format(n), "width": 3}).encode()))
        (folder / "train-000.tar").write_bytes(tar(*members))
        return
    values = [{"bytes": data, "path": name} for name, data in images.items()]
    table = pa.table({"image": values, "text": [text.format(n) for n in range(len(values))], "label": [0] * len(values)})
    if kind == "parquet":
        pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=100)
        return
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")


def made(folder: Path, weights: Path, kind: str, images: dict[str, bytes]) -> Path:
    projects.make(folder, weights, images=0)
    if kind != "folder":
        pack(folder / "images", kind, images)
        return folder
    for n, (name, data) in enumerate(images.items()):
        (folder / "images" / name).write_bytes(data)
        (folder / "images" / name).with_suffix(".txt").write_text(f"a thing {n}")
    return folder


def build(folder: Path, *names: str) -> list[str]:
    console = projects.Silent()
    for name in names:
        runner.run(Project(folder), name, console)
    return console.lines


def test_packed_images_have_the_captions_and_the_latents_of_the_folder_to_the_byte(tmp_path: Path, tiny_weights: Path) -> None:
    images = pictures(3)
    stages = ("images", "captions", "checks", "buckets", "latents")
    found = {}
    for kind in ("folder", *KINDS):
        folder = made(tmp_path / kind, tiny_weights, kind, images)
        lines = build(folder, *stages)
        latents = projects.content(folder, "latents").drop_columns(["mean"]).sort_by("latent_id")
        rows = Project(folder).current("captions").rows().to_pylist()
        texts = sorted((row["image_id"], row["text"]) for row in rows if row["role"] == "caption")
        found[kind] = latents, texts
        inside = [row for row in Project(folder).current("images").rows().to_pylist() if row["offset"] is not None]
        assert len(inside) == (0 if kind == "folder" else 3)
        assert kind == "folder" or any(line.startswith("3 images inside ") for line in lines)
    build(folder, "embeddings", "train")  # they open no image, of whatever kind
    for kind in KINDS:
        assert found[kind][0].equals(found["folder"][0]) and found[kind][1] == found["folder"][1], kind
    pack(tmp_path / "tar" / "images", "tar", pictures(4))
    assert projects.written(projects.build(tmp_path / "tar", "images")) == {"images": 4}, "a changed file is read again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_elsewhere_gets_the_file_that_holds_the_images_once(kind: str, tmp_path: Path, tiny_weights: Path) -> None:
    folder = made(tmp_path / "project", tiny_weights, kind, pictures(3))
    build(folder, "images", "captions", "buckets")
    for name in ("images", "checks", "latents"):
        project = Project(folder)
        stage = project.stage(name)
        run = project.open(stage.name)
        run.output.pending, sent = stage.wants(run), list[bytes]()
        [file] = Packer(lambda data, sent=sent: sent.append(data)).pack(stage.opens(run))
        assert file.path.parent == folder / "images" and [file.path.read_bytes()] == sent


def test_a_damaged_file_is_one_line(tmp_path: Path, tiny_weights: Path) -> None:
    folder = projects.make(tmp_path / "project", tiny_weights, images=0)
    for name, data in (("cut.tar", bytes(100) + b"x" * 2000), ("cut.parquet", b"PAR1 and"), ("cut.arrow", b"ARROW1 and")):
        (folder / "images" / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name} cannot be read: .*move it out") as error:
            build(folder, "images")
        assert "\n" not in str(error.value)
        (folder / "images" / name).unlink()


def test_a_table_without_images_is_no_image_and_a_wrong_caption_column_is_named(tmp_path: Path, tiny_weights: Path) -> None:
    folder = made(tmp_path / "project", tiny_weights, "parquet", pictures(2))
    pq.write_table(pa.table({"file_name": ["a.png"], "text": ["a"]}), folder / "images" / "metadata.parquet")
    projects.edit(folder, "[captions]", '[captions]\ncaption_column = "label_text"')
    build(folder, "images")
    with pytest.raises(ValueError, match=r"captions\.caption_column must be a column of .*parquet, such as image, text, label"):
        build(folder, "captions")


# A process that starts another inherits nothing to its peak from the test, whose memory holds the pictures.
PEAK = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); print(resource.getrusage(-1).ru_maxrss)"


def peak_of(folder: Path) -> float:
    """The peak memory of the stage `images`, run in a process from the beginning, in megabytes."""
    words = [sys.executable, "-m", "pipeline", "run", "images", "--only", "--project", str(folder)]
    shutil.rmtree(folder / "tables", ignore_errors=True)
    done = subprocess.run([sys.executable, "-c", PEAK, *words], cwd=projects.ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1000


@pytest.mark.proof("10,000 images in a tar, a Parquet and an Arrow file: memory grows by rows alone; a rescan reads no image")
def test_the_memory_of_reading_grows_by_rows_alone_and_a_second_run_reads_no_image(tmp_path, tiny_weights, cases):
    few, many = cases((10, 210), (1000, 10_000))
    drawn = pictures(many, LARGE)
    for kind in KINDS[: cases(1, len(KINDS))]:
        small = made(tmp_path / f"{kind}{few}", tiny_weights, kind, dict(itertools.islice(drawn.items(), few)))
        large = made(tmp_path / f"{kind}{many}", tiny_weights, kind, drawn)
        # On a busy machine, threads may hold more at once in one run than in the next.
        allowed = peak_of(small) + VARIES + 0.008 * (many - few)  # 8 kB of rows for each image
        assert any(peak_of(large) < allowed for _ in range(3)), (kind, allowed)
        assert Project(large).current("images").rows().num_rows == many
        assert "images: up to date" in projects.latentmill(large, "run", "images", "--only")
