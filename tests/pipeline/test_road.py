"""The road from the command line to the computation is short, and what is expensive is done once."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pipeline import cli
from pipeline.project import runs
from pipeline.project.project import Project
from pipeline.runner import run_words
from stages.stage import Stage
from stages.text_to_image import latents
from stages.tuner.step import TrainingStep
from tests import projects
from tests.toy.project import make as make_toy


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """A project whose tables before `train` are built. Tests train in it, with settings of their own."""
    folder = projects.make(tmp_path_factory.mktemp("road") / "project", tiny_weights, images=3)
    projects.build(folder, "images", "captions", "checks", "buckets", "latents", "embeddings")
    return folder


def frames() -> list[str]:
    """The functions between `cli.main` and the caller, both included, without those of click and contextlib."""
    names = []
    for each in inspect.stack()[2:]:
        if not any(part in each.filename for part in ("/click/", "contextlib.py", "functools.py")):
            names.append(f"{Path(each.filename).name}:{each.function}")
        if each.filename.endswith("pipeline/cli.py") and each.function == "main":
            return names[::-1]
    raise AssertionError("not called from cli.main")


class Leave(BaseException):
    """In place of the end of the process."""


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    def leave(code: int) -> None:
        assert code == 0
        raise Leave

    monkeypatch.setattr(cli.os, "_exit", leave)
    with pytest.raises(Leave):
        cli.main([*arguments, "--project", str(folder)])


@contextlib.contextmanager
def counted(name: str) -> Iterator[list[dict[str, Any]]]:
    """The arguments of each call of the functions of this name, in this thread."""
    calls: list[dict[str, Any]] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == name:
            calls.append(dict(frame.f_locals))

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_at_most_9_frames_lie_between_the_command_line_and_the_encoding_of_latents(built, monkeypatch):
    seen: list[list[str]] = []
    real = latents.STAGE.run

    def encode(run: Any) -> Any:
        seen.append(frames())
        yield from real(run)

    stage = Stage(**{**vars(latents.STAGE), "run": encode})
    monkeypatch.setattr(latents, "STAGE", stage)
    run(monkeypatch, built, "run", "latents", "--only", "--set", "latents.flip=true")
    assert seen and len(seen[0]) <= 9, seen


def test_at_most_12_frames_lie_between_the_command_line_and_a_training_step(built, monkeypatch):
    seen: list[list[str]] = []
    real = TrainingStep.step

    def step(self: TrainingStep, *given: Any, **named: Any) -> Any:
        seen.append(frames())
        return real(self, *given, **named)

    monkeypatch.setattr(TrainingStep, "step", step)
    run(monkeypatch, built, "run", "train", "--only", "--set", "train.steps=1")
    assert len(seen) == 1 and len(seen[0]) <= 12, seen


def test_a_training_run_loads_its_data_once_and_reads_at_most_8_manifests(built, monkeypatch):
    manifests: list[str] = []
    read = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self.name == "manifest.json":
            manifests.append(self.parent.parent.name)
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with counted("load_dataset") as calls:
        run(monkeypatch, built, "run", "train", "--only", "--set", "train.steps=2")
    assert len(calls) == 1 and len(manifests) <= 8, manifests


def test_files_are_listed_and_read_once_in_a_run(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    for stage_name, function in (("images", "scan"), ("captions", "caption_rows")):
        with counted(function) as calls:
            projects.build(folder, stage_name)
        assert len(calls) == 1


def test_scores_hash_each_preview_and_each_reference_once(built, tmp_path):
    folder = Path(shutil.copytree(built, tmp_path / "project", copy_function=shutil.copy2, symlinks=True))
    (folder / "references").mkdir()
    projects.draw(folder / "references" / "one.png", seed=90, size=(96, 96))
    projects.edit(folder, "steps = 6", "steps = 2")
    projects.edit(folder, "[train]", '[scores]\nreferences = "references"\n\n[train]')
    projects.build(folder, "images", "train", "samples")
    with counted("file_sha256") as calls:
        projects.build(folder, "scores")
    hashed = [str(call["file"]) for call in calls if str(call["file"]).startswith(str(folder))]
    assert len(hashed) == len(set(hashed)) == len(projects.content(folder, "samples")) + 1, hashed


def test_a_command_brings_the_tables_before_its_stage_up_to_date_until_one_fails_and_with_only_it_does_not(
    tmp_path, tiny_weights
):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    caption = folder / "images" / "picture1.txt"
    caption.rename(folder / "away")
    said = projects.latentmill(folder, "embeddings", code=2)
    assert said.count("error:") == 1 and not Project(folder).current("captions").exists
    (folder / "away").rename(caption)
    shutil.rmtree(folder / "tables")
    assert "make images" in projects.latentmill(folder, "buckets", "--only", code=2)
    projects.latentmill(folder, "buckets", "--set", "buckets.resolutions=[64]")
    assert len(projects.content(folder, "buckets", {"buckets.resolutions": [64]})) == 2
    assert Project(folder).current("checks").exists  # as under make
    projects.add_image(folder, "late.png", seed=9)
    said = projects.latentmill(folder, "run", "buckets", "--only")
    assert "images:" not in said and len(projects.content(folder, "images")) == 2
    projects.latentmill(folder, "run", "buckets")
    assert len(projects.content(folder, "images")) == 3 and len(projects.content(folder, "buckets")) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_chain_after_the_item_that_the_running_stage_computes(number, tmp_path):
    folder = make_toy(tmp_path)
    (folder / "texts" / "long.txt").write_text("\n".join(map(str, range(1000))))
    settings = ("--set", "lines.batch_size=1000", "--set", "tokens.batch_size=1")
    words = [sys.executable, "-m", "pipeline", "train", *settings, "--project", str(folder)]
    process = subprocess.Popen(words, cwd=projects.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    projects.wait_until(lambda: any(folder.glob("tables/tokens/*/rows.lance/_versions/*")), process)
    if number == signal.SIGINT:  # as Ctrl-C does, to all processes of the terminal
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=projects.HANG)
    assert process.returncode == 130, said
    assert "done and saved" in said and "Traceback" not in said and not Project(folder).current("train").exists


def test_a_chain_and_the_ranks_of_a_launch_keep_the_settings_and_the_chosen_run(built, monkeypatch):
    project = Project(built, ("train.steps=1", 'captions.template="{caption}, $x"'))
    assert run_words(project, "train", "--only")[3:] == [
        *("run", "train", "--only", "--project", str(built.resolve())),
        *("--set", "train.steps=1", "--set", 'captions.template="{caption}, $x"'),
    ]
    projects.latentmill(built, "train", "--only", "--name", "chosen", "--set", "train.steps=1", "--set", "train.batch_size=2")
    project = Project(built)
    runs.choose(project, "chosen")
    recipe = project.current("train").folder.name
    assert run_words(project, "train")[-2:] == ["--run", recipe]
    launched: list[list[str]] = []
    monkeypatch.setattr("pipeline.ranks.run_ranks", lambda words, *_: launched.append(words) or 0)
    projects.latentmill(built, "launch", "--ranks", "2", "--run", "chosen")
    assert launched[0][launched[0].index("--run") + 1] == recipe and "--only" in launched[0]
