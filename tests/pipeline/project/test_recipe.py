"""Recipes: what changes them and what does not."""

import dataclasses
import json
import os
from dataclasses import dataclass

import pyarrow as pa
import pytest

from pipeline.project import recipe as fingerprint
from stages.settings import runtime, selects, setting
from stages.text_to_image import PIPELINE


@dataclass(frozen=True)
class Inner:
    strength: float = setting(1.0, "changes rows")
    workers: int = runtime(1, "changes none")


@dataclass(frozen=True)
class Section:
    size: int = setting(3, "changes rows")
    steps: int = selects(10, "chooses rows")
    batch: int = runtime(1, "changes none")
    inner: Inner = setting(Inner(), "a section in it")  # noqa: RUF009
    extra: Inner | None = setting(None, "a feature that is off")  # noqa: RUF009


def recipe(config: Section, **changed: object) -> str:
    stage = PIPELINE.stage("latents")
    given = {"weights": {}, "tensors": {}, "rows": None} | changed
    return fingerprint.short(fingerprint.recipe(stage, config, **given))


def test_a_significant_setting_is_another_recipe_at_any_depth():
    plain = recipe(Section())
    assert recipe(Section(size=4)) != plain
    assert recipe(Section(inner=Inner(strength=2.0))) != plain
    assert recipe(Section(extra=Inner())) != plain


def test_a_setting_that_chooses_rows_or_only_runs_is_the_same_recipe():
    assert recipe(Section()) == recipe(Section(steps=99, batch=8, inner=Inner(workers=7)))


def test_the_code_version_and_the_columns_are_part_of_the_recipe():
    stage = PIPELINE.stage("latents")
    plain = fingerprint.recipe(stage, Section(), {}, {}, None)
    newer = fingerprint.recipe(dataclasses.replace(stage, version=stage.version + 1), Section(), {}, {}, None)
    assert fingerprint.short(plain) != fingerprint.short(newer)
    assert plain["columns"]["tensor"].startswith("list")


def test_weights_tensors_and_snapshot_are_part_of_the_recipe():
    plain = recipe(Section())
    assert recipe(Section(), weights={"autoencoder": {"sha256": "a"}}) != plain
    assert recipe(Section(), tensors={"latents": "a"}) != plain
    assert recipe(Section(), rows=pa.table({"key": ["a"]})) != plain


def test_a_recipe_is_plain_text_that_reads_back_equal():
    made = fingerprint.recipe(PIPELINE.stage("buckets"), Section(), {}, {}, pa.table({"key": ["a", "b"]}))
    assert json.loads(json.dumps(made)) == made


def test_a_snapshot_does_not_depend_on_the_order_of_rows():
    rows = pa.table({"key": ["a", "b", "c"], "value": [1, 2, None]})
    assert fingerprint.digest_of_rows(rows) == fingerprint.digest_of_rows(rows.take([2, 0, 1]))
    assert fingerprint.digest_of_rows(rows) != fingerprint.digest_of_rows(rows.slice(0, 2))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"one")
    (tmp_path / "weights" / "config.json").write_text("{}")
    return tmp_path / "weights"


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, folder, monkeypatch):
    hashes = fingerprint.FileHashes(tmp_path / "weights.json")
    first = hashes.component("autoencoder", folder)
    monkeypatch.setattr(fingerprint, "file_sha256", lambda path: pytest.fail(f"{path} was read"))
    assert fingerprint.FileHashes(tmp_path / "weights.json").component("autoencoder", folder) == first


def test_a_changed_weight_or_config_is_another_component(tmp_path, folder):
    hashes = fingerprint.FileHashes(tmp_path / "weights.json")
    first = hashes.component("autoencoder", folder)
    file = folder / "model.safetensors"
    file.write_bytes(b"two")
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    second = hashes.component("autoencoder", folder)
    (folder / "config.json").write_text("{ }")
    assert len({first, second, hashes.component("autoencoder", folder)}) == 3


def test_files_that_say_nothing_of_the_weights_do_not_count(tmp_path, folder):
    hashes = fingerprint.FileHashes(tmp_path / "weights.json")
    first = hashes.component("autoencoder", folder)
    (folder / "README.md").write_text("hello")
    assert hashes.component("autoencoder", folder) == first


def test_a_lost_memory_costs_only_reading(tmp_path, folder):
    memory = tmp_path / "weights.json"
    first = fingerprint.FileHashes(memory).component("autoencoder", folder)
    memory.write_text("{ not json")
    assert fingerprint.FileHashes(memory).component("autoencoder", folder) == first


def test_a_project_that_may_only_be_read_is_read(tmp_path, folder):
    (tmp_path / "a file").write_text("where a folder would be made")
    hashes = fingerprint.FileHashes(tmp_path / "a file" / "weights.json")
    assert hashes.component("vae", folder) == fingerprint.FileHashes(tmp_path / "weights.json").component("vae", folder)
