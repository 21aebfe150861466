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
    """What a worker says about its machine. `problem` says what is wrong there, or is "". `name` is the name of the
    machine. `device` identifies the GPU that MLX uses, such as "metal". It is "" without a GPU. `free_bytes` is the
    free space on the disk for temporary files.
    """

    problem: str
    name: str = ""
    device: str = ""
    free_bytes: int = 0


@contextmanager
def connected(settings: ProjectConfig) -> Iterator[None]:
    """Connect to a Ray cluster for the body of a `with` statement. The setting [project] `workers` is the address of
    the cluster, or "ray". For "ray", a cluster that runs on this machine is used. If there is none, one is started.
    Raises ValueError if the cluster cannot be reached.
    """
    address = settings.workers if settings.workers != "ray" else None
    check_reachable("project.workers", settings.workers)
    check_reachable("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster started here: the priority of a local run
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


def check_reachable(name: str, address: str) -> None:
    """Raise ValueError if nothing answers at the address of a Ray cluster. `name` says where the address comes from.
    `address` has the form "HOST:PORT" or "ray://HOST:PORT". Other texts name no address and are not checked. Ray itself
    would try for minutes.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"{name}: cannot reach the Ray cluster {address}: {error}") from None


def worker_needs(peak: int | None) -> dict[str, float]:
    """Return the resources of the cluster that one worker takes. The result maps Ray's names to amounts, such as
    {"CPU": 1, "GPU": 1}. `peak` is the memory in bytes that the worker's model needs. It is 0 if this is unknown, and
    None without a model.

    Every worker takes one CPU. A worker with a model also takes a whole GPU if the cluster has GPUs. Otherwise it takes
    its memory.
    """
    held = ray.cluster_resources()
    device = next((name for name in DEVICES if held.get(name)), None)
    if peak is None:
        return {"CPU": 1}
    if device:
        return {"CPU": 1, device: 1}
    return {"CPU": 1, "memory": peak} if peak else {"CPU": 1}


def actor_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Return the options with which Ray starts a worker, as a dict such as {"num_cpus": 1}. `needs` maps a resource to
    the amount that the worker takes, such as {"CPU": 1}.
    """
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {names[name]: amount for name, amount in needs.items() if name in names}
    return own | {"resources": {name: amount for name, amount in needs.items() if name not in names}}


def room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    """Return how many workers fit on a Ray cluster. `nodes` describes the machines of the cluster and is the result of
    `ray.nodes()`. `needs` maps a resource to the amount that each worker takes, such as {"CPU": 1}.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(held.get(name, 0) // amount) for name, amount in needs.items()) for held in alive)


def worker_count(name: str, wanted: int, units: int, needs: Mapping[str, float], say: Callable[[str], None]) -> int:
    """Return how many workers to start on the Ray cluster, at most one per work unit. `name` is the name of the stage.
    `wanted` is the user's limit, or 0 for none. `units` is the number of work units. `needs` maps a resource to the
    amount that each worker takes, such as {"CPU": 1}. If fewer than `wanted` workers fit, `say` is called with a line
    of text. Raises ValueError if no worker fits.
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
    """Return resources as text, such as "1 CPU and 2.1 GB of memory". `needs` maps Ray's name of a resource to an
    amount. Memory is in bytes.
    """
    return " and ".join(f"{amount / UNITS[name][0]:.3g} {UNITS[name][1]}" for name, amount in needs.items())


def check_hosts(hosts: Sequence[Host], shipped_bytes: int) -> None:
    """Check that the workers can work on their machines. `hosts` has what each worker says about its machine.
    `shipped_bytes` is the size of the files that are sent to each worker. Raises ValueError if a worker has a problem,
    or if two workers share a GPU. Raises ValueError if the disk of a machine is too small for the files.
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
    """Wait for calls on Ray workers and return their results, in the order of the calls. `references` are what Ray returned
    for the calls. `stop()` returns True once the user asks to stop; then the wait ends and the result is None. If workers
    wait for room on the cluster, `say` receives one line about it.
    """
    waiting, looks = list(references), 0
    while waiting and not stop():
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_SECONDS)
        looks += 1
        if waiting and looks * LOOK_SECONDS == WAIT_SECONDS:
            say(f"waiting for the Ray cluster: {len(waiting)} of {len(references)} workers have no room yet")
    return None if waiting or stop() else list(ray.get(list(references)))
