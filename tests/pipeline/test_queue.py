"""Jobs of a queue run one after another, outlive whoever added them, and are neither lost nor run twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from pipeline.queue import FILE, Job, Queue
from pipeline.store.lock import locked
from tests import projects
from tests.toy.project import make


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(projects.ROOT))
    return Queue(make(tmp_path / "project"))


def wait(condition, what: str) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < projects.HANG, what
        time.sleep(0.02)


def marks(queue: Queue) -> list[str]:
    file = queue.project / "marks"
    return file.read_text().splitlines() if file.exists() else []


def states(queue: Queue) -> dict[int, str]:
    return {job.number: job.state for job in queue.jobs()}


def is_idle(queue: Queue) -> bool:
    return not queue.works() and all(job.over for job in queue.jobs())


def held(queue: Queue, name: str) -> tuple[Job, Path]:
    """A job that waits for a file, once it runs."""
    file = queue.project / f"{name}.go"
    job = queue.add(["mark", name, "--until", str(file)])
    begun(queue, name)
    return job, file


def begun(queue: Queue, name: str) -> None:
    wait(lambda: f"{name} begins" in marks(queue) and running(queue).pid > 0, "it begins, and its process is known")


def running(queue: Queue) -> Job:
    return next((job for job in queue.jobs() if job.state == "running"), Job(0, ()))


def workers(queue: Queue) -> int:
    """The worker's process, which wrote its id into the lock."""
    return int(json.loads((queue.folder / "worker").read_text())["pid"])


def test_a_job_that_is_cancelled_while_it_begins_does_not_run_on(queue, monkeypatch):
    queue.pause()
    job = queue.add(["mark", "a", "--until", str(queue.project / "never")])
    popen = subprocess.Popen

    def begin(*words, **given):
        queue.cancel(job.number)
        return popen(*words, **given)

    monkeypatch.setattr(subprocess, "Popen", begin)
    with locked(queue.folder / "worker"):
        queue._run(job, ())
    assert states(queue) == {job.number: "cancelled"}


@pytest.mark.parametrize("code", [130, 143, -signal.SIGTERM])
def test_a_stop_that_comes_while_a_stage_begins_is_no_failure(queue, code):
    queue.pause()
    number = queue.add(["mark", "a"]).number
    queue.end(number, code)
    assert states(queue) == {number: "stopped"} and "killed" not in queue.jobs()[0].said


def test_jobs_run_one_after_another_in_their_order_not_while_paused_and_a_stopped_one_makes_room(queue):
    queue.pause()
    first = queue.add(["mark", "a", "--until", str(queue.project / "never")])
    assert not queue.works() and states(queue) == {first.number: "waiting"}
    for words in (("queue", "log", "1", "-p", str(queue.project)), ("queue", f"--project={queue.project}", "log", "1")):
        assert projects.said(*words)[0] == 0
    queue.pause(False)
    begun(queue, "a")
    others = [queue.add(["mark", name]).number for name in "bcd"]
    queue.move(others[2], 0)
    queue.cancel(others[1])
    assert states(queue) == {first.number: "running", others[2]: "waiting", others[0]: "waiting", others[1]: "cancelled"}
    queue.cancel(first.number)
    wait(lambda: is_idle(queue), "the rest runs")
    assert marks(queue) == ["a begins", "a stops", "d begins", "d ends", "b begins", "b ends"]
    assert states(queue) == {first.number: "stopped", others[2]: "finished", others[0]: "finished", others[1]: "cancelled"}
    assert [job.said for job in queue.jobs() if job.state == "finished"] == ["d is marked", "b is marked"]
    with pytest.raises(ValueError, match=f"job {others[0]} is finished"):
        queue.cancel(others[0])


def test_a_job_of_a_killed_worker_runs_on_alone_and_ends_by_itself(queue):
    job, file = held(queue, "a")
    queue.add(["mark", "b"])
    worker = psutil.Process(workers(queue))
    worker.kill()
    worker.wait(projects.HANG)
    assert queue.works(), "the job still holds the lock"
    queue.start()  # starts nobody
    assert running(queue).number == job.number
    file.touch()
    wait(lambda: states(queue)[job.number] == "finished" and not queue.works(), "it ends")
    assert marks(queue) == ["a begins", "a ends"]
    queue.start()
    wait(lambda: is_idle(queue), "the next one runs")
    assert marks(queue)[2:] == ["b begins", "b ends"]


def test_after_the_machine_was_off_the_interrupted_job_goes_on_first_and_only_if_the_user_says_so(queue):
    _, file = held(queue, "a")
    queue.add(["mark", "b"])
    os.kill(workers(queue), signal.SIGKILL)
    os.kill(running(queue).pid, signal.SIGKILL)
    wait(lambda: not queue.works(), "both are gone")
    assert "interrupted" in projects.said("queue", "-p", str(queue.project))[1]
    file.touch()
    assert projects.said("queue", "-p", str(queue.project), "start")[0] == 0
    wait(lambda: is_idle(queue), "the rest runs")
    assert marks(queue) == ["a begins", "a begins", "a ends", "b begins", "b ends"]
    assert [job.starts for job in queue.jobs()] == [2, 1]


def test_the_queues_of_two_projects_use_the_device_in_turns_and_after_a_killed_job_the_next_one_begins(queue, tmp_path):
    held(queue, "a")
    queue.add(["mark", "c"])
    other = Queue(make(tmp_path / "other"))
    job = other.add(["mark", "b"])
    wait(other.works, "its worker waits")
    assert states(other)[job.number] == "waiting" and not marks(other)
    os.kill(running(queue).pid, signal.SIGKILL)
    wait(lambda: is_idle(queue) and is_idle(other), "both end")
    assert [(each.state, each.said) for each in queue.jobs()] == [("failed", "killed by signal 9"), ("finished", "c is marked")]
    assert marks(other) == ["b begins", "b ends"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"jobs": 3}',
        '{"jobs": [{"number": "1", "words": ["train"]}], "paused": false, "last": 1}',
        '{"jobs": [{"number": 1, "words": ["train"], "state": "lost"}], "paused": false, "last": 1}',
        *(
            json.dumps({"jobs": [{"number": 1, "words": words}], "paused": False, "last": 1})
            for words in (["view"], ["mark", "--project=/elsewhere"], [], ["mark", "a\0"], ["--help"])  # which `add` refuses
        ),
    ],
)
def test_a_file_that_was_damaged_or_edited_wrongly_is_one_line_and_stays(queue, text):
    queue.folder.mkdir()
    (queue.folder / FILE).write_text(text)
    for words in ([], ["add", "longest"], ["start"]):
        code, _, error = projects.said("queue", "-p", str(queue.project), *words)
        assert code == 2 and error.count("\n") == 1 and FILE in error and "delete it" in error, error
    with pytest.raises(ValueError, match="delete it"):
        queue.work()
    assert (queue.folder / FILE).read_text() == text and not marks(queue)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nonsense"], "no command"),
        (["view"], "cannot be queued"),
        (["train", "-p", "x"], "leave --project out"),
        (["mark", "a" * 3000], "2000 characters"),
    ],
)
def test_what_cannot_be_a_job_is_refused_before_it_is_one(queue, words, reason):
    code, _, error = projects.said("queue", "-p", str(queue.project), "add", *words)
    assert code == 2 and reason in error
    assert not queue.jobs()


# It keeps two jobs in the queue, as the page's server adds them, and says each that it has added.
SERVER = """
import sys, time, pathlib
from pipeline.queue import Queue
queue, number, said = Queue(pathlib.Path(sys.argv[1])), int(sys.argv[2]), open(sys.argv[3], "a", buffering=1)
while True:
    if sum(not job.over for job in queue.jobs()) < 2:
        queue.add(["mark", str(number)])
        print(number, file=said)
        number += 1
    time.sleep(0.02)
"""


@pytest.mark.proof("killed at random, one or all at once, server, worker and jobs lose no job and run none twice")
def test_no_job_is_lost_or_run_twice_whatever_is_killed(queue, cases, tmp_path):
    chance, said = random.Random(0), tmp_path / "said"
    said.touch()
    starts: dict[str, int] = {}
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(cases(6, 200)):
            starts |= {job.words[1]: job.starts for job in queue.jobs()}  # of jobs that are forgotten later too
            if not servers or servers[-1].poll() is not None:
                following = max(map(int, [*starts, *said.read_text().split()]), default=-1) + 1
                words = [sys.executable, "-c", SERVER, str(queue.project), str(following), str(said)]
                servers.append(subprocess.Popen(words, cwd=projects.ROOT))
            queue.start()
            wait(lambda: queue.works() or servers[-1].poll() is not None, "a worker begins")
            time.sleep(chance.random() * 0.8)  # at any moment of an addition, a start, a job or an end
            which = chance.choice(["server", "worker", "job", "all"])
            pids, job = [servers[-1].pid] if which in ("server", "all") else [], running(queue)
            if which in ("worker", "all"):
                with suppress(ValueError):  # it has the lock, but has not written its number yet
                    pids.append(workers(queue))
            pids += [job.pid] if which in ("job", "all") and job.pid else []
            for pid in pids:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
            if which in ("server", "all"):
                servers[-1].wait()
    finally:
        for server in servers:
            server.kill()
            server.wait()
    while not is_idle(queue):
        queue.start()
        time.sleep(0.05)
    jobs, lines = queue.jobs(), marks(queue)
    starts |= {job.words[1]: job.starts for job in jobs}
    assert set(said.read_text().split()) <= set(starts), "what was said to be added is there"
    assert len(jobs) == min(len(starts), 100) and {job.state for job in jobs} <= {"finished", "failed"}
    for number in map(int, starts):
        begins, ends = lines.count(f"{number} begins"), lines.count(f"{number} ends")
        job = next((job for job in jobs if job.words[1] == str(number)), None)
        assert begins <= starts[str(number)], "it begins as often as it was started"
        assert ends <= 1 or begins == ends, "run again only if its end could not be told"
        assert job is None or job.state == "failed" or ends >= 1
    for one, two in pairwise(lines):
        if one.endswith("begins") and one.split()[0] != two.split()[0]:
            assert two.endswith("begins"), "two jobs never run at once"
