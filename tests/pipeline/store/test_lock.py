"""One process holds a lock at a time, and a dead process holds none."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.store.disk import abandoned, atomic_write, delete
from pipeline.store.lock import lock_holder, locked

HOLD = """
import sys, time
from pathlib import Path
from pipeline.store.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_in_one_line_that_names_the_first_until_that_is_killed(tmp_path: Path):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=rf"being written by process {child.pid} on .*wait for it or stop it") as error:
                locked(path).__enter__()
            assert "\n" not in str(error.value)
            assert json.loads(path.read_text())["pid"] == child.pid
        finally:
            child.kill()
    with locked(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_who_looks_at_a_lock_never_makes_a_writer_fail(tmp_path: Path, monkeypatch):
    path, flock, tries = tmp_path / "lock", fcntl.flock, []

    def flock_while_somebody_looks(handle: int, operation: int) -> None:
        if not operation & fcntl.LOCK_EX or len(tries) % 3 == 2:
            flock(handle, operation)
            return
        tries.append(operation)
        with path.open() as looking:
            flock(looking, fcntl.LOCK_SH)  # as `lock_holder` does
            flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", flock_while_somebody_looks)
    for number in range(100):
        tries.clear()
        with locked(path):
            assert len(tries) == 2 and f"process {os.getpid()} " in lock_holder(path)
        assert lock_holder(path) == "", number


def test_a_write_goes_on_in_another_folder_when_a_cleaning_takes_its_new_one_for_abandoned(tmp_path: Path, monkeypatch):
    flock, cleaning = fcntl.flock, abandoned(tmp_path)
    taken: list[Path] = []

    def clean_first(handle: int, operation: int) -> None:
        if not taken:
            monkeypatch.setattr("fcntl.flock", flock)
            taken.append(next(cleaning))
        flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", clean_first)
    with atomic_write(tmp_path / "a.txt") as temporary:
        delete(taken[0])
        cleaning.close()
        temporary.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
