"""Training divided among processes equals training in one process: samples, losses and adapter, up to rounding."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import psutil
import pytest

from pipeline.project.project import Project
from pipeline.ranks import _wait, rank_environments, run_ranks, send_secret, ssh_names
from stages.tuner import checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.launched import SECRET, SECRET_FILE, launched_rank, secret
from stages.tuner.loop import check_ranks
from stages.tuner.ranks import Ranks, connect, decode, encode, merged
from tests import projects
from tests.pipeline.test_kill import FEATURES, prepared

RANKED = FEATURES.replace(
    "base_bits = 8\n", "batch_size = 2\nclip = 0.05\nlr = 1e-2\n\n[train.schedule]\nwarmup_steps = 2\n"
).replace("adamw8bit", "adamw")
STEPS = 6
CLOSE = 1e-5  # between losses and between adapters, in float32
DRAWN = ("step", "split", "sample", "epoch", "image_id", "latent_id", "caption_id", "sigma", "dropped", "lr")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "project"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.pipeline.test_kill.FEATURES", RANKED)
        prepared(folder, tiny_weights)
    projects.edit(folder, "steps = 8", f"steps = {STEPS}")
    return folder


@pytest.fixture(scope="module")
def alone(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = projects.duplicate(ready, tmp_path_factory.mktemp("alone") / "project")
    projects.latentmill(folder, "run", "train", "--only")
    return folder


def adapter(folder: Path, name: str = checkpoint.ADAPTER) -> dict[str, np.ndarray]:
    loaded = mx.load(str(Project(folder).current("train").folder / "artifacts" / name))
    return {key: np.array(value) for key, value in loaded.items()}


def assert_alike(ranked: Path, alone: Path) -> None:
    """The two runs drew the same samples, and their losses and adapters agree within CLOSE."""
    found, expected = (projects.content(folder, "train").to_pylist() for folder in (ranked, alone))
    assert [[row[name] for name in DRAWN] for row in found] == [[row[name] for name in DRAWN] for row in expected]
    for column in ("loss", "preservation", "grad_norm"):
        mine, theirs = ([np.nan if row[column] is None else row[column] for row in each] for each in (found, expected))
        np.testing.assert_allclose(mine, theirs, rtol=CLOSE, atol=CLOSE, equal_nan=True, err_msg=column)
    for name in (checkpoint.ADAPTER, checkpoint.EMA):
        mine, theirs = adapter(ranked, name), adapter(alone, name)
        assert mine.keys() == theirs.keys()
        for key in theirs:
            np.testing.assert_allclose(mine[key], theirs[key], atol=CLOSE, err_msg=key)


def stand_in_for_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program ssh that runs the command, its last word, here; the home folder is `folder`."""
    (folder / "ssh").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(folder))


@pytest.mark.slow
@pytest.mark.proof("two ranks train as one process does")
def test_two_ranks_of_two_machines_get_their_secret_over_ssh_and_train_as_one_process_does(
    ready, alone, tmp_path, monkeypatch, cases
):
    ranked = projects.duplicate(ready, tmp_path / "ranked" / "project")
    if (steps := cases(STEPS, 50)) != STEPS:
        alone = projects.duplicate(ready, tmp_path / "alone" / "project")
        for folder in (alone, ranked):
            projects.edit(folder, f"steps = {STEPS}", f"steps = {steps}")
        projects.latentmill(alone, "run", "train", "--only")
    words = ("--ranks", "2")
    if sys.platform == "linux":  # this machine has a second address
        stand_in_for_ssh(tmp_path, monkeypatch, 'for last; do :; done\nexec bash -c "$last"')
        words = ("--hosts", "127.0.0.1,127.0.0.2")
    said = projects.latentmill_process(ranked, "launch", *words)
    assert "2 ranks train together" in said and said.count("lora of rank") == 1, "rank 0 alone talks"
    assert_alike(ranked, alone)
    assert not list(tmp_path.glob(".latentmill-*"))


@pytest.mark.slow
@pytest.mark.proof("a run whose rank is killed ends at its last checkpoint and goes on alone")
def test_a_run_whose_rank_is_killed_ends_at_its_last_checkpoint_and_goes_on_alone(ready, alone, tmp_path, cases):
    for rank in (1, 0)[: cases(1, 2)]:
        ranked = projects.duplicate(ready, tmp_path / str(rank) / "project")
        artifacts = Project(ranked).current("train").folder / "artifacts"
        process = projects.command(
            ranked, "launch", "--ranks", "2", "--set", "train.checkpoint_every=2", "--set", "train.steps=4000"
        )
        projects.wait_until(lambda artifacts=artifacts: bool(checkpoint.find_checkpoints(artifacts)), process)
        (child,) = (each for each in psutil.Process(process.pid).children() if each.environ().get("MLX_RANK") == str(rank))
        child.kill()
        out, err = process.communicate(timeout=projects.HANG)
        assert process.returncode == 128 + signal.SIGKILL and "Traceback" not in err, (out, err)
        assert f"rank {rank} was ended by signal 9; the run ends at its last checkpoint. Run it again to go on." in err
        for saved in checkpoint.find_checkpoints(artifacts):
            shutil.rmtree(saved.folder) if saved.step > STEPS - 2 else None
        assert "the run began with 2 ranks and goes on with 1" in projects.latentmill(ranked, "run", "train", "--only")
        assert_alike(ranked, alone)


@pytest.mark.parametrize(
    ("codes", "code", "killed"),
    [((-9, 1), 137, 0), ((1, -9), 137, 1), ((0, -9), 137, 1), ((0, 0), 0, None), ((0, 2), 2, None), ((2, 1), 2, None)],
)
def test_a_killed_rank_is_named_though_every_rank_has_ended_and_else_the_first_exit_code_that_is_not_0_counts(
    codes, code, killed
):
    said: list[str] = []
    assert _wait([SimpleNamespace(poll=lambda each=each: each) for each in codes], said.append) == code
    assert [line.partition(" was ended by signal 9; ")[0] for line in said] == ([] if killed is None else [f"rank {killed}"])


def test_a_rank_that_cannot_start_ends_those_that_run(monkeypatch):
    started, real = list[subprocess.Popen[str]](), subprocess.Popen

    def start(*given, **settings):
        if started:
            raise OSError("no more processes")
        started.append(real(*given, **settings))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="no more processes"):
        run_ranks([sys.executable, "-c", "import time; time.sleep(600)"], [{}, {}], print)
    assert started[0].poll() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "2", "--set", "train.batch_size=3"), "batch_size must be a multiple of the number of ranks (2), got 3"),
        (("--ranks", "2", "--set", "train.data_parallel=4"), "data_parallel must be unset or the number of ranks (2), got 4"),
        (("latents", "--ranks", "2"), "latents: only a stage that trains divides its work among ranks"),
        ((), "launch needs --ranks, --hosts, --hostfile or the setting [train] data_parallel"),
        (("--hosts", "127.0.0.1,192.168.1.20"), "192.168.1.20: gradients travel between machines neither signed nor encrypted"),
    ],
)
def test_ranks_that_cannot_train_are_refused_in_one_line_before_one_starts(words, message, ready, monkeypatch):
    monkeypatch.setattr("pipeline.ranks.run_ranks", lambda *_: pytest.fail("a rank has started"))
    assert message in projects.latentmill(ready, "launch", *words, code=2)


@pytest.mark.parametrize("settings", [{"batch_size": 3}, {"data_parallel": 4}])
def test_ranks_that_mlx_launch_started_are_refused_too(settings):
    with pytest.raises(ValueError, match=r"the number of ranks \(2\)"):
        check_ranks(SimpleNamespace(), TrainingConfig(**settings), Ranks(0, 2))


def test_ranks_of_other_settings_or_tables_are_refused():
    run = SimpleNamespace(output=SimpleNamespace(provenance={"recipe": "one"}))
    with pytest.raises(ValueError, match=r"rank 1 has other settings, .* \(recipes other and one\)"):
        check_ranks(run, TrainingConfig(batch_size=2), SimpleNamespace(size=2, each=lambda recipe: [recipe, "other"]))


def test_a_process_that_was_started_alone_has_no_rank(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert launched_rank() is None
    monkeypatch.setenv("MLX_RANK", "1")
    assert launched_rank() is None, "mlx.launch starts one process so"
    (tmp_path / "hosts").write_text("")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    assert launched_rank() is None
    (tmp_path / "hosts").write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    assert launched_rank() == 1


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_shares_of_all_ranks_are_the_samples_of_the_step_each_once_and_equally_many(size):
    parts, sizes = [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]], [6, 6]  # two batches, divided by shape
    shares = [Ranks(rank, size).share(parts, sizes) for rank in range(size)]
    flat = [[sample for part in share for sample in part] for share in shares]
    assert {len(each) for each in flat} == {12 // size}
    assert sorted(itertools.chain(*flat)) == list(range(12))
    assert merged(flat, Ranks(0, size).owners(sizes)) == list(range(12))
    assert all(set(part) <= set(parts[n]) for share in shares for part in share for n in range(4) if part[0] in parts[n])


VALUES = {"a": [1, 0.1, None, float("inf"), "ü"], "array": np.float32([[0, 1, 2], [3, 4, 5]]), "number": np.float32(0.1)}


def test_ranks_exchange_plain_data_as_it_is():
    found = decode(encode(VALUES))
    assert found["a"] == VALUES["a"] and found["number"] == float(np.float32(0.1))
    np.testing.assert_array_equal(found["array"], VALUES["array"])
    assert found["array"].dtype == np.float32
    with pytest.raises(TypeError, match="plain data"):
        encode(object())


@pytest.mark.parametrize("forged", ["pickle", "unsigned", "other key", "earlier", "other place", "short"])
def test_a_message_that_this_run_did_not_sign_is_refused_unread(forged, monkeypatch):
    mine, other = Ranks(0, 2, key=b"k" * 32), Ranks(1, 2, key=b"k" * 32)
    sent: list[bytes] = []
    monkeypatch.setattr(Ranks, "_sent", lambda self, content, place, places: sent.append(content) or [content] * places)
    with contextlib.suppress(ValueError):
        other.each("good")
    (good,) = sent
    monkeypatch.setattr(Ranks, "_sent", lambda self, content, place, places: [content, message])
    message = good
    assert mine.each("mine") == ["mine", "good"]
    messages = {
        "pickle": pickle.dumps(VALUES),
        "unsigned": bytes(32) + good[32:],
        "other key": Ranks(1, 2, key=b"x" * 32)._signature(good[32:], 1, 1) + good[32:],
        "earlier": good,
        "other place": mine._signature(good[32:], 1, 0) + good[32:],
        "short": b"",
    }
    message = messages[forged]
    monkeypatch.setattr("stages.tuner.ranks.decode", lambda content: pytest.fail("read") if content == message[32:] else None)
    with pytest.raises(ValueError, match="a message of rank 1 is not signed by this run"):
        mine.each("mine")


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "0.0.0.0", "::ffff:8.8.8.8"])
def test_ranks_take_no_address_that_strangers_reach(address, tmp_path):
    file, own, other = tmp_path / "hosts.json", {"ssh": "a", "ips": ["192.168.1.20"]}, {"ssh": "b", "ips": [address]}
    for hosts, content in ((f"192.168.1.20,{address}", None), ("", {"hosts": [own, other]}), ("", [other])):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"ranks need addresses of your own network, .* got {address}$"):
            ssh_names(hosts, str(file), trusted_network=True)
    file.write_text('{"hosts": [["10.0.0.2"]]}')
    with pytest.raises(ValueError, match=r"hosts\.json: no file of hosts as mlx\.distributed_config writes it"):
        ssh_names("", str(file), trusted_network=True)


@pytest.mark.parametrize("address", ["10.0.0.2", "fe80::1", "second.local", ""])
def test_ranks_add_gradients_over_a_network_only_if_it_is_said_to_be_trusted(address, tmp_path):
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "second.local", "ips": [address] if address else []}]))
    other = address or "second.local"
    for hosts in (f"127.0.0.1,{other}", ""):
        with pytest.raises(
            ValueError, match=f"^{other}: gradients travel .* neither signed nor encrypted; .* --trusted-network$"
        ):
            ssh_names(hosts, str(file), trusted_network=False)
        assert ssh_names(hosts, str(file), trusted_network=True) == ["127.0.0.1", other if hosts else "second.local"]
    assert ssh_names("127.0.0.1,127.0.0.2,::1", "", trusted_network=False) == ["127.0.0.1", "127.0.0.2", "::1"]


def test_ranks_of_one_machine_open_no_socket_to_a_network(tmp_path):
    rank_environments(2, tmp_path / "hosts.json", None)
    assert all(each.startswith("127.0.0.1:") for (each,) in json.loads((tmp_path / "hosts.json").read_text()))
    for each in rank_environments(2, tmp_path / "none", ["0", "1"]):
        assert (each["NCCL_HOST_IP"], each["NCCL_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_the_secret_of_ranks_on_other_machines_is_in_no_argument_read_once_and_needed(monkeypatch, tmp_path):
    stand_in_for_ssh(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/said\nshift 3\nexec sh -c "$1"')
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv(SECRET_FILE, send_secret(["127.0.0.1", "second.local"]))
    monkeypatch.setenv("MLX_WORLD_SIZE", "2")
    found = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("MLX_RANK", rank)
        (file,) = tmp_path.glob(f".latentmill-ranks-*-{rank}")
        assert file.stat().st_mode & 0o077 == 0
        monkeypatch.setenv(SECRET_FILE, file.name.rpartition("-")[0])
        found |= {secret(), secret()}
        assert not file.exists() and os.environ[SECRET] in found
        monkeypatch.delenv(SECRET)
    with pytest.raises(ValueError, match="ranks need the variable LATENTMILL_RANKS_SECRET"):
        connect.__wrapped__()
    (text,) = found
    assert len(text) == 64 and text not in (tmp_path / "said").read_text()
    stand_in_for_ssh(tmp_path, monkeypatch, "exit 255")
    with pytest.raises(ValueError, match=r"second\.local: the secret of the run cannot be written there"):
        send_secret(["second.local"])
