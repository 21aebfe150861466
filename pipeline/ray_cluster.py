"""A Ray cluster for the workers of a stage: the connection, what a worker takes of it, and how many workers it has room for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from pipeline.project.config import ProjectConfig

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEVICES = ("GPU", "metal")  # resources of a cluster that hold one model each; a Mac is given the second by `ray start`
UNITS = {"memory": (1e9, "GB of memory"), "CPU": (1, "CPU"), "GPU": (1, "GPU"), "metal": (1, "metal")}
WAIT_SECONDS = 10.0  # until the user is told that the cluster is busy


@dataclass(frozen=True)
class Host:
    """What a worker says about its machine. `problem` is a phrase about what is wrong, or "". `name` is the host's name.
    `device` identifies the GPU that MLX uses, or is "". `free_bytes` is the room in the folder of temporary files.
    """

    problem: str
    name: str = ""
    device: str = ""
    free_bytes: int = 0


@contextmanager
def connected(settings: ProjectConfig) -> Iterator[None]:
    """Return a context manager that connects to the cluster of [project] `workers`. A cluster of this machine is started if
    there is none. Raises ValueError if the cluster cannot be reached.
    """
    address = settings.workers if settings.workers != "ray" else None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    threads = {variable: os.environ.get(variable, str(os.cpu_count())) for variable in THREADS}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": threads}}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            ray.init(address or "auto", **quiet)
        except ConnectionAbortedError:  # the cluster's process for this program ended as it was forked: now and then in gRPC
            ray.init(address, **quiet)
        except ConnectionError:
            if address:
                raise
            count = max(settings.worker_count, os.cpu_count() or 1)
            ray.init("local", num_cpus=count, include_dashboard=False, **quiet)
    except (ConnectionError, TimeoutError, RuntimeError, ImportError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"project.workers: cannot reach the Ray cluster {address or ''}: {why}") from None
    finally:
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError):  # outside the main thread
                signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def worker_needs(peak: int | None) -> dict[str, float]:
    """Return the resources of the cluster that one worker takes, by Ray's names. `peak` is the memory that its model needs in
    bytes, 0 if that is not known, or None if it loads no model. A worker with a model takes a whole GPU where the cluster has
    GPUs, and its memory otherwise.
    """
    held = ray.cluster_resources()
    device = next((name for name in DEVICES if held.get(name)), None)
    if peak is None:
        return {"CPU": 1}
    if device:
        return {"CPU": 1, device: 1}
    return {"CPU": 1, "memory": peak} if peak else {"CPU": 1}


def actor_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a Ray actor that takes the resources `needs`."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {names[name]: amount for name, amount in needs.items() if name in names}
    return own | {"resources": {name: amount for name, amount in needs.items() if name not in names}}


def room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    """Return how many workers fit on the machines `nodes`, as `ray.nodes()` lists them, if each takes `needs`."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(held.get(name, 0) // amount) for name, amount in needs.items()) for held in alive)


def worker_count(name: str, wanted: int, units: int, needs: Mapping[str, float], say: Callable[[str], None]) -> int:
    """Return how many workers to start for a stage called `name`: at most `units`, `wanted` (0: no limit), and what the cluster
    has room for. Each takes `needs`. Raises ValueError if no machine has room for one.
    """
    nodes = ray.nodes()
    most = room(nodes, needs)
    if not most:
        held = [{each: node["Resources"].get(each, 0) for each in needs} for node in nodes if node["Alive"]]
        machines = "; ".join(map(described, held)) or "nothing"
        raise ValueError(
            f"{name}: a worker needs {described(needs)} of one machine of the Ray cluster; its machines have {machines}"
        )
    if wanted > most:
        say(f"the Ray cluster has room for {most} workers, not for {wanted}: each takes {described(needs)}")
    return min(wanted or most, most, units)


def described(needs: Mapping[str, float]) -> str:
    """Return resources as text, such as "1 CPU and 2.1 GB of memory"."""
    return " and ".join(f"{amount / UNITS[name][0]:.3g} {UNITS[name][1]}" for name, amount in needs.items())


def check_hosts(hosts: Sequence[Host], shipped_bytes: int) -> None:
    """Check what the workers say about their machines. `shipped_bytes` is the size of the files that each worker gets. Raises
    ValueError if a worker has a problem, if two of them share a GPU, or if their files do not fit.
    """
    problem = next((host.problem for host in hosts if host.problem), "")
    if problem:
        raise ValueError(f"project.workers: a worker {problem}")
    for (name, device), count in Counter((host.name, host.device) for host in hosts if host.device).items():
        if count > 1:
            raise ValueError(
                f"project.workers: {count} workers share the GPU {device} of {name}; start Ray there with --num-gpus, on a Mac "
                "with --resources '{\"metal\": 1}', or set project.worker_count"
            )
    for name, count in Counter(host.name for host in hosts).items():
        free = min(host.free_bytes for host in hosts if host.name == name)
        if count * shipped_bytes > free:
            raise ValueError(
                f"project.worker_inputs: {name} has {free / 1e9:.3g} GB free for temporary files, and its workers get "
                f"{count * shipped_bytes / 1e9:.3g} GB"
            )


def answers(references: Sequence[Any], stop: Callable[[], bool], say: Callable[[str], None]) -> list[Any] | None:
    """Return the results of Ray calls, in order. Return None if the user asks to stop. While the cluster is busy with other
    programs, a line says so.
    """
    _, waiting = ray.wait(list(references), num_returns=len(references), timeout=WAIT_SECONDS)
    if waiting:
        say(f"waiting for the Ray cluster: {len(waiting)} of {len(references)} workers have no room yet")
    while waiting and not stop():
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
    return None if waiting or stop() else list(ray.get(list(references)))
