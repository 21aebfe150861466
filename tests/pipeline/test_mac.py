"""What is peculiar to Macs, simulated: memory, names, side files, descriptors."""

from __future__ import annotations

import os
import sys
import unicodedata

import mlx.core as mx
import pytest

from pipeline.project.recipe import FileHashes
from stages.models.weights import weight_files
from stages.text_to_image.images.folder import scan
from stages.text_to_image.imaging import masks
from stages.text_to_image.train.config import ValidationConfig
from stages.text_to_image.train.data import held_out
from stages.tuner.blockwise import device

NFC = "Bär.png"
NFD = unicodedata.normalize("NFD", NFC)
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               {free}.
Pages active:                            400000.
Pages inactive:                          100000.
Pages speculative:                        10000.
Pages throttled:                              0.
Pages wired down:                        200000.
Pages purgeable:                           5000.
"Translation faults":                1234567890.
"""


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """Make this machine look like a Mac of so much memory, with so many free pages."""

    def pretend(gigabytes: int, free: int, share: float = 0.84) -> None:
        program = tmp_path / "vm_stat"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{VM_STAT.format(free=free)}END\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(device, "physical_bytes", lambda: gigabytes * 2**30)
        info = {"max_recommended_working_set_size": int(share * gigabytes * 2**30), "memory_size": gigabytes * 2**30}
        monkeypatch.setattr(mx, "device_info", lambda: info)
        device.free_bytes.cache_clear()

    yield pretend
    device.free_bytes.cache_clear()


PLENTY = 10_000_000  # pages


@pytest.mark.parametrize("gigabytes", [8, 16, 24, 32, 64, 128])
def test_the_budget_of_a_mac_leaves_6_gb_and_a_share_of_the_working_set(gigabytes, mac):
    mac(gigabytes, PLENTY)
    budget, memory = device.memory_budget(), gigabytes * 2**30
    assert budget == min(int(0.85 * int(0.84 * memory)), memory - 6_000_000_000)
    assert device.memory_budget(3.5) == 3_500_000_000


def test_a_mac_whose_memory_is_in_use_has_a_smaller_budget_and_never_less_than_1_gb(mac):
    mac(24, 500_000)
    assert device.memory_budget() == 16384 * (500_000 + 100_000 + 10_000 + 5_000)
    mac(64, 1)
    assert device.memory_budget() == 16384 * 115_001
    mac(4, PLENTY)
    assert device.memory_budget() == 1_000_000_000


def test_without_vm_stat_the_budget_is_that_of_the_memory(mac, monkeypatch, tmp_path):
    mac(32, PLENTY)
    (tmp_path / "vm_stat").write_text("#!/bin/sh\nexit 1\n")
    device.free_bytes.cache_clear()
    assert device.memory_budget() == int(0.85 * int(0.84 * 32 * 2**30))


def test_files_that_macos_writes_beside_others_are_no_weights_no_references_and_no_images(tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    hashes = FileHashes(tmp_path / "hashes" / "a.json")
    digest = hashes.component("x", tmp_path)
    for name in ("model.safetensors", "config.json", "model.safetensors.index.json"):
        (tmp_path / f"._{name}").write_bytes(b"\0\5\x16\7")
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    assert FileHashes(tmp_path / "b.json").component("x", tmp_path) in (
        digest,
        FileHashes(tmp_path / "c.json").component("x", tmp_path),
    )
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in ("._cat.png", "IMG_1.aae", ".DS_Store"):
        (pictures / name).write_bytes(b"\0\5\x16\7")
    (pictures / "cat.png").write_bytes(b"not opened")
    assert [row["path"] for row in scan(pictures).files] == ["cat.png"]


def test_a_mask_and_a_pattern_match_a_name_in_either_form_of_unicode(tmp_path):
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / NFD).write_bytes(b"")
    find = masks.mask_finder(tmp_path)
    assert find([NFC]) == f"masks/{NFD}"
    assert masks.which_are_masks([NFC, f"masks/{NFD}"]) == {f"masks/{NFD}"}
    assert held_out(ValidationConfig(paths=(NFC,)), {"a": [NFD], "b": ["cat.png"]}) == {"a"}
