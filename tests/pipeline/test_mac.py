"""What is peculiar to Macs, simulated: memory, names, side files; GPU errors, F_FULLFSYNC and few descriptors in a whole run."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import sys
import unicodedata
import urllib.request  # noqa: F401  (it asks for the platform when it is imported, not when it is faked)
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pipeline.project.project import Project
from pipeline.project.recipe import FileHashes
from pipeline.store import disk
from stages.models.weights import weight_files
from stages.text_to_image.images.folder import scan
from stages.text_to_image.imaging import masks
from stages.text_to_image.train.config import ValidationConfig
from stages.text_to_image.train.data import held_out
from stages.tuner.blockwise import device
from stages.tuner.step import TrainingStep
from tests import projects
from tests.pipeline.test_process import MEMORY, WATCHDOG

STEP = 4  # at which the GPU fails: checkpoints are at 2, 4 and 6
APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        "


CHAIN = ("images", "captions", "buckets", "latents", "embeddings", "train")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("unbroken") / "p", tiny_weights, images=2)
    projects.build(folder, *CHAIN)
    return folder


@pytest.mark.parametrize("message", [MEMORY, WATCHDOG], ids=["memory", "watchdog"])
def test_after_an_error_of_metal_the_same_command_ends_with_the_bits_of_an_unbroken_run(message, unbroken, tmp_path, monkeypatch):
    folder = projects.without(unbroken, tmp_path / "p", "train")
    real, steps = TrainingStep.step, []

    def step(self: TrainingStep, *given: Any, **more: Any) -> Any:
        steps.append(1)
        if len(steps) == STEP:
            raise RuntimeError(message)
        return real(self, *given, **more)

    with monkeypatch.context() as patch:
        patch.setenv("LATENTMILL_RESTARTED", "1")
        patch.setattr(TrainingStep, "step", step)
        repeated = message == MEMORY
        shown = projects.latentmill(folder, "run", "train", "--only", code=0 if repeated else 2)
    last = "it is computed once more, with MLX's cache freed" if repeated else "the same command goes on."
    assert "Traceback" not in shown and any(line.endswith(last) for line in shown.splitlines())
    projects.latentmill(folder, "run", "train", "--only")
    assert projects.artifacts(folder, "train") == projects.artifacts(unbroken, "train")
    assert projects.content(folder, "train") == projects.content(unbroken, "train")


def test_with_f_fullfsync_files_and_folders_are_flushed_by_it_and_the_chain_ends_the_same(unbroken, tmp_path, monkeypatch):
    flushed = []
    real = fcntl.fcntl

    def control(descriptor: int, command: int, *given: Any) -> Any:
        if command != 51:
            return real(descriptor, command, *given)
        flushed.append(descriptor)
        os.fsync(descriptor)
        return 0

    monkeypatch.setattr(disk.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(disk.fcntl, "fcntl", control)
    folder = projects.copied(unbroken, tmp_path / "p")
    projects.build(folder, *CHAIN)
    assert len(flushed) > 20
    assert projects.artifacts(folder, "train") == projects.artifacts(unbroken, "train")


def test_a_hostile_folder_passes_the_whole_chain_with_256_descriptors(tmp_path, tiny_weights):
    clean, hostile = (projects.make(tmp_path / name, tiny_weights, images=0) for name in ("clean", "hostile"))
    for folder in (clean, hostile):
        projects.edit(folder, "steps = 6", "steps = 2")
        projects.edit(folder, "width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1")
    for number, name in enumerate(("Bär", "Möwe", "Zoë", "cat")):
        projects.add_image(clean, f"{name}.png", number)
        forms = ("NFC", "NFD") if number % 2 else ("NFD", "NFC")
        for suffix, form in zip((".png", ".txt"), forms, strict=True):
            source = clean / "images" / f"{name}{suffix}"
            shutil.copy(source, hostile / "images" / f"{unicodedata.normalize(form, name)}{suffix}")
    for file in [*(hostile / "images").iterdir(), hostile / "project.toml"]:
        file.with_name(f"._{file.name}").write_bytes(APPLE_DOUBLE)
    (hostile / "images" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    projects.build(clean, *CHAIN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(int(each.name) for each in Path("/dev/fd").iterdir())  # by this process, which has run other tests
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 240, limits[1]))
    try:
        for name in Project(hostile).stage_names:
            projects.latentmill(hostile, "run", name, "--only")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for name in ("latents", "embeddings"):
        assert projects.content(hostile, name) == projects.content(clean, name), name
    assert projects.content(hostile, "train")["loss"] == projects.content(clean, "train")["loss"]


# Memory, names and side files

NFC = "Bär.png"
NFD = unicodedata.normalize("NFD", NFC)
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               {free}.
Pages active:                            400000.
Pages inactive:                          100000.
Pages speculative:                        10000.
Pages wired down:                        200000.
Pages purgeable:                           5000.
"""


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """Make this machine look like a Mac of so much memory, with so many free pages."""

    def pretend(gigabytes: int, free: int) -> None:
        program = tmp_path / "vm_stat"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{VM_STAT.format(free=free)}END\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(device, "physical_bytes", lambda: gigabytes * 2**30)
        info = {"max_recommended_working_set_size": int(0.84 * gigabytes * 2**30), "memory_size": gigabytes * 2**30}
        monkeypatch.setattr(mx, "device_info", lambda: info)
        device.free_bytes.cache_clear()

    yield pretend
    device.free_bytes.cache_clear()


PLENTY = 10_000_000  # pages


@pytest.mark.parametrize("gigabytes", [8, 16, 24, 32, 64, 128])
def test_on_every_mac_the_budget_leaves_6_gb_and_the_plan_refuses_only_what_exceeds_it_and_its_remedies_fit(
    gigabytes, mac, tmp_path, monkeypatch
):
    (tmp_path / "images").mkdir()
    projects.add_image(tmp_path, "a.png", 1)
    text = '[project]\nfamily = "klein-base-4b"\n[captions]\npreview_prompts = ["a fox"]\n[buckets]\nresolutions = [1024]\n'
    (tmp_path / "project.toml").write_text(text)
    mac(gigabytes, PLENTY)
    budget, memory = device.memory_budget(), gigabytes * 2**30
    assert budget == min(int(0.85 * int(0.84 * memory)), memory - 6_000_000_000) and device.memory_budget(3.5) == 3_500_000_000
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: int(1e15))
    lines, fits = projects.report(Project(tmp_path))
    refused = [line for line in lines if " needs about " in line]
    assert fits == (not refused) and fits == (gigabytes >= 16)
    assert f"{budget / 1e9:.3g} GB of memory to use" in lines[0]
    assert all(("would need" in line) or ("choose a smaller family" in line) for line in refused)


def test_a_mac_whose_memory_is_in_use_has_a_smaller_budget_and_without_vm_stat_that_of_its_memory(mac, tmp_path):
    mac(24, 500_000)
    assert device.memory_budget() == 16384 * (500_000 + 100_000 + 10_000 + 5_000)
    mac(64, 1)
    assert device.memory_budget() == 16384 * 115_001
    mac(4, PLENTY)
    assert device.memory_budget() == 1_000_000_000
    mac(32, PLENTY)
    (tmp_path / "vm_stat").write_text("#!/bin/sh\nexit 1\n")
    device.free_bytes.cache_clear()
    assert device.memory_budget() == int(0.85 * int(0.84 * 32 * 2**30))


def test_files_that_macos_writes_beside_others_are_no_weights_no_references_and_no_images(tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    digest = FileHashes(tmp_path / "hashes" / "a.json").component("x", tmp_path)
    for name in ("model.safetensors", "config.json", "model.safetensors.index.json"):
        (tmp_path / f"._{name}").write_bytes(APPLE_DOUBLE)
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    assert FileHashes(tmp_path / "hashes" / "b.json").component("x", tmp_path) == digest
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in ("._cat.png", "IMG_1.aae", ".DS_Store"):
        (pictures / name).write_bytes(APPLE_DOUBLE)
    (pictures / "cat.png").write_bytes(b"not opened")
    assert [row["path"] for row in scan(pictures).files] == ["cat.png"]


def test_a_mask_and_a_pattern_match_a_name_in_either_form_of_unicode(tmp_path):
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / NFD).write_bytes(b"")
    find = masks.mask_finder(tmp_path)
    assert find([NFC]) == f"masks/{NFD}"
    assert masks.which_are_masks([NFC, f"masks/{NFD}"]) == {f"masks/{NFD}"}
    assert held_out(ValidationConfig(paths=(NFC,)), {"a": [NFD], "b": ["cat.png"]}) == {"a"}
