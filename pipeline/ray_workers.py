"""Work units on a Ray cluster: actors that load weights once compute them, and this process commits their results.

Ray starts the actors, sends the units, brings the results back through its object store, and starts a dead actor again with
the unit that it had. Here is only what it cannot know: how many units are under way, and what the user is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import ray

from pipeline.machine import peak_rss
from pipeline.project.outlook import forecast, outlook
from pipeline.project.project import Project
from pipeline.ray_cluster import Host, actor_options, answers, check_hosts, connected, worker_count, worker_needs
from pipeline.shipping import Mirror, Packer, ShippedFile, lasting_files
from pipeline.work import Kept, divide, perform
from stages.pipelines import Weights
from stages.stage import Artifact, StageContext, WorkUnit

AHEAD = 2  # units under way for each worker: one is computed, one waits
RETRIES = 10  # deaths of its worker that one unit may meet
GOODBYE_SECONDS = 10.0  # in which the workers remove their files at the end
ERRORS = (ValueError, OSError, MemoryError, RuntimeError)  # of a stage; what was computed before is kept
Item: TypeAlias = pa.RecordBatch | Artifact
Method = TypeVar("Method", bound=Callable[..., Any])
Files = Callable[[WorkUnit], list[ShippedFile]]  # the files that travel with a unit


@dataclass
class Result:
    """What a worker returns for one unit. `items` are record batches and artifacts. `lines` are messages for the user.
    `error` is the exception that ended the unit early, or None. `peak` is the peak memory of the worker in bytes.
    """

    items: list[Item] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: BaseException | None = None
    peak: int = 0


def _group(name: str) -> Callable[[Method], Method]:
    """Return a decorator that puts a method of an actor into the group `name`. An actor is an object that Ray runs in a
    process of its own. Ray runs at most one method of each group at a time. Methods of different groups may run at the
    same time.
    """
    mark: Callable[[Method], Method] = ray.method(concurrency_group=name)
    return mark


class Worker:
    """A worker on a Ray cluster: an object in a process of its own, perhaps on another machine. It computes work units
    of one stage, one after another. A work unit is some rows of a table. Weights and input tables stay in memory
    between units.

    `common` is a work unit without rows. It holds what all units of the run share. `lasting` lists the files that every
    unit needs. The worker unpacks them into the temporary folder `name`. `lasting` is None if the worker sees the files
    of the project.
    """

    def __init__(self, name: str, common: WorkUnit, lasting: list[ShippedFile] | None) -> None:
        import stages  # noqa: F401  a fast BLAS, before MLX

        self.kept, self.stopping, self.common, self.lasting = Kept(), False, common, lasting
        self.mirror = Mirror(Path(tempfile.gettempdir(), name))

    @_group("control")
    def check(self, wanted: str, paths: list[Path], peak: int | None) -> Host:
        """Return facts about the machine of this worker. Their field `problem` says what is wrong, or is "". Three
        things are checked. latentmill must have the version `wanted`. All `paths` must exist here. The memory must
        suffice for a model that needs `peak` bytes. `peak` is None if no model is loaded.
        """
        if version() != wanted:
            return Host(f"has latentmill {version()}; install the same version on every host")
        missing = next((path for path in paths if not path.exists()), None)
        if missing:
            how = 'share the folders by a network file system at the same path, or set project.worker_inputs = "shipped"'
            return Host(f"does not see {missing}; {how}")
        host = Host("", socket.gethostname(), free_bytes=shutil.disk_usage(tempfile.gettempdir()).free)
        if peak is None:
            return host
        from stages.tuner.blockwise.device import memory_budget

        budget = memory_budget()
        if peak > budget:
            return Host(f"on {host.name} may take {budget / 1e9:.3g} GB of memory, and a model needs about {peak / 1e9:.3g} GB")
        return dataclasses.replace(host, device=device())

    @_group("work")
    def compute(self, pending: pa.Table, stored: pa.Table, files: Sequence[ShippedFile] = ()) -> Result:
        """Compute a work unit and return a `Result`: the rows and artifacts of the unit, messages for the user, and the
        error that ended the unit, if any. A work unit is some rows of a table. `pending` holds the rows to compute.
        `stored` holds the table's old rows with the same keys as rows of `pending`, if there are any. `files` are the
        files that were sent with the unit. If the user stops the run, the result holds the rows computed so far.
        """
        unit, result = dataclasses.replace(self.common, pending=pending, stored=stored), Result()
        try:
            for item in perform(self._placed(unit, files), result.lines.append, stop=lambda: self.stopping, kept=self.kept):
                result.items.append(item)
        except ERRORS as error:
            result.error = error
        result.peak = peak_rss()
        return result

    def _placed(self, unit: WorkUnit, files: Sequence[ShippedFile]) -> WorkUnit:
        """Unpack `files`, which were sent with a work unit, and return the unit with paths of this machine. Files that
        only earlier units needed are removed. If the worker sees the files of the project, the unit is returned
        unchanged.
        """
        if self.lasting is None:
            return unit
        present = [*self.lasting, *files]
        self.mirror.remove_others(present)
        self.mirror.unpack(present, ray.get)
        return self.mirror.unit(unit)

    @_group("control")
    def stop(self) -> None:
        """Stop computing. The current unit ends after its current batch. Later units end before their first batch."""
        self.stopping = True

    @_group("control")
    def leave(self) -> None:
        """Remove the files that this worker has unpacked."""
        self.mirror.remove()


def version() -> str:
    """Return the installed version of latentmill."""
    return importlib.metadata.version("latentmill")


def device() -> str:
    """Return a text that identifies the GPU of this machine. It is "metal" on a Mac. With CUDA, it is the variable
    CUDA_VISIBLE_DEVICES, or "0" if this is not set. If MLX sees no GPU, it is "".
    """
    import mlx.core as mx

    if mx.metal.is_available():
        return "metal"
    return os.environ.get("CUDA_VISIBLE_DEVICES") or "0" if mx.cuda.is_available() else ""


def compute(project: Project, name: str, ctx: StageContext) -> Iterator[Item]:
    """Compute the pending rows of the stage `name` on workers of a Ray cluster. `project` is the opened project folder.
    `ctx` is the stage's context, with the pending rows. Yield record batches of rows, and artifacts (files that rows
    name). They come in the order in which they are finished. Raises ValueError if the workers cannot start or lack
    something, such as a folder. Raises it too if the same rows crash several workers.
    """
    settings = project.config.project
    stage, inputs = project.stage(name), project.inputs(name)
    units = divide(project.pipeline.stages[name], stage, ctx, inputs, settings.unit_rows)
    weighs = has_model(project, name)
    folders = [found.folder for found in inputs.values()]
    paths = [project.path, *folders, *(path for path in map(ctx.need, stage.needs) if isinstance(path, Path))]
    with connected(settings):
        needs = worker_needs(model_bytes(project, name) if weighs else None)
        most = -(-ctx.pending.num_rows // settings.unit_rows)
        count = worker_count(name, settings.worker_count, most, needs, ctx.say)
        lasting: list[ShippedFile] | None = None
        files: Files = nothing
        if settings.worker_inputs == "shipped":
            lasting = Packer(ray.put).pack(lasting_files(stage, project.pipeline.resources, folders, ctx))
            paths, files = [], unit_files(ctx, stage.opens)
        first = next(units)
        workers = start_workers(count, needs, without_rows(first), lasting)
        try:
            hosts = hosts_of(workers, paths, model_bytes(project, name, 0) if weighs else None, ctx)
            if hosts is None:
                return
            check_hosts(hosts, sum(file.size for file in lasting or ()))
            ctx.say(f"{len(workers)} workers on Ray, {settings.unit_rows} rows at a time")
            yield from results(workers, itertools.chain([first], units), ctx, files)
        except ray.exceptions.RayActorError as error:
            raise ValueError(
                f"{name}: a unit of {settings.unit_rows} rows ended its worker {RETRIES + 1} times, perhaps for lack of memory; "
                f"lower [project] unit_rows or worker_count ({' '.join(str(error).split())[:200]})"
            ) from None
        finally:
            end_workers(workers, lasting is not None)


def has_model(project: Project, name: str) -> bool:
    """Return True if the stage `name` computes with a model, which takes a GPU if there is one. `project` is the opened
    project folder.
    """
    stage = project.stage(name)
    if stage.model:
        return stage.model(project.config.sections[name])
    return any(isinstance(project.pipeline.resources[need], Weights) for need in stage.needs)


def hosts_of(workers: Sequence[Any], paths: list[Path], least: int | None, ctx: StageContext) -> list[Host] | None:
    """Let every worker in `workers` check its machine, and return one `Host` per worker with what it found. `paths` are
    files and folders that must exist there. `least` is the memory in bytes that the model needs at least, or None
    without a model. `ctx` is the stage's context. If `ctx.stop()` returns True, return None. Raises ValueError if a
    worker cannot start.
    """
    try:
        return answers([worker.check.remote(version(), paths, least) for worker in workers], ctx.stop, ctx.say)
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())[-300:]
        raise ValueError(
            f"project.workers: a worker failed as it started; is latentmill installed on every host? ({why})"
        ) from None


def model_bytes(project: Project, name: str, budget: int | None = None) -> int:
    """Return the peak memory in bytes that the stage `name` is expected to need. `project` is the opened project
    folder. `budget` is the memory in bytes that the stage may take; None means what this machine has. The result is 0
    if the stage has no forecast.
    """
    found = forecast(project, name, outlook(project, budget))
    return found.peak if found else 0


def nothing(unit: WorkUnit) -> list[ShippedFile]:
    """Return an empty list: no file is sent with `unit`. This is for workers that see the files of the project."""
    return []


def unit_files(ctx: StageContext, opens: Callable[[StageContext], Iterator[Path]] | None) -> Files:
    """Return a function `files(unit)` that reads the input files of a work unit, so that they can be sent to a worker.
    A work unit is some rows of a table. `files(unit)` returns a list with one `ShippedFile` per file. `ctx` is the
    stage's context. `opens` is a function of the stage: `opens(context)` yields the paths of the files that the rows in
    `context.pending` need. If `opens` is None, the stage opens no files, and `files(unit)` returns an empty list.

    `files(unit)` makes a copy of `ctx`, sets `pending` of the copy to the rows of `unit`, and passes the copy to
    `opens`. Missing files are left out.
    """
    packer = Packer(ray.put)
    return lambda unit: packer.pack(opens(dataclasses.replace(ctx, pending=unit.pending))) if opens else []


def without_rows(unit: WorkUnit) -> WorkUnit:
    """Return a copy of the work unit `unit` whose tables `pending` and `stored` are empty. The copy holds what all
    units of a run share, such as the settings. It is sent to each worker once.
    """
    return dataclasses.replace(unit, pending=unit.pending.schema.empty_table(), stored=unit.stored.schema.empty_table())


def start_workers(count: int, needs: dict[str, float], common: WorkUnit, lasting: list[ShippedFile] | None = None) -> list[Any]:
    """Start `count` workers on the cluster and return their handles. `needs` maps a resource to the amount that each
    worker takes, such as {"CPU": 1}. `common` is a work unit without rows, with what all units share. `lasting` lists
    the files that every unit needs. It is None if the workers see the files of the project.
    """
    actor = ray.remote(concurrency_groups={"work": 1, "control": 1})(Worker)
    actor = actor.options(max_restarts=-1, max_task_retries=RETRIES, **actor_options(needs))
    run = uuid.uuid4().hex[:12]
    return [actor.remote(f"latentmill-{run}-{number}", common, lasting) for number in range(count)]


def end_workers(workers: Sequence[Any], shipped: bool) -> None:
    """End the workers. If `shipped` is True, each worker first removes the files that it has unpacked."""
    if shipped:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([worker.leave.remote() for worker in workers], num_returns=len(workers), timeout=GOODBYE_SECONDS)
    for worker in workers:
        ray.kill(worker)


def results(workers: list[Any], units: Iterator[WorkUnit], ctx: StageContext, files: Files = nothing) -> Iterator[Item]:
    """Compute the work units `units` on `workers`, and yield their record batches and artifacts. The unit that is
    finished first comes first. `ctx` is the stage's context. Once `ctx.stop()` returns True, no further unit begins.
    `files(unit)` returns a list of files to send with the unit; by default none are sent. If a unit ends with an error,
    its results so far are yielded. Then the error is raised.

    A worker has at most two units at a time: it computes one, and one waits.
    """
    under_way: dict[Any, tuple[Any, int]] = {}
    total, done, peak, stopped = ctx.pending.num_rows, 0, 0, False

    def give(worker: Any) -> None:
        if not ctx.stop() and (unit := next(units, None)):
            sent = files(unit)
            reference = worker.compute.remote(unit.pending, unit.stored, *([sent] if sent else []))
            under_way[reference] = worker, unit.pending.num_rows

    for _ in range(AHEAD):
        for worker in workers:
            give(worker)
    while under_way:
        ready, _ = ray.wait(list(under_way), num_returns=1, timeout=0.5)
        if ctx.stop() and not stopped:
            stopped = True
            for worker in workers:
                worker.stop.remote()
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
