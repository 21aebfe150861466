"""What a worker takes of a Ray cluster: two models never share a device, and the user is told when there is no room."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

ray = pytest.importorskip("ray", reason='needs Ray: pip install "latentmill[ray]"')
from pipeline import on_ray  # noqa: E402
from pipeline.on_ray import (  # noqa: E402
    Host,
    Worker,
    check_hosts,
    check_reachable,
    has_model,
    room,
    start_workers,
    version,
    worker_count,
    worker_needs,
)
from pipeline.project.project import Project  # noqa: E402
from pipeline.ranks import free_ports  # noqa: E402
from stages.stage import WorkUnit  # noqa: E402

GPUS = {"CPU": 4, "GPU": 2, "memory": 3e9}
COMMON = WorkUnit("no.stage", None, pa.table({}), pa.table({}), {}, {}, Path(), Path(), {})


@pytest.fixture
def cluster() -> Iterator[None]:
    """Of this machine; it claims two GPUs and 3 GB of memory."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "num_gpus": 2, "memory": 3_000_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    ray.init(made.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_two_models_never_meet_on_one_device(cluster):
    lines: list[str] = []
    needs = worker_needs(2_000_000_000)
    assert needs == {"CPU": 1, "GPU": 1} and worker_needs(None) == {"CPU": 1}
    assert worker_count("latents", 0, 100, needs, lines.append) == 2 and not lines
    assert worker_count("latents", 3, 100, needs, lines.append) == 2
    assert lines == ["the Ray cluster has room for 2 workers, not for 3: each takes 1 CPU and 1 GPU"]
    workers = start_workers(3, needs, COMMON)
    seen = [worker.__ray_call__.remote(lambda worker: os.environ["CUDA_VISIBLE_DEVICES"]) for worker in workers]
    ready, waiting = ray.wait(seen, num_returns=2)
    assert sorted(ray.get(ready)) == ["0", "1"] and not ray.wait(waiting, timeout=2)[0], "the third waits"
    ray.kill(workers[seen.index(ready[0])])
    assert ray.get(waiting) == ray.get(ready[:1]), "until a device is free"
    for worker in workers:
        ray.kill(worker)
    assert room(ray.nodes(), {"CPU": 1, "memory": 2_000_000_000}) == 1, "a machine without GPUs holds what its memory holds"


def test_as_many_workers_fit_as_the_scarcest_resource_of_each_machine_allows():
    nodes = [{"Alive": alive, "Resources": GPUS} for alive in (True, True, False)]
    assert [room(nodes, needs) for needs in ({"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "memory": 2e9}, {"metal": 1})] == [
        8,
        4,
        2,
        0,
    ]


def test_a_cluster_without_room_for_one_worker_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(on_ray.ray, "nodes", lambda: [{"Alive": True, "Resources": GPUS}])
    with pytest.raises(ValueError) as raised:
        worker_count("latents", 0, 9, {"CPU": 1, "memory": 9_100_000_000}, print)
    assert str(raised.value) == (
        "latents: a worker needs 1 CPU and 9.1 GB of memory of one machine of the Ray cluster; "
        "its machines have 4 CPU and 3 GB of memory"
    )


def test_an_address_where_nothing_answers_is_refused_at_once_and_names_where_it_was_set():
    (port,) = free_ports(1)
    for name, address in (("project.workers", f"ray://127.0.0.1:{port}"), ("RAY_ADDRESS", f"127.0.0.1:{port}")):
        with pytest.raises(ValueError, match=f"{name}: cannot reach the Ray cluster {address}: "):
            check_reachable(name, address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
    check_reachable("project.workers", "ray")
    check_reachable("RAY_ADDRESS", "auto")


def test_a_stage_takes_a_gpu_only_if_it_computes_with_a_model(tmp_path):
    images, code = tmp_path / "images", tmp_path / "code"
    for folder, text in ((images, 'family = "tiny"'), (code, 'pipeline = "retrieval"')):
        folder.mkdir()
        (folder / "project.toml").write_text(f"[project]\n{text}\n")
    models = {name: has_model(Project(folder), name) for folder in (images, code) for name in Project(folder).stage_names}
    assert [name for name, takes in models.items() if takes] == [
        "latents",
        "embeddings",
        "drawings",
        "train",
        "samples",
        "scores",
        "vectors",
    ]
    assert has_model(Project(code, {"negatives.encoder": "base"}), "negatives")


def test_a_model_of_unknown_size_takes_no_memory_and_fits_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(on_ray.ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 3e9})
    assert worker_needs(0) == {"CPU": 1} and worker_needs(5) == {"CPU": 1, "memory": 5}
    assert room([{"Alive": True, "Resources": GPUS}], worker_needs(0)) == 4


def test_a_worker_with_another_version_or_without_a_folder_says_so(tmp_path):
    worker = Worker("worker", COMMON, None)
    assert worker.check("0.0.0", [], None).problem.startswith(f"has latentmill {version()}; install the same version")
    assert worker.check(version(), [tmp_path, tmp_path / "no"], None).problem.startswith(f"does not see {tmp_path / 'no'};")
    assert not worker.check(version(), [tmp_path], None).problem


@pytest.mark.parametrize(
    ("hosts", "shipped", "message"),
    [
        ([Host("", "a", "metal", 9), Host("", "b", "metal", 9)], 9, ""),
        ([Host("", "a", "", 9), Host("", "a", "", 9)], 4, ""),
        ([Host("", "a", "metal"), Host("", "a", "metal")], 0, "2 workers share the GPU metal of a; start Ray there with"),
        (
            [Host("", "a", "", 9), Host("", "a", "", 9)],
            5,
            "a has 9e-09 GB free for temporary files, and",
        ),
        ([Host("", "a"), Host("does not see /data; share it")], 0, "a worker does not see /data; share it"),
    ],
)
def test_the_machines_of_the_workers_are_checked_before_the_run(hosts, shipped, message):
    if not message:
        check_hosts(hosts, shipped)
        return
    with pytest.raises(ValueError, match=message):
        check_hosts(hosts, shipped)
