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


def recipe_id(config: Section) -> str:
    """The id of the recipe of latents with this section."""
    return recipes.recipe_id(recipes.recipe(PIPELINE.stage("latents"), config, weights={}, tensors={}, rows=None))


def test_a_significant_setting_at_any_depth_the_code_version_and_the_columns_are_part_of_the_recipe():
    changed = (Section(), Section(size=4), Section(inner=Inner(strength=2.0)), Section(extra=Inner()))
    assert len({recipe_id(each) for each in changed}) == len(changed)
    stage = PIPELINE.stage("latents")
    plain = recipes.recipe(stage, Section(), {}, {}, None)
    newer = recipes.recipe(dataclasses.replace(stage, version=stage.version + 1), Section(), {}, {}, None)
    assert recipes.recipe_id(plain) != recipes.recipe_id(newer)
    assert plain["columns"]["tensor"].startswith("list")


def test_a_snapshot_does_not_depend_on_the_order_of_rows():
    rows = pa.table({"key": ["a", "b", "c"], "value": [1, 2, None]})
    assert recipes.rows_sha256(rows) == recipes.rows_sha256(rows.take([2, 0, 1]))
    assert recipes.rows_sha256(rows) != recipes.rows_sha256(rows.slice(0, 2))


def test_a_component_is_named_by_its_weights_and_config_which_are_read_again_only_if_they_changed(tmp_path, monkeypatch):
    def component(cache="weights.json"):
        return recipes.FileHashes(tmp_path / cache).component("autoencoder", folder)

    folder = tmp_path / "weights"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(b"one")
    (folder / "config.json").write_text("{}")
    first = component()
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "file_sha256", lambda path: pytest.fail(f"{path} was read"))
        assert component() == first
    (folder / "README.md").write_text("no model reads it")
    (tmp_path / "weights.json").write_text("{ not json")  # a damaged cache costs only reading
    assert component() == first == component("weights.json/cannot be written")
    file.write_bytes(b"two")
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    second = component()
    (folder / "config.json").write_text("{ }")
    assert len({first, second, component()}) == 3


def test_a_setting_that_was_added_later_renames_no_table_while_it_means_what_was_before():
    @dataclass(frozen=True)
    class Later(Section):
        bits: int | None = setting(None, "added later", unrecorded=(None, 16))

    assert recipe_id(Later()) == recipe_id(Later(bits=16)) == recipe_id(Section())
    assert recipe_id(Later(bits=4)) != recipe_id(Section())


def test_what_a_project_does_not_use_of_later_columns_and_features_is_not_in_its_recipes():
    stage = PIPELINE.stage("images")
    recorded = recipes.recipe(stage, stage.config(), {}, {}, None)["columns"]
    added = {"folder", "use", "repeats", "weight", "trigger", "concept", "offset", "reference", "reference_of"}
    assert set(recorded) == set(stage.writes.batch.names) - added
    off = {"train": {"beneath", "allow_distilled", "passes"}, "samples": {"family", "weights", "beneath", "strength_for"}}
    for name, later in off.items():
        kind = PIPELINE.stage(name).config
        assert later <= {field.name for field in dataclasses.fields(kind)}
        assert not later & recipes.settings_of(kind()).keys()
    assert "lr_ratio" not in recipes.settings_of(PIPELINE.stage("train").config())["optimizer"]
