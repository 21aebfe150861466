"""Recipes: what changes them and what does not."""

import dataclasses
import os
from dataclasses import dataclass

import pyarrow as pa
import pytest

from pipeline.project import recipe as recipes
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
    inner: Inner = setting(Inner(), "a nested section")  # noqa: RUF009
    extra: Inner | None = setting(None, "a section that is absent")  # noqa: RUF009


def recipe_id(config: Section, **changed: object) -> str:
    """The id of the recipe of latents with this section, and with these weights, tensors or rows."""
    stage = PIPELINE.stage("latents")
    given = {"weights": {}, "tensors": {}, "rows": None} | changed
    return recipes.recipe_id(recipes.recipe(stage, config, **given))


def test_a_significant_setting_is_another_recipe_at_any_depth():
    plain = recipe_id(Section())
    assert recipe_id(Section(size=4)) != plain
    assert recipe_id(Section(inner=Inner(strength=2.0))) != plain
    assert recipe_id(Section(extra=Inner())) != plain


def test_the_code_version_and_the_columns_are_part_of_the_recipe():
    stage = PIPELINE.stage("latents")
    plain = recipes.recipe(stage, Section(), {}, {}, None)
    newer = recipes.recipe(dataclasses.replace(stage, version=stage.version + 1), Section(), {}, {}, None)
    assert recipes.recipe_id(plain) != recipes.recipe_id(newer)
    assert plain["columns"]["tensor"].startswith("list")


def test_a_snapshot_does_not_depend_on_the_order_of_rows():
    rows = pa.table({"key": ["a", "b", "c"], "value": [1, 2, None]})
    assert recipes.rows_sha256(rows) == recipes.rows_sha256(rows.take([2, 0, 1]))
    assert recipes.rows_sha256(rows) != recipes.rows_sha256(rows.slice(0, 2))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"one")
    (tmp_path / "weights" / "config.json").write_text("{}")
    return tmp_path / "weights"


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, folder, monkeypatch):
    hashes = recipes.FileHashes(tmp_path / "weights.json")
    first = hashes.component("autoencoder", folder)
    monkeypatch.setattr(recipes, "file_sha256", lambda path: pytest.fail(f"{path} was read"))
    assert recipes.FileHashes(tmp_path / "weights.json").component("autoencoder", folder) == first


def test_a_changed_weight_or_config_is_another_component(tmp_path, folder):
    hashes = recipes.FileHashes(tmp_path / "weights.json")
    first = hashes.component("autoencoder", folder)
    file = folder / "model.safetensors"
    file.write_bytes(b"two")
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    second = hashes.component("autoencoder", folder)
    (folder / "config.json").write_text("{ }")
    assert len({first, second, hashes.component("autoencoder", folder)}) == 3


def test_files_that_no_model_reads_do_not_count(tmp_path, folder):
    hashes = recipes.FileHashes(tmp_path / "weights.json")
    first = hashes.component("autoencoder", folder)
    (folder / "README.md").write_text("hello")
    assert hashes.component("autoencoder", folder) == first


def test_a_damaged_cache_costs_only_reading(tmp_path, folder):
    cache = tmp_path / "weights.json"
    first = recipes.FileHashes(cache).component("autoencoder", folder)
    cache.write_text("{ not json")
    assert recipes.FileHashes(cache).component("autoencoder", folder) == first


def test_a_cache_that_cannot_be_written_changes_no_hash(tmp_path, folder):
    (tmp_path / "a file").write_text("where a folder would be made")
    hashes = recipes.FileHashes(tmp_path / "a file" / "weights.json")
    assert hashes.component("vae", folder) == recipes.FileHashes(tmp_path / "weights.json").component("vae", folder)


def test_a_setting_that_was_added_later_renames_no_table_while_it_means_what_was_before():
    @dataclass(frozen=True)
    class Later(Section):
        bits: int | None = setting(None, "added later", unrecorded=(None, 16))

    assert recipe_id(Later()) == recipe_id(Later(bits=16)) == recipe_id(Section())
    assert recipe_id(Later(bits=4)) != recipe_id(Section())


def test_an_unrecorded_column_is_no_part_of_the_recipe():
    stage = PIPELINE.stage("images")
    recorded = recipes.recipe(stage, stage.config(), {}, {}, None)["columns"]
    added = {field.name for field in stage.writes.columns if field.metadata[b"unrecorded"]}
    assert added == {"folder", "use", "repeats", "weight", "trigger", "concept", "offset", "reference", "reference_of"}
    assert set(recorded) == set(stage.writes.batch.names) - added


def test_what_a_project_does_not_use_of_later_features_is_not_in_its_recipes():
    off = {"train": {"beneath", "allow_distilled", "passes"}, "samples": {"family", "weights", "beneath", "strength_for"}}
    for name, later in off.items():
        kind = PIPELINE.stage(name).config
        assert later <= {field.name for field in dataclasses.fields(kind)}
        assert not later & recipes.settings_of(kind()).keys()
    assert "lr_ratio" not in recipes.settings_of(PIPELINE.stage("train").config())["optimizer"]
