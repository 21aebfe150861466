"""A Ray cluster that is reached by ray://, and that sees none of the files of the project."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.project.project import Project
from pipeline.ranks import free_ports
from tests import projects
from tests.pipeline.test_ray_workers import STAGES, assert_same_table
from tests.projects import without

pytest.importorskip("ray", reason='needs Ray: pip install "latentmill[ray]"')
HIDE = "mount -t tmpfs none {folder} && exec {ray} start --head --block --node-ip-address 127.0.0.1 --port {port} \
--ray-client-server-port {client} --num-cpus 2 --include-dashboard=false --disable-usage-stats --temp-dir {temp}"


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory, cases: Callable[[int, int], int]) -> Path:
    """A project of three images, finished as far as it is compared, with its weights, where the cluster does not see it."""
    from stages.text_to_image.families import family

    hidden, tiny = tmp_path_factory.mktemp("hidden"), family("tiny")
    tiny.architecture.write_random_weights(hidden / "weights", tiny, 0)
    folder = projects.make(hidden / "project", hidden / "weights", images=3)
    (folder / "references").mkdir()
    projects.draw(folder / "references" / "one.png", seed=90, size=(96, 96))
    upto = Project(folder).stage_names.index("latents") + 1
    projects.build(folder, *Project(folder).stage_names[: cases(upto, None)])
    return folder


@pytest.fixture
def address(finished: Path) -> Iterator[str]:
    """The address of a Ray cluster whose processes see an empty folder where the project lies."""
    namespace = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare, to hide files from the cluster")
    temp = tempfile.mkdtemp(prefix="ray")  # a short path: Ray's sockets lie below it
    port, client = free_ports(2)
    ray = Path(sys.executable).with_name("ray")
    words = HIDE.format(folder=finished.parent, ray=ray, port=port, client=client, temp=temp)
    environment = {
        "RAY_worker_niceness": "0",
        **os.environ,
        "PYTHONPATH": str(projects.ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    head = subprocess.Popen([*namespace, "sh", "-c", words], env=environment, stdout=subprocess.PIPE, text=True)
    assert head.stdout
    for line in head.stdout:
        if "block" in line:
            break
    began = time.monotonic()
    while True:  # the server for clients may begin later
        with suppress(OSError), socket.create_connection(("127.0.0.1", client)):
            break
        assert head.poll() is None and time.monotonic() - began < projects.HANG, "the cluster does not answer"
        time.sleep(0.1)
    yield f"ray://127.0.0.1:{client}"
    head.terminate()
    head.communicate(timeout=projects.HANG)
    shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.proof("workers that see no file of a project write the tables of a local run from shipped bytes")
def test_workers_that_see_no_file_write_the_table_of_a_local_run(finished, address, tmp_path, cases):
    before = set(Path(tempfile.gettempdir()).glob("latentmill-*"))
    for name in STAGES[: cases(1, len(STAGES))]:
        folder = without(finished, finished.parent / name / "project", name)
        words = ("--set", f"project.workers={address}", "--set", "project.unit_rows=1")
        if name == "latents":
            said = projects.latentmill_process(folder, "run", name, "--only", *words, code=2)
            assert f"a worker does not see {folder}; share the folders by a network file system at the same path, or set" in said
        said = projects.latentmill_process(folder, "run", name, "--only", *words, "--set", "project.worker_inputs=shipped")
        assert "2 workers on Ray, 1 rows at a time" in said
        assert_same_table(folder, finished, name)
    left = set(Path(tempfile.gettempdir()).glob("latentmill-*")) - before
    assert not [path for path in left if (path / "tmp").exists() or path.name.endswith(("-0", "-1"))]
