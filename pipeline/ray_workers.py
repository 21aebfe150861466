"""Work units on a Ray cluster: actors that load weights once compute them, and this process commits their results.

Ray starts the actors, sends the units, brings the results back through its object store, and starts a dead actor again with
the unit that it had. Here is only what it cannot know: how many units are under way, and what the user is told.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import ray

from pipeline.project.config import ProjectConfig
from pipeline.project.project import Project
from pipeline.work import Kept, divide, perform
from stages.pipelines import Weights
from stages.stage import Artifact, StageContext, WorkUnit

AHEAD = 2  # units under way for each worker: one is computed, one waits
RETRIES = 10  # deaths of its worker that one unit may meet
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEVICES = ("GPU", "metal")  # resources of a cluster that hold one model each; a Mac is given the second by `ray start`
ERRORS = (ValueError, OSError, MemoryError, RuntimeError)  # of a stage; what was computed before is kept
Item: TypeAlias = pa.RecordBatch | Artifact


@dataclass
class Result:
    """What a worker returns for one unit. `items` are record batches and artifacts. `lines` are messages for the user.
    `error` is the exception that ended the unit early, or None. `peak` is the peak memory of the worker in bytes.
    """

    items: list[Item] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: BaseException | None = None
    peak: int = 0


class Worker:
    """An actor that computes work units of one stage, one after another. Weights and input tables stay in memory."""

    def __init__(self) -> None:
        import stages  # noqa: F401  a fast BLAS, before MLX

        self.kept, self.stopping = Kept(), False

    def check(self, paths: list[Path]) -> str:
        """Return what is wrong with this worker's machine, or "". `paths` must exist on it."""
        if version() != importlib.metadata.version("latentmill"):
            return f"has latentmill {version()}"
        missing = next((path for path in paths if not path.exists()), None)
        return f"does not see {missing}" if missing else ""

    def compute(self, unit: WorkUnit) -> Result:
        """Compute a work unit, and return its rows and artifacts. A unit that the user stops returns the rows so far."""
        result = Result()
        try:
            for item in perform(unit, say=result.lines.append, stop=lambda: self.stopping, kept=self.kept):
                result.items.append(item)
        except ERRORS as error:
            result.error = error
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result.peak = peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
        return result

    def stop(self) -> None:
        """Stop computing. The current unit ends after its current batch. Later units end before their first batch."""
        self.stopping = True


def version() -> str:
    """Return the installed version of latentmill."""
    return importlib.metadata.version("latentmill")


def compute(project: Project, name: str, ctx: StageContext) -> Iterator[Item]:
    """Compute the pending rows of the stage `name` on the workers of a Ray cluster. Yield their record batches and
    artifacts, unit by unit, in the order in which they are finished. Raises ValueError if a worker cannot see the project,
    if the cluster has no room for one, or if a unit ends its worker again and again.
    """
    settings = project.config.project
    stage, inputs = project.stage(name), project.inputs(name)
    units = divide(project.pipeline.stages[name], stage, ctx, inputs, settings.unit_rows)
    weighs = any(isinstance(project.pipeline.resources[need], Weights) for need in stage.needs)
    paths = [project.path, *(found.folder for found in inputs.values()), *map(ctx.need, stage.needs)]
    with connected(settings) as count:
        workers = start_workers(min(count, -(-ctx.pending.num_rows // settings.unit_rows)), weighs)
        check_workers(workers, [path for path in paths if isinstance(path, Path)])
        ctx.say(f"{len(workers)} workers on Ray, {settings.unit_rows} rows at a time")
        try:
            yield from results(workers, units, ctx)
        except ray.exceptions.RayActorError as error:
            raise ValueError(
                f"{name}: a unit of {settings.unit_rows} rows ended its worker {RETRIES + 1} times, perhaps for lack of memory; "
                f"lower [project] unit_rows or worker_count ({' '.join(str(error).split())[:200]})"
            ) from None
        finally:
            for worker in workers:
                ray.kill(worker)


@contextmanager
def connected(settings: ProjectConfig) -> Iterator[int]:
    """Return a context manager that connects to the cluster of [project] `workers`, and gives the number of workers to start.
    A cluster of this machine is started if there is none. Raises ValueError if the cluster cannot be reached.
    """
    count = settings.worker_count
    address = settings.workers if settings.workers != "ray" else None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    threads = {variable: os.environ.get(variable, str(os.cpu_count())) for variable in THREADS}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": threads}}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            ray.init(address or "auto", **quiet)
        except ConnectionError:
            if address:
                raise
            ray.init("local", num_cpus=max(count, os.cpu_count() or 1), include_dashboard=False, **quiet)
    except (ConnectionError, TimeoutError, RuntimeError, ImportError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"project.workers: cannot reach the Ray cluster {address or ''}: {why}") from None
    finally:
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError):  # outside the main thread
                signal.signal(number, handler)
    try:
        held = ray.cluster_resources()
        yield count or int(max(held.get(device, 0) for device in DEVICES)) or int(held.get("CPU", 1))
    finally:
        ray.shutdown()


def start_workers(count: int, weighs: bool) -> list[Any]:
    """Start `count` workers and return their handles. If `weighs` is True, each loads a model, and takes a GPU of its own
    where the cluster has any.
    """
    held = ray.cluster_resources()
    device = next((name for name in DEVICES if held.get(name)), None) if weighs else None
    needs: dict[str, Any] = {"num_cpus": 1}
    needs |= {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}} if device else {}
    actor = ray.remote(concurrency_groups={"work": 1, "control": 1})(Worker)
    actor = actor.options(max_restarts=-1, max_task_retries=RETRIES, **needs)
    return [actor.remote() for _ in range(count)]


def check_workers(workers: list[Any], paths: list[Path]) -> None:
    """Check that every worker sees `paths` and runs this version of the program. Raises ValueError if one does not."""
    for problem in ray.get([worker.check.remote(paths) for worker in workers]):
        if problem:
            raise ValueError(
                f"project.workers: a worker {problem}; share the folders by a network file system at the same path, and install "
                f"latentmill {version()} on every host"
            )


def results(workers: list[Any], units: Iterator[WorkUnit], ctx: StageContext) -> Iterator[Item]:
    """Give the units to the workers, at most AHEAD for each at a time, and yield the items of every finished unit. If the
    user asks to stop, no further unit begins. The first error of a unit is raised after the items that were computed.
    """
    under_way: dict[Any, tuple[Any, int]] = {}
    total, done, peak, stopped = ctx.pending.num_rows, 0, 0, False

    def give(worker: Any) -> None:
        if not ctx.stop() and (unit := next(units, None)):
            under_way[worker.compute.options(concurrency_group="work").remote(unit)] = worker, unit.pending.num_rows

    for _ in range(AHEAD):
        for worker in workers:
            give(worker)
    while under_way:
        ready, _ = ray.wait(list(under_way), num_returns=1, timeout=0.5)
        if ctx.stop() and not stopped:
            stopped = True
            for worker in workers:
                worker.stop.options(concurrency_group="control").remote()
        for reference in ready:
            worker, rows = under_way.pop(reference)
            result: Result = ray.get(reference)
            give(worker)
            for line in result.lines:
                ctx.say(line)
            yield from result.items
            if result.error:
                raise result.error
            done, peak = done + rows, max(peak, result.peak)
            ctx.progress(done, total, "rows")
    if peak:
        ctx.say(f"peak memory {peak / 1e9:.2g} GB a worker")
