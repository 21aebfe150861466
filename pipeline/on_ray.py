"""Pending rows computed on a Ray cluster: actors that load weights once compute work units, and this process commits them.

Four parts: the cluster, the workers on it, their results, and input files sent to workers that do not see the project's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import signal
import socket
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import ray

from pipeline.process import version
from pipeline.project.config import ProjectConfig
from pipeline.project.outlook import forecast, outlook
from pipeline.project.project import Project
from pipeline.project.stage_run import Kept
from pipeline.work import Item, divide, perform
from stages import footprint
from stages.pipelines import Folder, Resource, Weights
from stages.run import Report, Run
from stages.settings import from_home
from stages.stage import Stage, WorkUnit

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEVICES = ("GPU", "metal")  # resources of a cluster that hold one model each; a Mac is given the second by `ray start`
UNITS = {"memory": (1e9, "GB of memory"), "CPU": (1, "CPU"), "GPU": (1, "GPU"), "metal": (1, "metal")}
WAIT_SECONDS = 10.0  # until the user is told that the cluster is busy
TRIES = 4  # to connect; on a busy machine, two in a row were seen to fail
REACH_SECONDS = 10.0  # for an answer of a cluster
LOOK_SECONDS = 0.5  # between two looks at whether the user asks to stop
AHEAD = 2  # units under way for each worker: one is computed, one waits
RETRIES = 10  # deaths of its worker that one unit may meet
GOODBYE_SECONDS = 10.0  # in which the workers remove their files at the end
ERRORS = (ValueError, OSError, MemoryError, RuntimeError)  # of a stage; what was computed before is kept
Method = TypeVar("Method", bound=Callable[..., Any])
Files = Callable[[WorkUnit], "list[ShippedFile]"]  # the files that travel with a unit
CHUNK_BYTES = 64 << 20  # of a file: the most that is in memory at once while it is packed
Put = Callable[[bytes], Any]  # stores bytes, and returns a reference that travels
Get = Callable[[Any], bytes]  # returns the bytes of a reference


# The cluster


@dataclass(frozen=True)
class Host:
    problem: str  # what is wrong there, or ""
    name: str = ""
    device: str = ""  # the GPU that MLX uses, such as "metal"; "" without one
    free_bytes: int = 0  # on the disk of temporary files


@contextlib.contextmanager
def connected(settings: ProjectConfig) -> Iterator[None]:
    """Connect to, or start, the cluster of [project] `workers`. Raises ValueError if it cannot be reached."""
    address = settings.workers if settings.workers != "ray" else None
    check_reachable("project.workers", settings.workers)
    check_reachable("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    if address and (Path.home() / ".ray" / "auth_token").exists():
        # The cluster asks for the token, but Ray's client does not look for it unless told. Elsewhere Ray decides itself.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster started here: the priority of a local run
    # Ray limits the threads of an actor to its CPUs, here one; a worker computes with as many as a local run.
    threads = {variable: os.environ.get(variable, str(os.cpu_count())) for variable in THREADS}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"env_vars": threads}}
    # ray.init sets signal handlers of its own; those of the run come back below.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            for left in range(TRIES)[::-1]:
                try:
                    ray.init(address or "auto", **quiet)
                    break
                except ConnectionAbortedError:  # the cluster's process for this program ended as it was forked: in gRPC
                    if not left:
                        raise
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
    """Raises ValueError if nothing answers at "HOST:PORT" or "ray://HOST:PORT"; other texts name no address and pass."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    # Ray itself would try for minutes.
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"{name}: cannot reach the Ray cluster {address}: {error}") from None


def worker_needs(peak: int | None) -> dict[str, float]:
    """Amounts by Ray's names. `peak`: bytes that a model needs; 0 if unknown, None without a model."""
    held = ray.cluster_resources()
    device = next((name for name in DEVICES if held.get(name)), None)
    if device and peak is not None:
        return {"CPU": 1, device: 1}
    return {"CPU": 1, "memory": peak} if peak else {"CPU": 1}


def room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(held.get(name, 0) // amount) for name, amount in needs.items()) for held in alive)


def worker_count(name: str, wanted: int, units: int, needs: Mapping[str, float], say: Callable[[str], None]) -> int:
    """Workers to start, at most one per unit. `wanted`: the user's limit, 0 for none. Raises ValueError if none fits."""
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
    return " and ".join(f"{amount / UNITS[name][0]:.3g} {UNITS[name][1]}" for name, amount in needs.items())


def check_hosts(hosts: Sequence[Host], shipped_bytes: int) -> None:
    """Raises ValueError if a worker has a problem, two share a GPU, or the files for a machine's workers exceed its disk."""
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
    """Results of calls on Ray workers, in the order of the calls; None once `stop()` is True."""
    waiting, looks = list(references), 0
    while waiting and not stop():
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_SECONDS)
        looks += 1
        if waiting and looks * LOOK_SECONDS == WAIT_SECONDS:
            say(f"waiting for the Ray cluster: {len(waiting)} of {len(references)} workers have no room yet")
    return None if waiting or stop() else list(ray.get(list(references)))


# Input files of units as bytes: packed where they lie, and unpacked below a folder of the worker, which repeats their full
# paths: /data/cats/a.png becomes <folder>/data/cats/a.png, so that relative paths still hold.


@dataclass(frozen=True)
class ShippedFile:
    path: Path  # absolute, where it was packed
    size: int  # bytes
    mtime_ns: int
    chunks: tuple[Any, ...]  # references to its bytes, in order


class Packer:
    """Reads files and stores their bytes by `put`. A file of the previous call that has not changed is not read again."""

    def __init__(self, put: Put) -> None:
        self.put = put
        self.packed: dict[Path, ShippedFile] = {}

    def pack(self, paths: Iterable[Path]) -> list[ShippedFile]:
        found: dict[Path, ShippedFile] = {}
        for path in dict.fromkeys(map(full, paths)):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                known = self.packed.get(path)
                if known and (known.size, known.mtime_ns) == (about.st_size, about.st_mtime_ns):
                    found[path] = known
                else:
                    found[path] = ShippedFile(path, about.st_size, about.st_mtime_ns, tuple(map(self.put, chunks(path))))
        self.packed = found
        return list(found.values())


def chunks(path: Path) -> Iterator[bytes]:
    """Raises FileNotFoundError if the file is missing, ValueError with its path if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from iter(functools.partial(file.read, CHUNK_BYTES), b"")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read for the workers: {error.strerror or error}") from None


def full(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  resolve() follows links


def files_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path, followlinks=True):
        yield from (Path(folder, name) for name in sorted(names))


def lasting_files(stage: Stage, resources: Mapping[str, Resource], inputs: Iterable[Path], run: Run[Any]) -> Iterator[Path]:
    """Files that every unit needs: input tables, weights, and folders of which `stage.opens` does not say what a unit opens."""
    for folder in inputs:
        yield from files_below(folder)
    for need in stage.needs:
        kind = resources[need]
        if isinstance(kind, Weights) or (isinstance(kind, Folder) and stage.opens is None):
            yield from files_below(run.needs[need])


class Mirror:
    """Copies of another machine's files below `folder`, which repeats their full paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present: dict[Path, tuple[int, int]] = {}  # path where it was packed -> size, time of its last change

    def place(self, path: Path) -> Path:
        found = full(path)
        return self.folder / found.relative_to(found.anchor)

    def unpack(self, files: Sequence[ShippedFile], get: Get) -> None:
        """Write copies of `files` and remove others; those that have not changed are kept. `get`: the bytes of a chunk."""
        for path in self.present.keys() - {file.path for file in files}:
            self.place(path).unlink(missing_ok=True)
            del self.present[path]
        # No other user of this machine may enter it.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in files:
            stamp = file.size, file.mtime_ns
            if self.present.get(file.path) == stamp:
                continue
            place = self.place(file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as out:
                for chunk in file.chunks:
                    out.write(get(chunk))
            self.present[file.path] = stamp

    def unit(self, unit: WorkUnit) -> WorkUnit:
        """The unit with the paths of the copies, also in settings. Missing folders are made."""
        inputs = {name: dataclasses.replace(one, folder=self.place(one.folder)) for name, one in unit.inputs.items()}
        needs = {name: self.place(value) if isinstance(value, Path) else value for name, value in unit.needs.items()}
        artifacts, root = self.place(unit.artifacts), self.place(unit.root)
        for folder in (root, *(value for value in needs.values() if isinstance(value, Path))):
            if not folder.exists():  # no file of it was needed
                folder.mkdir(parents=True)
        config = self.settings(unit.config)
        return dataclasses.replace(unit, inputs=inputs, needs=needs, config=config, artifacts=artifacts, root=root)

    def settings(self, config: Any) -> Any:
        """Absolute paths in settings declared with `path=True` become those of the copies, in nested dataclasses too."""
        changed = {}
        for each in dataclasses.fields(config):
            value = getattr(config, each.name)
            placed = self._setting(value, each.metadata.get("path", False))
            if placed != value:
                changed[each.name] = placed
        return dataclasses.replace(config, **changed)

    def _setting(self, value: Any, is_path: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(self._setting(each, is_path) for each in value)
        if dataclasses.is_dataclass(value):
            return self.settings(value)
        if is_path and isinstance(value, str) and from_home(value).is_absolute():
            return str(self.place(from_home(value)))
        return value

    def remove(self) -> None:
        self.present.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


# The workers


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
        import mlx.core as mx

        cuda = os.environ.get("CUDA_VISIBLE_DEVICES") or "0" if mx.cuda.is_available() else ""
        return dataclasses.replace(host, device="metal" if mx.metal.is_available() else cuda)

    @_group("work")
    def compute(self, pending: pa.Table, stored: pa.Table, files: Sequence[ShippedFile] = ()) -> Result:
        """`stored`: old rows with keys of `pending`. After an error or a stop, the result holds the rows computed so far."""
        unit, result = dataclasses.replace(self.common, pending=pending, stored=stored), Result()
        try:
            if self.lasting is not None:
                self.mirror.unpack([*self.lasting, *files], ray.get)
                unit = self.mirror.unit(unit)
            for item in perform(unit, Report(result.lines.append, stop=lambda: self.stopping), self.kept):
                result.items.append(item)
        except ERRORS as error:
            result.error = error
        result.peak = footprint.peak()
        return result

    @_group("control")
    def stop(self) -> None:
        """The current unit ends after its batch, later units before their first."""
        self.stopping = True

    @_group("control")
    def leave(self) -> None:
        self.mirror.remove()


def compute(project: Project, name: str, run: Run[Any]) -> Iterator[Item]:
    """Units come as they are finished. ValueError if workers cannot start, or crash repeatedly on the same rows."""
    settings = project.config.project
    stage, inputs = project.stage(name), project.inputs(name)
    units = divide(project.pipeline.stages[name], stage, run, inputs, settings.unit_rows)
    weighs = has_model(project, name)
    folders = [found.folder for found in inputs.values()]
    paths = [project.path, *folders, *(path for path in map(run.needs.__getitem__, stage.needs) if isinstance(path, Path))]
    packer, lasting = Packer(ray.put), None

    def files_of(unit: WorkUnit) -> list[ShippedFile]:
        of_unit = dataclasses.replace(run, output=dataclasses.replace(run.output, pending=unit.pending))
        return packer.pack(stage.opens(of_unit)) if stage.opens and lasting is not None else []

    with connected(settings):
        needs = worker_needs(model_bytes(project, name) if weighs else None)
        most = -(-run.output.pending.num_rows // settings.unit_rows)
        count = worker_count(name, settings.worker_count, most, needs, run.report.say)
        if settings.worker_inputs == "shipped":
            lasting, paths = Packer(ray.put).pack(lasting_files(stage, project.pipeline.resources, folders, run)), []
        first = next(units)
        # What all units share is sent to each worker once.
        common = dataclasses.replace(first, pending=first.pending.schema.empty_table(), stored=first.stored.schema.empty_table())
        workers = start_workers(count, needs, common, lasting)
        try:
            least = model_bytes(project, name, 0) if weighs else None
            checks = [worker.check.remote(version(), paths, least) for worker in workers]
            try:
                hosts = answers(checks, run.report.stop, run.report.say)
            except ray.exceptions.RayError as error:
                why = " ".join(str(error).split())[-300:]
                raise ValueError(
                    f"project.workers: a worker failed as it started; is latentmill installed on every host? ({why})"
                ) from None
            if hosts is None:  # the user has stopped
                return
            check_hosts(hosts, sum(file.size for file in lasting or ()))
            run.report.say(f"{len(workers)} workers on Ray, {settings.unit_rows} rows at a time")
            yield from results(workers, itertools.chain([first], units), run, files_of)
        except ray.exceptions.RayActorError as error:
            raise ValueError(
                f"{name}: a unit of {settings.unit_rows} rows ended its worker {RETRIES + 1} times, perhaps for lack of memory; "
                f"lower [project] unit_rows or worker_count ({' '.join(str(error).split())[:200]})"
            ) from None
        finally:
            if lasting is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    leaving = [worker.leave.remote() for worker in workers]
                    ray.wait(leaving, num_returns=len(leaving), timeout=GOODBYE_SECONDS)
            for worker in workers:
                ray.kill(worker)


def has_model(project: Project, name: str) -> bool:
    stage = project.stage(name)
    if stage.model:
        return stage.model(project.config.sections[name])
    return any(isinstance(project.pipeline.resources[need], Weights) for need in stage.needs)


def model_bytes(project: Project, name: str, budget: int | None = None) -> int:
    found = forecast(project, name, outlook(project, budget))
    return found.peak if found else 0


def start_workers(count: int, needs: dict[str, float], common: WorkUnit, lasting: list[ShippedFile] | None = None) -> list[Any]:
    actor = ray.remote(concurrency_groups={"work": 1, "control": 1})(Worker)
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own: dict[str, Any] = {names[name]: amount for name, amount in needs.items() if name in names}
    own["resources"] = {name: amount for name, amount in needs.items() if name not in names}
    # Ray starts a dead actor again, with the unit that it had.
    actor = actor.options(max_restarts=-1, max_task_retries=RETRIES, **own)
    run = uuid.uuid4().hex[:12]
    return [actor.remote(f"latentmill-{run}-{number}", common, lasting) for number in range(count)]


def results(workers: list[Any], units: Iterator[WorkUnit], run: Run[Any], files_of: Files) -> Iterator[Item]:
    """Results of the unit that is finished first come first. After an error no unit begins, and it is raised at the end."""
    under_way: dict[Any, tuple[Any, int]] = {}
    total, done, peak, stopped = run.output.pending.num_rows, 0, 0, False
    error: BaseException | None = None  # the first; what the other workers have finished is kept too

    def give(worker: Any) -> None:
        if not error and not run.report.stop() and (unit := next(units, None)):
            sent = files_of(unit)
            reference = worker.compute.remote(unit.pending, unit.stored, *([sent] if sent else []))
            under_way[reference] = worker, unit.pending.num_rows

    for _ in range(AHEAD):
        for worker in workers:
            give(worker)
    while under_way:
        ready, _ = ray.wait(list(under_way), num_returns=1, timeout=0.5)
        if (error or run.report.stop()) and not stopped:
            stopped = True
            for worker in workers:
                worker.stop.remote()
        for reference in ready:
            worker, rows = under_way.pop(reference)
            result: Result = ray.get(reference)
            error = error or result.error
            give(worker)
            # By now the worker has its next unit: it does not wait until these rows are committed.
            for line in result.lines:
                run.report.say(line)
            yield from result.items
            done, peak = done + rows, max(peak, result.peak)
            run.report.progress(done, total, "rows")
    if error:
        raise error
    if peak:
        run.report.say(f"peak memory {peak / 1e9:.2g} GB a worker")
