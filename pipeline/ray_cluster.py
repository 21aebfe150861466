"""A Ray cluster for the workers of a stage: the connection, what a worker takes of it, and how many workers it has room for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
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
REACH_SECONDS = 10.0  # for an answer of a cluster
LOOK_SECONDS = 0.5  # between two looks at whether the user asks to stop


@dataclass(frozen=True)
class Host:
    problem: str  # what is wrong there, or ""
    name: str = ""
    device: str = ""  # the GPU that MLX uses, such as "metal"; "" without one
    free_bytes: int = 0  # on the disk of temporary files


@contextmanager
def connected(settings: ProjectConfig) -> Iterator[None]:
    """Connect to, or start, the cluster of [project] `workers`. Raises ValueError if it cannot be reached."""
    address = settings.workers if settings.workers != "ray" else None
    check_reachable("project.workers", settings.workers)
    check_reachable("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster started here: the priority of a local run
    # Ray limits the threads of an actor to its CPUs, here one; a worker computes with as many as a local run.
    threads = {variable: os.environ.get(variable, str(os.cpu_count())) for variable in THREADS}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": threads}}
    # ray.init sets signal handlers of its own; those of the run come back below.
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


def check_reachable(name: str, address: str) -> None:
    """Raises ValueError if nothing answers at "HOST:PORT" or "ray://HOST:PORT"; other texts name no address and pass."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    # Ray itself would try for minutes.
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"{name}: cannot reach the Ray cluster {address}: {error}") from None


def worker_needs(peak: int | None) -> dict[str, float]:
    """Amounts by Ray's names. `peak`: bytes that a model needs; 0 if unknown, None without a model."""
    held = ray.cluster_resources()
    device = next((name for name in DEVICES if held.get(name)), None)
    if peak is None:
        return {"CPU": 1}
    if device:
        return {"CPU": 1, device: 1}
    return {"CPU": 1, "memory": peak} if peak else {"CPU": 1}


def actor_options(needs: Mapping[str, float]) -> dict[str, Any]:
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {names[name]: amount for name, amount in needs.items() if name in names}
    return own | {"resources": {name: amount for name, amount in needs.items() if name not in names}}


def room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(held.get(name, 0) // amount) for name, amount in needs.items()) for held in alive)


def worker_count(name: str, wanted: int, units: int, needs: Mapping[str, float], say: Callable[[str], None]) -> int:
    """Workers to start, at most one per unit. `wanted`: the user's limit, 0 for none. Raises ValueError if none fits."""
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
    return " and ".join(f"{amount / UNITS[name][0]:.3g} {UNITS[name][1]}" for name, amount in needs.items())


def check_hosts(hosts: Sequence[Host], shipped_bytes: int) -> None:
    """Raises ValueError if a worker has a problem, two share a GPU, or the files for a machine's workers exceed its disk."""
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
    """Results of calls on Ray workers, in the order of the calls; None once `stop()` is True."""
    waiting, looks = list(references), 0
    while waiting and not stop():
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_SECONDS)
        looks += 1
        if waiting and looks * LOOK_SECONDS == WAIT_SECONDS:
            say(f"waiting for the Ray cluster: {len(waiting)} of {len(references)} workers have no room yet")
    return None if waiting or stop() else list(ray.get(list(references)))
