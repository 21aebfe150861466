"""`latentmill clean` deletes only what can be computed again; its dry run predicts what is deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from pipeline.commands.clean import clean
from pipeline.project.project import Project
from pipeline.store.table import Writer
from stages.text_to_image.weights import CONVERTED, load_transformer
from tests import projects


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("built") / "project", tiny_weights, images=3)
    projects.edit(folder, "steps = 6", "steps = 2")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train")
    return folder


@pytest.fixture
def project(built, tmp_path) -> Path:
    return projects.duplicate(built, tmp_path / "project")


def cleaned(folder: Path, *, runs: bool = False, dry_run: bool = False) -> list[str]:
    return list(clean(Project(folder), runs=runs, dry_run=dry_run))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "lock"}


def background(folder: Path, colour: str = "#000000") -> None:
    """Change a setting of latents, so that latents and the tables that depend on them get other recipes."""
    projects.edit(folder, "[train]", f'[latents]\nbackground = "{colour}"\n\n[train]')


def test_a_table_of_other_settings_is_kept_while_the_present_one_has_none(project):
    background(project)
    before = files(project)
    said = cleaned(project, runs=True)
    assert any(line.startswith("latents: 1 other configuration (") and " kept, because" in line for line in said)
    assert said[-1] == "freed 0 B"
    assert files(project) == before


def test_rows_that_settings_which_were_set_back_want_are_kept(project):
    projects.edit(project, "resolutions = [64, 96]", "resolutions = [64]")
    projects.build(project, "buckets", "latents")
    projects.edit(project, "resolutions = [64]", "resolutions = [64, 96]")
    said = cleaned(project)
    assert any(line.startswith("latents: 3 rows ") and "kept, because the table is not up to date" in line for line in said)
    projects.build(project, "buckets")
    cleaned(project)
    assert projects.planned(Project(project))["latents"].missing == 0
    projects.edit(project, "resolutions = [64, 96]", "resolutions = [64]")
    projects.build(project, "buckets", "latents")
    assert any(line.startswith("latents: 3 rows that are not used any more") for line in cleaned(project))


def test_a_trained_run_is_deleted_only_on_request_and_if_a_newer_one_exists_or_if_a_killed_clean_had_begun_to(project):
    (old,) = (project / "tables" / "train").iterdir()
    (latents,) = (project / "tables" / "latents").iterdir()
    background(project)
    projects.build(project, "latents")
    cleaned(project, runs=True)
    assert (old / "artifacts" / "adapter.safetensors").is_file() and not latents.exists()
    projects.build(project, "train")
    said = cleaned(project)
    assert any(line.startswith("train: 1 other configuration (") and "--runs" in line for line in said)
    assert old.is_dir()
    assert any(line.startswith(f"train: {old.name}, another configuration") for line in cleaned(project, runs=True))
    (new,) = (project / "tables" / "train").iterdir()
    (new / "manifest.json").unlink()
    hidden = new.rename(new.with_name(f".tmp-{new.name}"))  # what a killed clean had begun to delete
    assert cleaned(project, dry_run=True)[0].startswith(f"tables/train/{hidden.name}, left by a killed command")
    cleaned(project)
    assert not hidden.exists()


def test_a_dry_run_predicts_what_is_freed_and_changes_nothing_nor_does_clean_while_a_stage_writes(project):
    background(project)
    projects.build(project, "latents")
    for name in ("picture0", "picture1"):
        for suffix in (".png", ".txt"):
            (project / "images" / f"{name}{suffix}").unlink()
    projects.build(project, "images", "captions", "buckets", "latents", "embeddings")
    before, opened = files(project), Project(project)
    for dry_run in (True, False):
        with Writer(opened.current("images"), opened.recipe("images")), pytest.raises(ValueError, match="is being written by"):
            cleaned(project, dry_run=dry_run)
    predicted = cleaned(project, dry_run=True)
    assert files(project) == before
    said = cleaned(project)
    assert predicted[:-1] == said[:-1] and any("4 rows that are not used any more" in line for line in said)
    assert predicted[-1].removeprefix("would free").split()[0] != "0"
    assert amount(predicted[-1]) == pytest.approx(amount(said[-1]), rel=0.2)
    assert cleaned(project)[-1] == "freed 0 B"
    assert projects.content(project, "latents").num_rows == 2


def amount(line: str) -> float:
    number, unit = line.split()[-2:]
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


def test_a_converted_copy_that_no_setting_loads_is_deleted_and_the_present_one_stays(project):
    opened = Project(project)
    train, folder, path = opened.config.sections["train"], project / CONVERTED, opened.component("transformer")
    for bits in (16, 8):
        config = replace(train, base_bits=bits)
        load_transformer(path, opened.family, getattr(mx, train.precision), config, copies=folder, keep=True)
    copies = sorted(path.name for path in folder.iterdir())
    said = cleaned(project, dry_run=True)
    assert len(copies) == 4 and sorted(path.name for path in folder.iterdir()) == copies
    assert sum("which no present setting uses" in line for line in said) == 2
    assert amount(said[-1]) == amount(cleaned(project)[-1]) > 0
    assert len(list(folder.iterdir())) == 2 and cleaned(project) == ["freed 0 B"]
