"""Work units on a Ray cluster: actors that load weights once compute them, and this process commits their results."""

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
from pipeline.project.stage_run import Kept
from pipeline.ray_cluster import Host, actor_options, answers, check_hosts, connected, worker_count, worker_needs
from pipeline.shipping import Mirror, Packer, ShippedFile, lasting_files
from pipeline.work import divide, perform
from stages.pipelines import Weights
from stages.run import Report, Run
from stages.stage import Artifact, WorkUnit

AHEAD = 2  # units under way for each worker: one is computed, one waits
RETRIES = 10  # deaths of its worker that one unit may meet
GOODBYE_SECONDS = 10.0  # in which the workers remove their files at the end
ERRORS = (ValueError, OSError, MemoryError, RuntimeError)  # of a stage; what was computed before is kept
Item: TypeAlias = pa.RecordBatch | Artifact
Method = TypeVar("Method", bound=Callable[..., Any])
Files = Callable[[WorkUnit], list[ShippedFile]]  # the files that travel with a unit


@dataclass
class Result:
    items: list[Item] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # messages for the user
    error: BaseException | None = None  # ended the unit early
    peak: int = 0  # resident memory of the worker, bytes


def _group(name: str) -> Callable[[Method], Method]:
    """Ray runs one method of each group of an actor at a time: `stop` and `leave` reach a worker that computes."""
    mark: Callable[[Method], Method] = ray.method(concurrency_group=name)
    return mark


class Worker:
    """An actor that computes units of one stage. Weights and input tables stay in memory between units.

    `common`: a unit without rows. `lasting`: files that every unit needs; None if the worker sees the files of the project.
    """

    def __init__(self, name: str, common: WorkUnit, lasting: list[ShippedFile] | None) -> None:
        import stages  # noqa: F401  a fast BLAS, before MLX

        self.kept, self.stopping, self.common, self.lasting = Kept(), False, common, lasting
        self.mirror = Mirror(Path(tempfile.gettempdir(), name))

    @_group("control")
    def check(self, wanted: str, paths: list[Path], peak: int | None) -> Host:
        """Facts about this machine. `problem` names another version, a missing path, or too little memory for `peak` bytes."""
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
        """`stored`: old rows with keys of `pending`. After an error or a stop, the result holds the rows computed so far."""
        unit, result = dataclasses.replace(self.common, pending=pending, stored=stored), Result()
        try:
            for item in perform(self._placed(unit, files), Report(result.lines.append, stop=lambda: self.stopping), self.kept):
                result.items.append(item)
        except ERRORS as error:
            result.error = error
        result.peak = peak_rss()
        return result

    def _placed(self, unit: WorkUnit, files: Sequence[ShippedFile]) -> WorkUnit:
        if self.lasting is None:
            return unit
        present = [*self.lasting, *files]
        self.mirror.remove_others(present)
        self.mirror.unpack(present, ray.get)
        return self.mirror.unit(unit)

    @_group("control")
    def stop(self) -> None:
        """The current unit ends after its batch, later units before their first."""
        self.stopping = True

    @_group("control")
    def leave(self) -> None:
        self.mirror.remove()


def version() -> str:
    return importlib.metadata.version("latentmill")


def device() -> str:
    """Identity of the GPU of this machine: "metal", or CUDA_VISIBLE_DEVICES ("0" if not set); "" if MLX sees none."""
    import mlx.core as mx

    if mx.metal.is_available():
        return "metal"
    return os.environ.get("CUDA_VISIBLE_DEVICES") or "0" if mx.cuda.is_available() else ""


def compute(project: Project, name: str, run: Run[Any]) -> Iterator[Item]:
    """Units come as they are finished. ValueError if workers cannot start, or crash repeatedly on the same rows."""
    settings = project.config.project
    stage, inputs = project.stage(name), project.inputs(name)
    units = divide(project.pipeline.stages[name], stage, run, inputs, settings.unit_rows)
    weighs = has_model(project, name)
    folders = [found.folder for found in inputs.values()]
    paths = [project.path, *folders, *(path for path in map(run.needs.__getitem__, stage.needs) if isinstance(path, Path))]
    with connected(settings):
        needs = worker_needs(model_bytes(project, name) if weighs else None)
        most = -(-run.output.pending.num_rows // settings.unit_rows)
        count = worker_count(name, settings.worker_count, most, needs, run.report.say)
        lasting: list[ShippedFile] | None = None
        files: Files = nothing
        if settings.worker_inputs == "shipped":
            lasting = Packer(ray.put).pack(lasting_files(stage, project.pipeline.resources, folders, run))
            paths, files = [], unit_files(run, stage.opens)
        first = next(units)
        workers = start_workers(count, needs, without_rows(first), lasting)
        try:
            hosts = hosts_of(workers, paths, model_bytes(project, name, 0) if weighs else None, run)
            if hosts is None:
                return
            check_hosts(hosts, sum(file.size for file in lasting or ()))
            run.report.say(f"{len(workers)} workers on Ray, {settings.unit_rows} rows at a time")
            yield from results(workers, itertools.chain([first], units), run, files)
        except ray.exceptions.RayActorError as error:
            raise ValueError(
                f"{name}: a unit of {settings.unit_rows} rows ended its worker {RETRIES + 1} times, perhaps for lack of memory; "
                f"lower [project] unit_rows or worker_count ({' '.join(str(error).split())[:200]})"
            ) from None
        finally:
            end_workers(workers, lasting is not None)


def has_model(project: Project, name: str) -> bool:
    stage = project.stage(name)
    if stage.model:
        return stage.model(project.config.sections[name])
    return any(isinstance(project.pipeline.resources[need], Weights) for need in stage.needs)


def hosts_of(workers: Sequence[Any], paths: list[Path], least: int | None, run: Run[Any]) -> list[Host] | None:
    """What each worker finds on its machine; None once the user stops. `least`: bytes that a model needs, None without one."""
    try:
        return answers([worker.check.remote(version(), paths, least) for worker in workers], run.report.stop, run.report.say)
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())[-300:]
        raise ValueError(
            f"project.workers: a worker failed as it started; is latentmill installed on every host? ({why})"
        ) from None


def model_bytes(project: Project, name: str, budget: int | None = None) -> int:
    found = forecast(project, name, outlook(project, budget))
    return found.peak if found else 0


def nothing(unit: WorkUnit) -> list[ShippedFile]:
    return []


def unit_files(run: Run[Any], opens: Callable[[Run[Any]], Iterator[Path]] | None) -> Files:
    """A function that packs the files that a unit's rows open (`Stage.opens`). Missing files are left out."""
    packer = Packer(ray.put)

    def files(unit: WorkUnit) -> list[ShippedFile]:
        of_unit = dataclasses.replace(run, output=dataclasses.replace(run.output, pending=unit.pending))
        return packer.pack(opens(of_unit)) if opens else []

    return files


def without_rows(unit: WorkUnit) -> WorkUnit:
    """What all units share; it is sent to each worker once."""
    return dataclasses.replace(unit, pending=unit.pending.schema.empty_table(), stored=unit.stored.schema.empty_table())


def start_workers(count: int, needs: dict[str, float], common: WorkUnit, lasting: list[ShippedFile] | None = None) -> list[Any]:
    actor = ray.remote(concurrency_groups={"work": 1, "control": 1})(Worker)
    # Ray starts a dead actor again, with the unit that it had.
    actor = actor.options(max_restarts=-1, max_task_retries=RETRIES, **actor_options(needs))
    run = uuid.uuid4().hex[:12]
    return [actor.remote(f"latentmill-{run}-{number}", common, lasting) for number in range(count)]


def end_workers(workers: Sequence[Any], shipped: bool) -> None:
    if shipped:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([worker.leave.remote() for worker in workers], num_returns=len(workers), timeout=GOODBYE_SECONDS)
    for worker in workers:
        ray.kill(worker)


def results(workers: list[Any], units: Iterator[WorkUnit], run: Run[Any], files: Files = nothing) -> Iterator[Item]:
    """Results of the unit that is finished first come first. Those of a unit with an error are yielded before it is raised."""
    under_way: dict[Any, tuple[Any, int]] = {}
    total, done, peak, stopped = run.output.pending.num_rows, 0, 0, False

    def give(worker: Any) -> None:
        if not run.report.stop() and (unit := next(units, None)):
            sent = files(unit)
            reference = worker.compute.remote(unit.pending, unit.stored, *([sent] if sent else []))
            under_way[reference] = worker, unit.pending.num_rows

    for _ in range(AHEAD):
        for worker in workers:
            give(worker)
    while under_way:
        ready, _ = ray.wait(list(under_way), num_returns=1, timeout=0.5)
        if run.report.stop() and not stopped:
            stopped = True
            for worker in workers:
                worker.stop.remote()
        for reference in ready:
            worker, rows = under_way.pop(reference)
            result: Result = ray.get(reference)
            give(worker)
            # By now the worker has its next unit: it does not wait until these rows are committed.
            for line in result.lines:
                run.report.say(line)
            yield from result.items
            if result.error:
                raise result.error
            done, peak = done + rows, max(peak, result.peak)
            run.report.progress(done, total, "rows")
    if peak:
        run.report.say(f"peak memory {peak / 1e9:.2g} GB a worker")
