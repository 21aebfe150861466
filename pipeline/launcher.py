"""Starts the ranks of a data-parallel run on one machine, as processes, and ends all of them when one fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from stages.tuner.ranks import HOSTS, RANK, SIZE

LOCALHOST = "127.0.0.1"
GRACE_SECONDS = 20.0  # after a rank failed, until the others are killed: over NCCL they wait for it forever
POLL_SECONDS = 0.05  # between two looks at the processes


def visible_gpus(count: int) -> Sequence[str] | None:
    """Return the ids of the first `count` CUDA devices that this process may use. Return None without CUDA. Raises ValueError
    if there are fewer.
    """
    import mlx.core as mx

    if not mx.cuda.is_available():
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = listed.split(",") if listed else [str(number) for number in range(mx.device_count(mx.gpu))]
    if len(ids) < count:
        raise ValueError(f"launch --ranks {count}: there are {len(ids)} GPUs; a rank needs one of its own")
    return ids[:count]


def rank_environments(count: int, hosts_file: Path, cuda: Sequence[str] | None) -> list[dict[str, str]]:
    """Return the environment variables for a training run with `count` ranks on this machine. A rank is one of the
    processes that train together. The result has one dict per rank: variable -> text. If `cuda` is a list of GPU ids,
    one per rank, the ranks use NCCL. If `cuda` is None, they use local sockets. Only in this case, `hosts_file` is
    written, with the sockets' addresses as JSON.
    """
    if cuda is None:
        hosts_file.write_text(json.dumps([[f"{LOCALHOST}:{port}"] for port in free_ports(count)]))
        return [{RANK: str(rank), HOSTS: str(hosts_file)} for rank in range(count)]
    shared = {SIZE: str(count), "NCCL_HOST_IP": LOCALHOST, "NCCL_PORT": str(free_ports(1)[0]), "NCCL_NVLS_ENABLE": "0"}
    return [{RANK: str(rank), "CUDA_VISIBLE_DEVICES": cuda[rank], **shared} for rank in range(count)]


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports of this machine that no program uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [each.getsockname()[1] for each in sockets]


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], say: Callable[[str], None]) -> int:
    """Run `command` once for each rank, and wait for all of them. Return 0 if all ranks succeed, else the exit code of
    a rank that failed. A rank is one of the processes that train together. `environments` has one dict of environment
    variables per rank. Rank 0 uses the terminal of this process. The standard output of the other ranks is discarded.
    Each line of their standard error is passed to `say`, with the rank in front: "rank 1: out of memory".

    If a rank fails, the others have `GRACE_SECONDS` to end by themselves. Then they are killed. Whatever they wrote is
    complete, because files appear by rename. If a signal ended a rank, `say` is also called with one line about this.
    """
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    before, ended = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        for rank, variables in enumerate(environments):
            environment = {**os.environ, **variables}
            if rank == 0:
                processes.append(subprocess.Popen(command, env=environment, text=True))
                continue
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, env=environment, text=True, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE)
            processes.append(process)
            readers.append(threading.Thread(target=_pass_on, args=(process.stderr, rank, say), daemon=True))
            readers[-1].start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the ranks too
        signal.signal(signal.SIGTERM, lambda number, frame: processes[0].send_signal(signal.SIGINT))
        return _wait(processes, say)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, ended)


def _pass_on(lines: IO[str], rank: int, say: Callable[[str], None]) -> None:
    for line in lines:
        say(f"rank {rank}: {line.rstrip()}")


def _wait(processes: Sequence[subprocess.Popen[str]], say: Callable[[str], None]) -> int:
    """Wait until all ranks (training processes) have ended. Return 0 if no rank failed, else the exit code of a rank
    that failed. After the first failure, the wait lasts at most `GRACE_SECONDS` longer, even if other ranks still run.
    `processes` holds the ranks in the order of their numbers. `say` is called with one line for the user if a signal
    ended a rank.

    If a signal ended a rank, the result is 128 plus the number of the signal, such as 137 for signal 9. If ranks failed
    only in other ways, the result is the exit code of the one with the lowest number. Ranks that still run at the end
    are not ended by this function.
    """
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    failures = [(code, rank) for rank, process in enumerate(processes) if (code := process.poll())]
    killed = [(code, rank) for code, rank in failures if code < 0]
    code, rank = (killed or failures or [(0, 0)])[0]
    if code < 0:
        say(f"rank {rank} was ended by signal {-code}; the run ends at its last checkpoint. Run it again to go on.")
    return code if code >= 0 else 128 - code  # as a shell does
