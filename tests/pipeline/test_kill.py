"""Every stage is killed again and again; in the end its table equals that of an unbroken run."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.project.project import Project
from tests import projects
from tests.pipeline.kill_loop import rebuild_under_kills
from tests.pipeline.killing import count_syncs

STAGE_NAMES = ("samples", "latents", "images", "captions", "buckets", "embeddings", "train")  # in `make test`, the first two


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_weights) -> tuple[Path, dict[str, int]]:
    """A finished project, and how often each stage called fsync when it ran in a new process."""
    folder = projects.make(tmp_path_factory.mktemp("unbroken") / "project", tiny_weights, images=5)
    return folder, {
        name: count_syncs(functools.partial(projects.latentmill, folder, "run", name, "--only"))
        for name in Project(folder).stage_names
        if name in STAGE_NAMES
    }


@pytest.mark.slow
@pytest.mark.proof("a stage that is killed ends where an unbroken run ends")
def test_a_stage_killed_before_any_fsync_ends_where_an_unbroken_run_ends(
    unbroken: tuple[Path, dict[str, int]], tmp_path: Path, cases: Callable[[int, int], int]
):
    reference, syncs = unbroken
    for stage_name in STAGE_NAMES[: cases(2, len(STAGE_NAMES))]:
        folder = projects.duplicate(reference, tmp_path / stage_name / "project")
        rebuild_under_kills(folder, stage_name, syncs[stage_name], cases(1, 20))
        found, expected = projects.content(folder, stage_name), projects.content(reference, stage_name)
        columns = [name for name in expected.column_names if name != "inode"]  # a copied file has another inode
        assert found.select(columns) == expected.select(columns)
        assert artifacts(folder, stage_name) == artifacts(reference, stage_name)


@pytest.mark.slow
@pytest.mark.proof("a stage that is killed ends where an unbroken run ends")
def test_drawings_killed_before_any_fsync_end_where_an_unbroken_run_ends(
    tiny_weights: Path, tmp_path: Path, cases: Callable[[int, int], int]
):
    folder = projects.make_slider(tmp_path / "project", tiny_weights)
    projects.latentmill(folder, "run", "embeddings")
    syncs = count_syncs(functools.partial(projects.latentmill, folder, "run", "drawings", "--only"))
    expected = projects.content(folder, "drawings")
    assert expected.num_rows == 2
    rebuild_under_kills(folder, "drawings", syncs, cases(1, 20))
    assert projects.content(folder, "drawings") == expected


def artifacts(folder: Path, stage_name: str) -> dict[str, bytes]:
    """The bytes of a stage's artifacts by name; empty for a checkpoint's copy of its rows, which holds clock times."""
    root = Project(folder).current(stage_name).folder / "artifacts"
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {str(p.relative_to(root)): p.read_bytes() if p.suffix in (".safetensors", ".png") else b"" for p in files}
