"""Data-parallel training: the ranks of a run as processes of one machine, all ended when one fails, and what ranks over 0 run."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from pipeline.process import strangers_reach
from pipeline.project import runs
from pipeline.project.project import Project
from pipeline.project.recipe import recipe_id
from stages.stage import Stage
from stages.tuner.launched import HOSTS, RANK, SECRET, SIZE
from stages.untrusted import read_json

LOCALHOST = "127.0.0.1"
GRACE_SECONDS = 20.0  # after a rank failed, until the others are killed: over NCCL they wait for it forever
POLL_SECONDS = 0.05  # between two looks at the processes


def visible_gpus(count: int) -> Sequence[str] | None:
    """Ids of the first `count` CUDA devices that this process may use; None without CUDA. ValueError if there are fewer."""
    import mlx.core as mx

    if not mx.cuda.is_available():
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = listed.split(",") if listed else [str(number) for number in range(mx.device_count(mx.gpu))]
    if len(ids) < count:
        raise ValueError(f"launch --ranks {count}: there are {len(ids)} GPUs; a rank needs one of its own")
    return ids[:count]


def rank_environments(count: int, hosts_file: Path, cuda: Sequence[str] | None) -> list[dict[str, str]]:
    """Variables of each rank. NCCL on the devices `cuda`; if None, local sockets, whose addresses `hosts_file` gets as JSON."""
    secret = {SECRET: secrets.token_hex(32)}
    if cuda is None:
        hosts_file.write_text(json.dumps([[f"{LOCALHOST}:{port}"] for port in free_ports(count)]))
        return [{RANK: str(rank), HOSTS: str(hosts_file), **secret} for rank in range(count)]
    here = {"NCCL_HOST_IP": LOCALHOST, "NCCL_PORT": str(free_ports(1)[0]), "NCCL_SOCKET_IFNAME": "lo"}
    shared = {**secret, **here, SIZE: str(count), "NCCL_NVLS_ENABLE": "0"}
    return [{RANK: str(rank), "CUDA_VISIBLE_DEVICES": cuda[rank], **shared} for rank in range(count)]


def ssh_names(hosts: str, hostfile: str, trusted_network: bool) -> list[str]:
    """The machine of each rank, as ssh is given it. Raises ValueError for a public address, or one of a network not trusted."""
    if hosts:
        names, addresses = hosts.split(","), hosts.split(",")
    else:
        found = read_json(Path(hostfile))
        try:
            listed = found["hosts"] if isinstance(found, dict) else found
            names = [str(each["ssh"]) for each in listed]
            addresses = [str(each) for host in listed for each in host.get("ips") or [host["ssh"]]]
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"--hostfile {hostfile}: no file of hosts as mlx.distributed_config writes it") from None
    if public := [each for each in addresses if strangers_reach(each)]:
        raise ValueError(f"ranks need addresses of your own network, such as 192.168.1.20 or those of a VPN, got {public[0]}")
    if not trusted_network and (others := [each for each in addresses if not _of_this_machine(each)]):
        raise ValueError(
            f"{others[0]}: gradients travel between machines neither signed nor encrypted; connect the machines by a cable "
            "of their own or a VPN such as WireGuard, give those addresses, and add --trusted-network"
        )
    return names


def _of_this_machine(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def send_secret(names: Sequence[str]) -> str:
    """Write a new secret into a file in the home of each rank, which no other user can read. Returns its name without the rank.

    As an argument of mlx.launch, all users of these machines could read it.
    """
    name, secret = f".latentmill-ranks-{secrets.token_hex(8)}", secrets.token_hex(32)
    for rank, host in enumerate(names):
        command = f"umask 077; cat > ~/{name}-{rank}"
        words = ["sh", "-c", command] if host == LOCALHOST else ["ssh", "-T", "--", host, command]
        if subprocess.run(words, input=secret, text=True).returncode:
            raise ValueError(f"{host}: the secret of the run cannot be written there; does `ssh {host}` work?")
    return name


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        # All are bound at the same time, so that the ports differ.
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [each.getsockname()[1] for each in sockets]


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], say: Callable[[str], None]) -> int:
    """Run `command` once per rank, rank 0 on this terminal. Returns 0, or the exit code of a rank that failed."""
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
        # Rank 0 decides what becomes of a signal; the others ignore it (`follow`).
        signal.signal(signal.SIGTERM, lambda number, frame: processes[0].send_signal(signal.SIGINT))
        return _wait(processes, say)
    finally:
        # After GRACE_SECONDS, if one failed. What they wrote is complete: files appear by rename.
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
    """0, or the exit code of a failed rank: 128 + the signal if one ended a rank, else that of the lowest failed rank."""
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


def follow(project: Project, stage: Stage) -> None:
    """Compute this rank's share; rank 0 writes the results and reports. Raises ValueError if `stage` does not train."""
    if not runs.trains(stage.writes):
        raise ValueError(f"{stage.name}: only a stage that trains divides its work among ranks; run it without `launch`")
    # Ctrl-C reaches every rank of a terminal. Rank 0 decides what becomes of it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        provenance = {"recipe": recipe_id(project.recipe(stage.name))}
        run = project.open(stage.name, artifacts=Path(folder), provenance=provenance)
        for _ in stage.run(run):
            pass
