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
several = ("pipeline.on_ray", "mlx._distributed_utils")
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


def test_a_stage_whose_files_cannot_be_sent_is_computed_by_the_starting_process(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in "ab":
        body = "".join(f"    {name}{line} = {line}\n" for line in range(9))
        (tmp_path / "code" / f"{name}.py").write_text(f'def {name}():\n    """Return a number."""\n{body}    return {name}0\n')
    lines = '[project]\npipeline = "retrieval"\nworkers = "ray://nowhere:1"\nworker_inputs = "shipped"\nunit_rows = 1\n'
    (tmp_path / "project.toml").write_text(lines)
    for name in ("sources", "units"):
        said = projects.latentmill(tmp_path, "run", name, "--only")
        assert "computed here, because its input files cannot be sent to workers" in said
    assert sorted(projects.content(tmp_path, "units")["name"].to_pylist()) == ["a", "b"]
