"""`latentmill verify` names what is damaged and what depends on it; `--repair` makes exactly that again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.api import Project
from pipeline.commands.clean import clean
from pipeline.commands.query import export_parquet
from pipeline.commands.status import describe, states
from pipeline.commands.text_to_image.export import export_run
from pipeline.store.disk import TEMPORARY, atomic_folder
from pipeline.store.table import TableFolder, Writer
from schemas.text_to_image import GENERATED
from tests import projects
from tests.pipeline.store.stores import flip
from tests.toy import project as toy


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("built") / "project", tiny_weights, images=2)
    projects.edit(folder, "steps = 6", "steps = 4")
    projects.build(folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return projects.duplicate(built, tmp_path / "project")


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'


def test_damage_of_a_project_that_cannot_be_written_is_named_and_its_repair_refused_in_one_line(tmp_path):
    namespace = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare, to mount a folder read-only")
    folder = toy.make(tmp_path / "texts")
    for stage in ("lines", "tokens"):
        Project(folder).run(stage, progress=False)
    flip(shard := file(folder, "tokens/*/shards/*.arrow"))
    words = [sys.executable, "-m", "pipeline", "verify", "--repair", "--project", str(folder)]
    words = [*namespace, "sh", "-c", READ_ONLY, "sh", str(folder), *words]
    done = subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True)
    damage, error = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 2 and damage.startswith(f"tokens: {shard} differs from its checksum")
    assert error.startswith("error: cannot write tokens in ") and "read-only file system; the table is unchanged" in error


def file(folder: Path, pattern: str) -> Path:
    return sorted((folder / "tables").glob(pattern))[0]


def test_a_whole_project_has_nothing_to_repair_and_a_flipped_bit_gives_exit_code_1_and_its_row(folder: Path):
    assert "everything that has a checksum" in projects.latentmill(folder, "verify")
    row = Project(folder)["latents"].to_arrow().to_pylist()[1]
    flip(file(folder, f"latents/*/shards/{row['shard']}"), row["byte_offset"] + 5)
    said = projects.latentmill(folder, "verify", code=1)
    assert row["latent_id"] in said and "used by train, samples, scores" in said and "--repair" in said
    shutil.rmtree(folder / "tables" / "train")
    assert f"latentmill verify -p {folder} --repair" in projects.latentmill(folder, "run", "train", "--only", code=2)
    assert "rows were made again" in projects.latentmill(folder, "verify", "--repair")


def test_a_deleted_preview_is_one_missing_row_and_every_other_command_works(folder: Path):
    path = file(folder, "samples/*/artifacts/images/*.png")
    before = path.read_bytes()
    path.unlink()
    state = next(each for each in states(Project(folder)) if each.stage_name == "samples")
    assert describe(state) == "1 row missing: make samples"
    rows = Project(folder).sql("select count(*) as n from samples").to_pylist()[0]["n"]
    assert projects.build(folder, "samples")["samples"].written == 1 and path.read_bytes() == before
    assert Project(folder).sql("select count(*) as n from samples").to_pylist() == [{"n": rows + 1}]


@pytest.mark.parametrize("pattern", ["adapter.safetensors", "checkpoints/step-000002/adapter.safetensors"])
def test_a_damaged_adapter_is_not_exported_and_is_made_again_to_the_bit(folder: Path, pattern: str):
    path, step = file(folder, f"train/*/artifacts/{pattern}"), 2 if "step" in pattern else None
    before = path.read_bytes()
    flip(path)
    with pytest.raises(ValueError, match="is damaged: it differs from its sha256; run: latentmill verify --repair"):
        export_run(Project(folder), None, "diffusers", dtype="float32", step=step)
    assert Project(folder).verify(repair=True) == [] and path.read_bytes() == before


@pytest.mark.parametrize("name", ["state.json", "rows.arrow", "a folder"])
def test_a_lost_file_of_the_last_checkpoint_is_noticed_and_made_again_with_its_state(folder: Path, name: str):
    taken = name == "a folder"
    path = file(folder, f"train/*/artifacts/checkpoints/step-000004/{'adapter.safetensors' if taken else name}")
    path.unlink()
    if taken:
        path.mkdir()
        (path / "inside").touch()
    assert any("step-000004" in str(found) for found in Project(folder).verify())
    assert Project(folder).verify(repair=True) == [] and path.is_file() and (path.parent / "state.json").is_file()
    assert all(outcome.up_to_date for outcome in projects.build(folder).values())


def test_a_checkpoint_whose_state_is_damaged_is_named_by_samples(folder: Path):
    file(folder, "train/*/artifacts/checkpoints/step-000002/state.json").write_text("{")
    with pytest.raises(ValueError, match=r"the checkpoint of step 2 is damaged: .*state.json is damaged; run: latentmill verify"):
        projects.build(folder, "samples")
    assert Project(folder).verify(repair=True) == []
    assert not projects.build(folder, "samples")["samples"].removed


def test_clean_deletes_what_a_killed_command_left_and_keeps_what_a_running_one_writes(folder: Path):
    left = folder / "exports" / f"{TEMPORARY}1234-merged"
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_bytes(bytes(2000))
    (file(folder, "latents/*/manifest.json").parent / "shards" / f"{TEMPORARY}x.arrow").write_bytes(bytes(1000))
    with atomic_folder(folder / "exports" / "running") as temporary:
        (temporary / "a").touch()
        said = list(clean(Project(folder), runs=False, dry_run=False))
        assert temporary.exists()
    assert any("left by a killed command, 2 kB" in line for line in said) and said[-1] == "freed 3 kB"
    assert not left.exists() and not list(folder.rglob(f"{TEMPORARY}*"))


def test_changed_weights_are_named_if_size_and_time_are_the_same(folder: Path, tmp_path: Path, tiny_weights: Path):
    shutil.copytree(tiny_weights, tmp_path / "weights")
    projects.edit(folder, str(tiny_weights), str(tmp_path / "weights"))
    assert Project(folder).verify() == [] and Project(folder).recipe("latents")
    path = next((tmp_path / "weights" / "vae").glob("*.safetensors"))
    stat = path.stat()
    flip(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (found,) = Project(folder).verify()
    assert found.table == "weights" and found.file == path.name


def test_the_pictures_of_generate_are_verified_queried_and_exported_as_the_tables_of_stages_are(folder: Path):
    table = TableFolder(folder / "tables" / "generated" / "0123456789ab", GENERATED)
    empty = {"string": "", "int32": 0, "int64": 0, "double": 0.0, "float": 0.0}
    row = {each.name: empty[str(each.type)] for each in GENERATED.columns}
    with Writer(table, {}) as writer:
        for name in ("a", "b"):
            writer.write_artifact(f"images/{name}.png", lambda path: path.write_bytes(bytes(500)) and None)
            writer.append(GENERATED.record_batch([row | {"picture_id": name, "path": f"images/{name}.png"}]))
        writer.finish(None, {})
    assert Project(folder).verify() == []
    export_parquet(Project(folder), folder / "out")
    assert (folder / "out" / "generated.parquet").is_file()
    flip(table.folder / "artifacts" / "images" / "a.png")
    (found,) = Project(folder).verify()
    assert (found.table, found.file, found.rows) == ("generated", "artifacts/images/a.png", ("a",))
    assert Project(folder).verify(repair=True) == []
    assert Project(folder).sql("select picture_id from generated").to_pylist() == [{"picture_id": "b"}]
