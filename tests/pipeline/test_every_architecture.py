"""Kills, damage and single files, once for each architecture: what is stored of latents, texts and adapters differs in shape."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file

from pipeline.api import Project
from pipeline.commands.text_to_image.export import export_run
from stages.models.family import TOKENIZER
from stages.text_to_image.families import FAMILIES
from tests import projects
from tests.checkpoints import SINGLE_FILES, autoencoder_as_single_file
from tests.pipeline.killing import KILLED, count_syncs, run_and_kill
from tests.pipeline.sweeps.test_damage import GROUPS, TENSORS, flip
from tests.pipeline.test_kill import CLI

# The other tests of kills and damage use FLUX.2's.
OTHERS = [name for name, record in FAMILIES.items() if record.seeded is not None and record.code != FAMILIES["tiny"].code]
CHAIN, TABLES = ("images", "captions", "buckets", "latents", "embeddings"), ("latents", "embeddings", "train")
SMALL = (("[64, 96]", "[64]"), ("steps = 6", "steps = 4"), ("height = 64\nsteps = 2", "height = 64\nsteps = 1\nbase = false"))


@pytest.fixture(scope="module", params=OTHERS)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seeded_weights: Callable[[str], Path]
) -> tuple[Path, Path, int]:
    """A project before training, the same one finished, and how often training called fsync."""
    name = request.param
    before = projects.make(tmp_path_factory.mktemp(name) / "project", seeded_weights(name), images=3, family=name)
    for old, new in SMALL:
        projects.edit(before, old, new)
    projects.build(before, *CHAIN)
    after = shutil.copytree(before, tmp_path_factory.mktemp(f"{request.param}-finished") / "project", symlinks=True)
    syncs = count_syncs(lambda: projects.latentmill(after, "run", "train", "--only"))
    projects.build(after, "samples")
    return before, after, syncs


def test_training_that_is_killed_ends_where_an_unbroken_run_ends(finished: tuple[Path, Path, int], tmp_path: Path) -> None:
    before, unbroken, syncs = finished
    killed = shutil.copytree(before, tmp_path / "project", symlinks=True)
    code, said = run_and_kill(2 * syncs // 3, CLI, "run", "train", "--only", "--project", str(killed))
    assert code == KILLED, said
    projects.latentmill(killed, "run", "train", "--only")
    assert projects.content(killed, "train") == projects.content(unbroken, "train")
    assert projects.artifacts(killed, "train") == projects.artifacts(unbroken, "train")


def test_a_flipped_bit_in_a_tensor_or_an_adapter_is_named_and_made_good(finished: tuple[Path, Path, int], tmp_path: Path) -> None:
    _, sound, _ = finished
    folder, draw = shutil.copytree(sound, tmp_path / "project", copy_function=shutil.copy2, symlinks=True), random.Random(0)
    damaged = {group: draw.choice(sorted(folder.glob(GROUPS["text_to_image"][group]))) for group in TENSORS}
    for path in damaged.values():
        flip(path, draw)
    named = " ".join(str(each) for each in Project(folder).verify())
    assert all(path.name in named for path in damaged.values()), named
    assert not Project(folder).verify(repair=True)
    projects.build(folder, *CHAIN, "train", "samples")
    exported = [
        export_run(Project(each), each / "exports", "diffusers", dtype="float32").read_bytes() for each in (sound, folder)
    ]
    assert exported[0] == exported[1]
    for name in ("train", "samples"):
        assert projects.artifacts(folder, name) == projects.artifacts(sound, name)


def test_single_files_beside_each_other_give_the_tables_of_the_folders(
    finished: tuple[Path, Path, int], seeded_weights: Callable[[str], Path], tmp_path: Path
) -> None:
    before, sound, _ = finished
    record, files = Project(sound).family, tmp_path / "files"
    folders = seeded_weights(record.name)
    folder = shutil.copytree(folders / record.folders[TOKENIZER], files / TOKENIZER)
    for needless in (*folder.glob("*.safetensors"), folder / "config.json"):
        needless.unlink(missing_ok=True)
    renamed = {"transformer": SINGLE_FILES[record.code], "autoencoder": autoencoder_as_single_file}
    for component in ("transformer", "autoencoder", "text_encoder"):
        (file,) = (folders / record.folders[component]).glob("*.safetensors")
        arrays = renamed.get(component, dict)(load_file(file))
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, files / record.single_files[component][0])
    copy = projects.copied(before, tmp_path / "project")
    projects.edit(copy, f'weights = "{folders}"', f'weights = "{files}"')
    projects.build(copy, *CHAIN, "train")
    for name in TABLES:
        assert projects.content(copy, name) == projects.content(sound, name)
    adapters = [
        load(projects.artifacts(each, "train")["adapter.safetensors"]) for each in (copy, sound)
    ]  # headers name the weights
    assert adapters[0].keys() == adapters[1].keys()
    assert all(np.array_equal(value, adapters[1][key]) for key, value in adapters[0].items())
