"""The queue of a project: commands that run one after another, each as a process that outlives whoever added it.

PROJECT/queue/jobs.json holds the jobs; it is replaced as a whole under the lock beside it. A worker process takes one job
after another. It and the running job share one open file that is locked, so the lock ends with the last of the two: no second
worker begins while a job of a killed worker still runs. A second lock in the user's cache folder lets the queues of all projects
use the device in turns. A job that was killed with its worker is "interrupted": a worker runs it again, as stages go on where
they ended.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from pipeline.process import own_command
from pipeline.store.disk import atomic_write, open_own
from pipeline.store.lock import PATIENCE, Busy, is_locked, locked
from pipeline.terminal import PROGRESS

FILE = "jobs.json"
JOB = "LATENTMILL_JOB"  # environment variable of a job: its number and the project
# Exit codes of a stop, also of one that came while a stage began, before it could answer
STOPPED = (130, 128 + signal.SIGTERM, -signal.SIGTERM)
KEPT = 100  # ended jobs
LONGEST = 2000  # characters of a job's words
LOOK_SECONDS = 0.2  # between two attempts to get the device
State = Literal["waiting", "running", "interrupted", "finished", "stopped", "failed", "cancelled"]
ENDED = ("finished", "stopped", "failed", "cancelled")
# Commands that do not end by themselves, or that a queue would have to answer questions for.
NEVER = ("queue", "view", "mcp", "init", "launch")


@dataclass(frozen=True)
class Job:
    number: int
    words: tuple[str, ...]  # of `latentmill`, without --project
    folder: str = ""  # where its relative paths begin
    state: State = "waiting"
    added: str = ""  # ISO 8601, with the zone, as the next two
    began: str = ""
    ended: str = ""
    starts: int = 0  # more than 1 if it was killed with its worker
    pid: int = 0  # of the process, while it runs
    said: str = ""  # its last line

    @property
    def over(self) -> bool:
        return self.state in ENDED


class Queue:
    """Raises ValueError where the file was damaged, or a job is not in a state for what is asked."""

    def __init__(self, project: Path) -> None:
        self.project = Path(project)
        self.folder = self.project / "queue"

    def jobs(self) -> list[Job]:
        """In the order in which they run; a job that nobody works on any more is "interrupted"."""
        found: list[Job] = _read(self.folder / FILE)["jobs"]
        # Looked at only if needed; a job that ends between the two looks is read again.
        if any(job.state == "running" for job in found) and not self.works():
            found = _read(self.folder / FILE)["jobs"]
            return [dataclasses.replace(job, state="interrupted") if job.state == "running" else job for job in found]
        return found

    def works(self) -> bool:
        """Whether a worker, or a job of one, is alive."""
        return is_locked(self.folder / "worker")

    @property
    def paused(self) -> bool:
        return bool(_read(self.folder / FILE)["paused"])

    def _log(self, name: str) -> BinaryIO:
        return os.fdopen(open_own(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")

    def add(self, words: Sequence[str]) -> Job:
        """Append a command and start a worker, unless the queue is paused."""
        _check_words(words)
        now = _now()
        with self._changing() as content:
            number = max((job.number for job in content["jobs"]), default=content["last"]) + 1
            job = Job(number, tuple(words), str(Path.cwd()), added=now)
            content["jobs"].append(job)
            content["last"] = number
        self.start()
        return job

    def cancel(self, number: int) -> None:
        """A waiting job; one that runs is stopped: it keeps what it has."""
        with self._changing() as content:
            job = _job(content, number)
            if job.over:
                raise ValueError(f"job {number} is {job.state}")
            if not (job.state == "running" and job.pid and self.works()):  # without a pid it begins just now, see `_run`
                _replace(content, dataclasses.replace(job, state="cancelled", ended=_now()))
            else:
                with suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGTERM)

    def move(self, number: int, place: int) -> None:
        """Give a waiting job the place `place`, from 0, among those that wait."""
        with self._changing() as content:
            job = _job(content, number)
            if job.state != "waiting":
                raise ValueError(f"job {number} is {job.state}: only a waiting job can be moved")
            waiting = [each for each in content["jobs"] if each.state == "waiting" and each.number != number]
            waiting.insert(max(0, place), job)
            content["jobs"] = [each for each in content["jobs"] if each.state != "waiting"] + waiting

    def pause(self, paused: bool = True) -> None:
        """The running job goes on, and no other begins, until `pause(False)`."""
        with self._changing() as content:
            content["paused"] = paused
        if not paused:
            self.start()

    def start(self) -> None:
        """Start a worker if there is a job to run and nobody works."""
        if self.paused or not any(job.state in ("waiting", "interrupted") for job in self.jobs()) or self.works():
            return
        self.folder.mkdir(exist_ok=True)
        words = [*own_command("pipeline.queue"), str(self.project.resolve())]
        with self._log("worker") as log:
            # Of its own session: it outlives the terminal, the page and Ctrl-C.
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def log(self, number: int) -> str:
        """The last 64 kB of what a job said."""
        try:
            with (self.folder / f"{number}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def progress(self, number: int) -> dict[str, Any]:
        """Of the stage that a job is at: stage, done, total, unit, since `began` (it was at `before` then) until `at`; or {}."""
        from stages.untrusted import read_json

        with suppress(OSError, ValueError):
            found = read_json(self.folder / f"{number}.progress")
            return found if isinstance(found, dict) else {}
        return {}

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        self.folder.mkdir(exist_ok=True)
        with locked(self.folder / "lock", PATIENCE):
            content = _read(self.folder / FILE)
            yield content
            ended = [job for job in content["jobs"] if job.over]
            old = {job.number for job in ended[: max(0, len(ended) - KEPT)]}
            jobs = [dataclasses.asdict(job) for job in content["jobs"] if job.number not in old]
            with atomic_write(self.folder / FILE) as temporary:
                temporary.write_text(json.dumps(content | {"jobs": jobs}, indent=1), encoding="utf-8")
            for number in old:
                for path in self.folder.glob(f"{number}.*"):
                    path.unlink(missing_ok=True)

    # The worker

    def work(self) -> None:
        """Run job after job until none waits, or return at once if another worker does."""
        while self._next():
            try:
                with locked(self.folder / "worker") as worker:
                    while self._next():
                        with _device() as device:
                            if job := self._next():
                                self._run(job, (worker, device))
            except Busy:
                return
            # Whoever added a job meanwhile saw that this worker had the lock, and started no other: look once more.

    def _next(self) -> Job | None:
        content = _read(self.folder / FILE)
        ready = [job for job in content["jobs"] if job.state in ("running", "waiting")]
        return None if content["paused"] else min(ready, key=lambda job: job.state != "running", default=None)

    def _run(self, job: Job, handles: tuple[int, ...]) -> None:
        job = dataclasses.replace(job, state="running", began=job.began or _now(), starts=job.starts + 1, pid=0)
        self._put(job)
        words = [*own_command(), job.words[0], "--project", str(self.project), *job.words[1:]]
        told = {PROGRESS: str(self.folder / f"{job.number}.progress"), JOB: f"{job.number} {self.project}"}
        with self._log(str(job.number)) as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            folder = job.folder if Path(job.folder).is_dir() else self.project
            process = subprocess.Popen(words, cwd=folder, env=os.environ | told, pass_fds=handles, **streams)
        self._put(dataclasses.replace(job, pid=process.pid))
        if _job(_read(self.folder / FILE), job.number).over:  # cancelled while it began
            process.terminate()
        code = process.wait()
        self.end(job.number, code)  # if it was killed: otherwise it has done so itself

    def _put(self, job: Job) -> None:
        """Unless the job has ended meanwhile."""
        with self._changing() as content:
            if not _job(content, job.number).over:
                _replace(content, job)

    def end(self, number: int, code: int) -> None:
        """Record the exit code of the running job: 0, 130 after a stop, or below 0 if a signal killed it; see STOPPED."""
        lines = [line for line in self.log(number).splitlines() if line.strip() and not line.startswith("next: ")]
        said = f"killed by signal {-code}" if code < 0 and code not in STOPPED else lines[-1][:300] if lines else ""
        states: dict[int, State] = {0: "finished", **dict.fromkeys(STOPPED, "stopped")}
        self._put(
            dataclasses.replace(
                _job(_read(self.folder / FILE), number), state=states.get(code, "failed"), ended=_now(), said=said
            )
        )


def job_ended(job: str, code: int) -> None:
    """`job`: the value of the environment variable JOB."""
    number, _, project = job.partition(" ")
    Queue(Path(project)).end(int(number), code)


@contextmanager
def _device() -> Iterator[int]:
    """The lock of this user's device, once the jobs of all other queues have ended."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latentmill"
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        while True:
            try:
                handle = opened.enter_context(locked(cache / "device.lock"))
                break
            except Busy:
                time.sleep(LOOK_SECONDS)
        yield handle


def _check_words(words: Sequence[str]) -> None:
    if not words or not all(isinstance(word, str) and word and "\0" not in word for word in words):
        raise ValueError("a job must be a command of latentmill, such as: train --set train.steps=500")
    if sum(map(len, words)) > LONGEST:
        raise ValueError(f"a job's command must have at most {LONGEST} characters")
    if words[0] in NEVER or words[0].startswith("-"):
        raise ValueError(f"{words[0]} cannot be queued")
    options = takewhile(lambda word: word != "--", words)
    if any(word.partition("=")[0] == "--project" or word.startswith("-p") for word in options):
        raise ValueError("the jobs of a queue belong to its project: leave --project out")


def _job(content: dict[str, Any], number: int) -> Job:
    for job in content["jobs"]:
        if job.number == number:
            found: Job = job
            return found
    raise ValueError(f"there is no job {number}")


def _replace(content: dict[str, Any], job: Job) -> None:
    content["jobs"] = [job if each.number == job.number else each for each in content["jobs"]]


def _read(path: Path) -> dict[str, Any]:
    from stages.untrusted import read_json

    if not path.exists():
        return {"jobs": [], "paused": False, "last": 0}
    wrong = f"{path}: not a queue as this program writes it; correct it, or delete it to begin an empty one"
    try:
        content = read_json(path)
        jobs = [Job(**(job | {"words": tuple(job["words"])})) for job in content["jobs"]]
        sound = isinstance(content["paused"], bool) and isinstance(content["last"], int) and all(map(_sound, jobs))
        if not sound or len({job.number for job in jobs}) < len(jobs):
            raise ValueError(wrong)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(wrong) from None
    return {"jobs": jobs, "paused": content["paused"], "last": content["last"]}


def _sound(job: Job) -> bool:
    texts = (*job.words, job.folder, job.added, job.began, job.ended, job.said)
    numbers = (job.number, job.starts, job.pid)
    _check_words(job.words)
    return job.state in get_args(State) and all(isinstance(text, str) for text in texts) and all(type(n) is int for n in numbers)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


if __name__ == "__main__":
    Queue(Path(sys.argv[1])).work()
