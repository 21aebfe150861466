"""Stages computed by actors of a Ray cluster: the tables of a local run, whatever dies, and from shipped files alone."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pytest

from pipeline.project.project import Project
from pipeline.ranks import free_ports
from stages.run import Report
from stages.stage import WorkUnit
from stages.text_to_image.families import family
from tests import projects
from tests.bench.cluster import STAND_IN
from tests.pipeline.test_work import CLOCKS
from tests.projects import without

ray = pytest.importorskip("ray", reason='needs Ray: pip install "latentmill[ray]"')
from pipeline import on_ray  # noqa: E402
from pipeline.on_ray import Host, Worker, check_hosts, has_model, room, version, worker_count, worker_needs  # noqa: E402

STAGES = ("latents", "samples", "images", "embeddings", "scores")  # the first two write tensors, and artifacts
WORKERS = 3
MARK = "LATENTMILL_TEST_CLUSTER"
ONE_ROW = ("--set", "project.unit_rows=1")
DIVIDED = ("--set", "project.workers=ray", "--set", f"project.worker_count={WORKERS}", *ONE_ROW)
START = "{ray} start --head --block --node-ip-address 127.0.0.1 --port {port} --ray-client-server-port {client} --num-cpus 4 \
--num-gpus {gpus} --memory 3000000000 --include-dashboard=false --disable-usage-stats --temp-dir {temp}"


class Cluster(NamedTuple):
    client: str  # the address of its server for clients
    hides: bool  # its processes see an empty folder in place of that of `hidden`


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of the cluster do not see."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def finished(hidden: Path) -> Path:
    """A project of five images with its weights."""
    tiny = family("tiny")
    tiny.architecture.write_random_weights(hidden / "weights", tiny, 0)
    folder = projects.make(hidden / "project", hidden / "weights", images=5)
    projects.edit(folder, "steps = 6\nrank = 2\ncheckpoint_every = 2", "steps = 2\nrank = 2\ncheckpoint_every = 1")
    (folder / "references").mkdir()
    projects.draw(folder / "references" / "one.png", seed=90, size=(96, 96))
    projects.build(folder)
    return folder


@pytest.fixture
def seen(finished: Path, tmp_path: Path) -> Path:
    """The same, where every worker sees it."""
    shutil.copytree(finished.parent / "weights", tmp_path / "weights")
    folder = Path(shutil.copytree(finished, tmp_path / "seen", copy_function=shutil.copy2, symlinks=True))
    projects.edit(folder, str(finished.parent), str(tmp_path))
    return folder


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[Cluster]:
    """A Ray cluster of this machine, which claims a GPU for each worker. `latentmill` finds it by RAY_ADDRESS."""
    namespace = ["unshare", "--mount", "--map-root-user"]
    hides = (
        bool(shutil.which("unshare")) and not subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode
    )
    temp = tempfile.mkdtemp(prefix="ray")  # a short path: Ray's sockets lie below it
    port, client = free_ports(2)
    start = START.format(ray=Path(sys.executable).with_name("ray"), port=port, client=client, gpus=WORKERS, temp=temp)
    words = [*namespace, "sh", "-c", f"mount -t tmpfs none {hidden} && exec {start}"] if hides else start.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))  # its workers inherit the variable
        patch.setenv("RAY_worker_niceness", "0")  # else workers starve beside other programs
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # also where a token of the user lies
        patch.setenv("PYTHONPATH", str(projects.ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MKL_NUM_THREADS", "1")
        head = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert head.stdout
        for line in head.stdout:
            if "block" in line:
                break
        began = time.monotonic()
        while True:  # the server for clients may begin later
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", client)):
                break
            assert head.poll() is None and time.monotonic() - began < projects.HANG, "the cluster does not answer"
            time.sleep(0.1)
        patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        yield Cluster(f"ray://127.0.0.1:{client}", hides)
    head.terminate()
    head.communicate(timeout=projects.HANG)
    shutil.rmtree(temp, ignore_errors=True)


def assert_same_table(found: Path, expected: Path, name: str) -> None:
    tables = [projects.content(folder, name) for folder in (found, expected)]
    tables = [table.drop_columns([column for column in CLOCKS if column in table.column_names]) for table in tables]
    assert tables[0] == tables[1]
    assert projects.artifacts(found, name) == projects.artifacts(expected, name)


def workers() -> list[int]:
    actors = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("ray::Worker")]
    found = []
    for process in actors:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process.pid] if process.environ().get(MARK) == str(os.getpid()) else []
    return found


@pytest.mark.slow
@pytest.mark.proof("three workers of a Ray cluster write the table of a local run bit for bit, of every stage")
def test_three_workers_write_the_table_of_a_local_run_bit_for_bit(seen, cluster, tmp_path, cases):
    for name in STAGES[: cases(2, len(STAGES))]:
        folder = without(seen, tmp_path / name / "project", name)
        said = projects.latentmill(folder, "run", name, "--only", *DIVIDED)
        assert f"{WORKERS} workers on Ray, 1 rows at a time" in said
        assert_same_table(folder, seen, name)
        assert "up to date" in projects.latentmill(folder, "run", name, "--only")


@pytest.mark.slow
@pytest.mark.proof("workers that see no file of a project write the tables of a local run from shipped bytes")
def test_workers_that_see_no_file_write_the_table_of_a_local_run(finished, cluster, cases):
    if not cluster.hides:
        pytest.skip("needs unshare, to hide files from the cluster")
    before = set(Path(tempfile.gettempdir()).glob("latentmill-*"))
    for name in STAGES[: cases(1, len(STAGES))]:
        folder = without(finished, finished.parent / name / "project", name)
        words = ("run", name, "--only", "--set", f"project.workers={cluster.client}", *ONE_ROW, "--set", "project.worker_count=2")
        if name == "latents":
            said = projects.latentmill(folder, *words, code=2)
            assert f"a worker does not see {folder}; share the folders by a network file system at the same path, or set" in said
        said = projects.latentmill(folder, *words, "--set", "project.worker_inputs=shipped")
        assert "2 workers on Ray, 1 rows at a time" in said
        assert_same_table(folder, finished, name)
    left = set(Path(tempfile.gettempdir()).glob("latentmill-*")) - before
    assert not [path for path in left if (path / "tmp").exists() or path.name.endswith(("-0", "-1"))]


@pytest.mark.slow
@pytest.mark.proof("workers of a Ray cluster that are killed lose and double nothing")
def test_workers_that_are_killed_lose_and_double_nothing(seen, cluster, tmp_path, cases):
    left, generator = cases(2, 30), random.Random(3)
    while left > 0:
        folder = without(seen, tmp_path / f"{left}" / "project", "latents")
        process = projects.command(folder, "run", "latents", "--only", *DIVIDED)
        for _ in range(min(left, 3)):
            projects.wait_until(lambda: bool(workers()), process)
            if alive := workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(generator.choice(alive), signal.SIGKILL)
                    left -= 1
        out, err = process.communicate(timeout=projects.HANG)
        assert process.returncode == 0, (out, err)
        assert_same_table(folder, seen, "latents")
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.proof("a driver of a Ray cluster that is killed or interrupted is continued by the next run")
def test_a_driver_that_is_killed_or_interrupted_is_continued_by_the_next_run(cluster, tmp_path, cases):
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL))[: cases(1, 2)]:
        folder = tmp_path / str(code)
        folder.mkdir()
        (folder / "project.toml").write_text(STAND_IN.format(workers=WORKERS, count=60, seconds=0.1))
        projects.edit(folder, "unit_rows = 1", "unit_rows = 1\ncommit_seconds = 0.0")
        process = projects.command(folder, "run", "waits", "--only")
        rows = Project(folder).current("waits").folder / "rows.lance"
        projects.wait_until(lambda rows=rows: len(list(rows.glob("_versions/*"))) > 3, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=projects.HANG)
        assert process.returncode == code and "Traceback" not in err, (out, err)
        if number == signal.SIGINT:
            assert "done and saved" in err and not workers(), "its workers have ended"
        said = projects.latentmill(folder, "run", "waits", "--only")
        written = int(re.findall(r"(\d+) rows done, 60 in all", said)[0])
        assert 0 < written < 60
        assert projects.content(folder, "waits")["number"].to_pylist() == list(range(60))


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
    with pytest.raises(ValueError, match="one"):
        kept.extend(on_ray.results([worker(0), worker(1)], iter([unit] * 9), run, lambda unit: []))
    assert kept == [2, 3, 4] and next(made, None) is None and stopped == [0, 1]


@pytest.mark.slow
def test_two_models_never_meet_on_one_device(cluster):
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    lines: list[str] = []
    needs = worker_needs(2_000_000_000)
    assert needs == {"CPU": 1, "GPU": 1} and worker_needs(None) == {"CPU": 1}
    assert worker_count("latents", 0, 100, needs, lines.append) == WORKERS and not lines
    assert worker_count("latents", 4, 100, needs, lines.append) == WORKERS
    assert lines == ["the Ray cluster has room for 3 workers, not for 4: each takes 1 CPU and 1 GPU"]
    common = WorkUnit("no.stage", None, pa.table({}), pa.table({}), {}, {}, Path(), Path(), {})
    started = on_ray.start_workers(4, needs, common)
    devices = [worker.__ray_call__.remote(lambda worker: os.environ["CUDA_VISIBLE_DEVICES"]) for worker in started]
    ready, waiting = ray.wait(devices, num_returns=WORKERS)
    assert sorted(ray.get(ready)) == ["0", "1", "2"] and not ray.wait(waiting, timeout=2)[0], "the fourth waits"
    ray.kill(started[devices.index(ready[0])])
    assert ray.get(waiting) == ray.get(ready[:1]), "until a device is free"
    for worker in started:
        ray.kill(worker)
    assert room(ray.nodes(), {"CPU": 1, "memory": 2_000_000_000}) == 1, "a machine without GPUs holds what its memory holds"
    ray.shutdown()


# What is checked before workers start


def test_a_model_of_unknown_size_takes_no_memory_and_without_room_for_one_worker_the_cluster_is_refused(monkeypatch):
    held = {"CPU": 4, "GPU": 2, "memory": 3e9}
    nodes = [{"Alive": alive, "Resources": held} for alive in (True, True, False)]
    assert [room(nodes, needs) for needs in ({"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "memory": 2e9})] == [8, 4, 2]
    assert room(nodes, {"metal": 1}) == 0
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 3e9})
    assert worker_needs(0) == {"CPU": 1} and worker_needs(5) == {"CPU": 1, "memory": 5}
    monkeypatch.setattr(ray, "nodes", lambda: nodes[1:])
    message = "latents: a worker needs 1 CPU and 9.1 GB of memory .* its machines have 4 CPU and 3 GB of memory$"
    with pytest.raises(ValueError, match=message):
        worker_count("latents", 0, 9, {"CPU": 1, "memory": 9_100_000_000}, print)


def test_a_stage_takes_a_gpu_only_if_it_computes_with_a_model(tmp_path):
    images, code = tmp_path / "images", tmp_path / "code"
    for folder, text in ((images, 'family = "tiny"'), (code, 'pipeline = "retrieval"')):
        folder.mkdir()
        (folder / "project.toml").write_text(f"[project]\n{text}\n")
    models = {name for folder in (images, code) for name in Project(folder).stage_names if has_model(Project(folder), name)}
    assert models == {"latents", "embeddings", "drawings", "train", "samples", "scores", "vectors"}
    assert has_model(Project(code, {"negatives.encoder": "base"}), "negatives")


def test_a_worker_of_another_version_is_named():
    worker = Worker("worker", WorkUnit("no.stage", None, pa.table({}), pa.table({}), {}, {}, Path(), Path(), {}), None)
    assert worker.check("0.0.0", [], None).problem.startswith(f"has latentmill {version()}; install the same version")
    assert not worker.check(version(), [Path()], None).problem


SMALL = [Host("", "a", "", 9), Host("", "a", "", 9)]


@pytest.mark.parametrize(
    ("hosts", "shipped", "message"),
    [
        ([Host("", "a", "metal", 9), Host("", "b", "metal", 9)], 9, ""),
        (SMALL, 4, ""),
        ([Host("", "a", "metal"), Host("", "a", "metal")], 0, "2 workers share the GPU metal of a; start Ray there with"),
        (SMALL, 5, "a has 9e-09 GB free for temporary files, and"),
        ([Host("", "a"), Host("does not see /data; share it")], 0, "a worker does not see /data; share it"),
    ],
)
def test_the_machines_of_the_workers_are_checked_before_the_run(hosts, shipped, message):
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_hosts(hosts, shipped)
