"""Without Ray, everything but Ray works, and nothing of it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import projects
from tests.toy.project import make as make_toy

RUN = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from pipeline import Project
project = Project(sys.argv[1], {"project.workers": sys.argv[2]})
try:
    project.run("lines")
except ValueError as error:
    print(error)
several = ("pipeline.ray_workers", "pipeline.ray_cluster", "pipeline.shipping", "pipeline.launcher", "mlx._distributed_utils")
print([name for name in sys.modules if name in several or name.startswith("ray.")])
"""


def run(folder: Path, workers: str) -> list[str]:
    words = [sys.executable, "-c", RUN, str(folder), workers]
    return subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def test_without_the_extra_nothing_of_it_is_imported(tmp_path: Path) -> None:
    assert run(make_toy(tmp_path / "project"), "local") == ["[]"]


def test_workers_on_ray_without_ray_are_refused_in_one_line(tmp_path: Path) -> None:
    line = 'project.workers = "ray" needs Ray; pip install "latentmill[ray]"'
    assert run(make_toy(tmp_path / "project"), "ray") == [line, "[]"]
