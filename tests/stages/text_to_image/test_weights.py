"""Converted copies of a transformer: the same weights from one file, never a damaged or an outdated one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from stages.models import weights
from stages.text_to_image.families import family
from stages.text_to_image.sampler import Adapters, load_sampler
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.weights import load_transformer
from tests.checkpoints import weights_of

TINY = family("tiny")
CONFIG = TrainConfig(base_bits=4, base_bits_for={"*.attn.to_q": 16}, precision="float32")


@pytest.fixture
def published(tiny_weights: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_weights / "transformer", tmp_path / "published"))


def load(path: Path, folder: Path | None, config: TrainConfig = CONFIG) -> tuple[dict[str, Any], list[str]]:
    """(weights by name, the lines that the user sees)."""
    said: list[str] = []
    return weights_of(load_transformer(path, TINY, mx.float32, config, copies=folder, keep=True, say=said.append)), said


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def parts(weight: Any) -> list[mx.array]:
        return [weight] if isinstance(weight, mx.array) else list(weight)

    assert one.keys() == other.keys()
    return all(mx.array_equal(a, b) for name in one for a, b in zip(parts(one[name]), parts(other[name]), strict=True))


def test_a_second_load_and_drawing_with_the_same_settings_read_the_copy_alone_and_give_the_same_weights(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = load(published, None)
    first, said = load(published, tmp_path / "copies")
    assert len(said) == 1 and said[0].startswith("a converted copy of ")
    monkeypatch.setattr(weights, "load_component", lambda *given, **named: pytest.fail("published files were read"))
    second, said = load(published, tmp_path / "copies")
    assert not said and same(first, plain) and same(second, plain)
    config = SamplesConfig(base_bits=4, base_bits_for={"*.attn.to_q": 16}, precision="float32")
    sampler = load_sampler(Adapters("the base"), published, TINY, config, lambda: mx.zeros(0), copies=tmp_path / "copies")
    assert same(plain, weights_of(sampler.model))
    (copy,) = (tmp_path / "copies").glob("*.safetensors")
    assert copy.stat().st_size < 0.6 * sum(file.stat().st_size for file in published.glob("*.safetensors"))


def test_other_settings_and_replaced_files_have_copies_of_their_own(published: Path, tmp_path: Path) -> None:
    def copies() -> int:
        return len(list((tmp_path / "copies").glob("*.safetensors")))

    load(published, tmp_path / "copies")
    load(published, tmp_path / "copies", replace(CONFIG, base_bits=8))
    assert copies() == 2
    file = next(published.glob("*.safetensors"))
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1_000_000_000))
    load(published, tmp_path / "copies")
    assert copies() == 3


def test_a_damaged_copy_is_never_used_and_made_again(published: Path, tmp_path: Path) -> None:
    first, _ = load(published, tmp_path / "copies")
    (copy,) = (tmp_path / "copies").glob("*.safetensors")
    whole = copy.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:7], b"", b"\xff" * len(whole)):
        copy.write_bytes(damaged)
        second, said = load(published, tmp_path / "copies")
        assert said[0] == f"the converted copy {copy.name} is damaged and deleted; it is made again" and same(first, second)
        assert copy.read_bytes() == whole
    copy.write_bytes(whole[:-1])
    said = []  # drawing makes none
    model = load_transformer(published, TINY, mx.float32, CONFIG, copies=tmp_path / "copies", say=said.append)
    assert said == [f"the converted copy {copy.name} is damaged and deleted; the weights are read instead"]
    assert same(first, weights_of(model)) and not copy.exists()


def test_without_room_on_the_disk_the_run_goes_on_without_a_copy(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    _, said = load(published, tmp_path / "copies")
    assert len(said) == 1 and said[0].startswith("no converted copy is kept: it needs ")
    assert not list((tmp_path / "copies").iterdir())
