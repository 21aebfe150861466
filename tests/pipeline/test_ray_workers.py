"""Stages computed by actors of a Ray cluster: the tables of a local run, whatever dies."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline.api import Project as Runs
from pipeline.project.project import Project
from stages.run import Report
from tests import projects
from tests.bench.cluster import STAND_IN
from tests.pipeline.test_work import artifacts
from tests.projects import without

ray = pytest.importorskip("ray", reason='needs Ray: pip install "latentmill[ray]"')
from pipeline import on_ray  # noqa: E402

STAGES = ("latents", "samples", "images", "embeddings", "scores")  # the first two write tensors, and artifacts
WORKERS = 3
MARK = "LATENTMILL_TEST_CLUSTER"
DIVIDED = ("--set", "project.workers=ray", "--set", f"project.worker_count={WORKERS}", "--set", "project.unit_rows=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("finished") / "project", tiny_weights, images=5)
    (folder / "references").mkdir()
    projects.draw(folder / "references" / "one.png", seed=90, size=(96, 96))
    projects.build(folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of this machine with a CPU for each worker. `latentmill` finds it by RAY_ADDRESS."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))  # its workers inherit the variable
        patch.setenv("RAY_worker_niceness", "0")  # else workers starve beside other programs
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": WORKERS, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", made.address)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MKL_NUM_THREADS", "1")
        yield made.address
    made.shutdown()


def assert_same_table(found: Path, expected: Path, name: str) -> None:
    clocks = [column for column in ("inode", "mtime_ns", "seconds") if column in projects.content(found, name).column_names]
    tables = [projects.content(folder, name).drop_columns(clocks) for folder in (found, expected)]
    assert tables[0] == tables[1]
    assert artifacts(found, name) == artifacts(expected, name)


def workers() -> list[int]:
    import psutil

    actors = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("ray::Worker")]
    found = []
    for process in actors:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process.pid] if process.environ().get(MARK) == str(os.getpid()) else []
    return found


@pytest.mark.slow
@pytest.mark.proof("three workers of a Ray cluster write the table of a local run bit for bit, of every stage")
def test_three_workers_write_the_table_of_a_local_run_bit_for_bit(finished, cluster, tmp_path, cases):
    for name in STAGES[: cases(2, len(STAGES))]:
        folder = without(finished, tmp_path / name / "project", name)
        said = projects.latentmill_process(folder, "run", name, "--only", *DIVIDED)
        assert f"{WORKERS} workers on Ray, 1 rows at a time" in said
        assert_same_table(folder, finished, name)
        assert "up to date" in projects.latentmill(folder, "run", name, "--only")


@pytest.mark.slow
@pytest.mark.proof("workers of a Ray cluster that are killed lose and double nothing")
def test_workers_that_are_killed_lose_and_double_nothing(finished, cluster, tmp_path, cases):
    left, generator = cases(2, 30), random.Random(3)
    while left > 0:
        folder = without(finished, tmp_path / f"{left}" / "project", "latents")
        process = projects.command(folder, "run", "latents", "--only", *DIVIDED)
        for _ in range(min(left, 3)):
            projects.wait_until(lambda: bool(workers()), process)
            if alive := workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(generator.choice(alive), signal.SIGKILL)
                    left -= 1
        out, err = process.communicate(timeout=projects.HANG)
        assert process.returncode == 0, (out, err)
        assert_same_table(folder, finished, "latents")
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.proof("a driver of a Ray cluster that is killed or interrupted is continued by the next run")
def test_a_driver_that_is_killed_or_interrupted_is_continued_by_the_next_run(cluster, tmp_path, cases):
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL))[: cases(1, 2)]:
        (tmp_path / str(code)).mkdir()
        end_a_driver(number, code, tmp_path / str(code))


def end_a_driver(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "project.toml").write_text(STAND_IN.format(workers=WORKERS, count=120, seconds=0.1))
    projects.edit(tmp_path, "unit_rows = 1", "unit_rows = 1\ncommit_seconds = 0.0")
    process = projects.command(tmp_path, "run", "waits", "--only")
    rows = Project(tmp_path).current("waits").folder / "rows.lance"
    projects.wait_until(lambda: len(list(rows.glob("_versions/*"))) > 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=projects.HANG)
    assert process.returncode == code and "Traceback" not in err, (out, err)
    if number == signal.SIGINT:
        assert "done and saved" in err and not workers(), "its workers have ended"
    said = projects.latentmill_process(tmp_path, "run", "waits", "--only")
    written = int(re.findall(r"(\d+) rows done, 120 in all", said)[0])
    assert 0 < written < 120
    assert projects.content(tmp_path, "waits")["number"].to_pylist() == list(range(120))


@pytest.mark.slow
def test_an_error_of_a_unit_is_the_error_of_the_run_and_the_other_rows_are_kept(finished, cluster, tmp_path):
    folder = without(finished, tmp_path / "project", "latents")
    projects.draw(folder / "images" / "picture3.png", seed=77, size=(200, 90))
    said = projects.latentmill_process(folder, "run", "latents", "--only", *DIVIDED, code=2)
    assert "1 image files changed since the table images was written (picture3.png): run images again" in said


def test_after_an_error_of_one_unit_what_other_workers_finish_is_kept_and_no_unit_begins(monkeypatch):
    made = iter([on_ray.Result(error=ValueError("one")), *(on_ray.Result([number]) for number in (2, 3, 4))])
    stopped: list[int] = []

    def worker(number: int) -> Any:
        return SimpleNamespace(
            compute=SimpleNamespace(remote=lambda *_: object()), stop=SimpleNamespace(remote=lambda: stopped.append(number))
        )

    unit = SimpleNamespace(pending=pa.table({"row": [1]}), stored=None)
    run: Any = SimpleNamespace(output=SimpleNamespace(pending=pa.table({"row": range(9)})), report=Report())
    monkeypatch.setattr(ray, "wait", lambda waiting, **_: (waiting[:1], waiting[1:]))
    monkeypatch.setattr(ray, "get", lambda reference: next(made))
    kept: list[Any] = []

    def collect() -> None:
        for item in on_ray.results([worker(0), worker(1)], iter([unit] * 9), run, lambda unit: []):
            kept.append(item)

    with pytest.raises(ValueError, match="one"):
        collect()
    assert kept == [2, 3, 4] and next(made, None) is None and stopped == [0, 1]


@pytest.mark.parametrize("value", ["rya", "ray:10001", "dask"])
def test_an_unknown_kind_of_workers_is_refused(value, finished):
    with pytest.raises(ValueError, match=f'project.workers must be "local", "ray" or "ray://HOST:PORT", got "{value}"'):
        Project(finished, {"project.workers": value})


@pytest.mark.slow
def test_a_worker_that_fails_as_it_starts_is_named_in_one_line(finished, cluster, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr("pipeline.on_ray.answers", fail)
    folder = without(finished, tmp_path / "project", "latents")
    with pytest.raises(ValueError, match="a worker failed as it started; is latentmill installed on every host"):
        Runs(folder, {"project.workers": "ray", "project.worker_count": 1, "project.unit_rows": 1}).run("latents")
