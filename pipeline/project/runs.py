"""Training runs: one folder each, kept when the settings change, with a record in run.json and a name if the user gave one.

A stage trains if its table has the columns of the training loop. `run.json` is written when a run begins, before its table has
a manifest, so that an interrupted run can be listed and continued too.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.project.config import FILE as CONFIG
from pipeline.project.config import Overrides, load
from pipeline.project.project import FixedTable, Project
from pipeline.project.recipe import recipe_id, recorded
from pipeline.store.disk import atomic_write, make_folder
from stages.settings import nearest
from stages.untrusted import read_json

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.store.table import TableFolder
    from schemas.table import TableSchema

FILE = "run.json"
COLUMNS = {"step", "split", "sample", "loss", "lr", "seconds", "peak_bytes"}  # what the training loop writes
FACTS = ("lr", "seconds", "peak_bytes")  # of a step
WINDOW = 50  # steps whose mean is the last loss of a run
RECIPE = re.compile(r"[0-9a-f]{12}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class TrainingRun:
    stage: str
    recipe: str  # the name of its folder, 12 hex digits
    name: str  # that the user gave, or ""
    table: TableFolder
    record: Mapping[str, Any] = field(repr=False)  # the content of run.json
    current: bool = False  # the run of the present settings

    @property
    def label(self) -> str:
        return self.name or self.recipe

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted keys, such as "train.lr"."""
        return flatten(self.record.get("settings", {}))

    def rows(self, columns: Sequence[str] = ()) -> pa.Table:
        """These columns or all; one row per step, split ("train", "validation") and sample, of an unfinished run too."""
        return self.table.committed(columns)  # not kept: of many long runs, the rows would fill the memory of a page

    @functools.cached_property
    def _means(self) -> tuple[pa.Table, pa.Table]:
        rows = self.rows(["step", "split", "loss", *FACTS])
        return by_step(rows, "train", *FACTS), by_step(rows, "validation")

    @property
    def steps(self) -> pa.Table:
        """One row per training step: step, loss (mean of its samples), lr, seconds, peak_bytes (so far)."""
        return self._means[0]

    @property
    def held_out(self) -> dict[int, float]:
        """step -> mean loss, without steps whose samples are not all measured yet."""
        found = self._means[1]
        return dict(zip(found["step"].to_pylist(), found["loss"].to_pylist(), strict=True))

    @property
    def checkpoints(self) -> dict[int, Path]:
        paths = self.table.folder.glob("artifacts/checkpoints/step-*/state.json")
        return dict(sorted((int(path.parent.name.split("-")[1]), path.parent) for path in paths))

    @functools.cached_property
    def adapters(self) -> dict[str, int]:
        """sha256 of an adapter file in a checkpoint -> step."""
        found = {}
        for step, folder in self.checkpoints.items():
            try:
                files = read_json(folder / "state.json")["files"]
                found.update({files[name]["sha256"]: step for name in files if name.startswith("adapter")})
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged, or being deleted
        return found

    @property
    def marked_step(self) -> int | None:
        """The checkpoint that the user has marked as the best, while it exists."""
        step = self.record.get("marked")
        return step if step in self.checkpoints else None

    @property
    def best_step(self) -> int | None:
        """The checkpoint with the lowest held-out loss, except step 0."""
        losses = {step: loss for step, loss in self.held_out.items() if step and step in self.checkpoints}
        return min(losses, key=lambda step: (losses[step], step), default=None)


def by_step(rows: pa.Table, split: str, *columns: str) -> pa.Table:
    """One row per step: step, mean loss, maximum of `columns`; without steps of which some held-out samples are not measured."""
    import pyarrow.compute as pc

    own = rows.filter(pc.equal(rows["split"], split)).group_by("step")
    means = own.aggregate([("loss", "mean"), ("loss", "count"), *((name, "max") for name in columns)]).sort_by("step")
    if split == "validation":
        means = means.filter(pc.equal(means["loss_count"], pc.max(means["loss_count"])))
    names = [f"{name}_max" for name in columns]
    return means.select(["step", "loss_mean", *names]).rename_columns(["step", "loss", *columns])


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"ema": {"decay": 0.9}}} -> {"train.ema.decay": 0.9}."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return found


def trains(schema: TableSchema) -> bool:
    return set(schema.stored.names) >= COLUMNS


def find_runs(project: Project) -> list[TrainingRun]:
    """The newest first."""
    from pipeline.store.table import TableFolder

    found = []
    for stage in project.stage_names:
        schema = project.stage(stage).writes
        if not trains(schema):
            continue
        try:
            current = project.current(stage).folder.name
        except ValueError:  # an input or the weights are missing, so no run is that of the present settings
            current = ""
        for folder in (project.path / "tables" / stage).glob("*/"):
            table = TableFolder(folder, schema)
            if RECIPE.fullmatch(folder.name) and (record := read_record(table)) is not None:
                found.append(TrainingRun(stage, folder.name, record.get("name", ""), table, record, folder.name == current))
    return sorted(found, key=lambda run: str(run.record.get("started", "")), reverse=True)


def find_run(project: Project, text: str) -> TrainingRun:
    """The run of this name, else the one whose recipe begins with `text`. Raises ValueError."""
    runs = find_runs(project)
    found = [run for run in runs if run.name == text] or [run for run in runs if text and run.recipe.startswith(text)]
    if len(found) == 1:
        return found[0]
    labels = [run.label for run in runs]
    if found:
        raise ValueError(f"run {text!r} is the beginning of {len(found)}: {', '.join(run.recipe for run in found)}")
    there = f"; there are {', '.join(labels)}" if labels else f"; {project.name} has no run yet"
    raise ValueError(f"there is no run {text!r}{nearest(text, labels)}{there}")


def read_record(table: TableFolder) -> dict[str, Any] | None:
    """The content of run.json, or the same made from the manifest; None if the folder holds no run."""
    try:
        found = read_json(table.folder / FILE)
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass  # damaged
    if not table.exists:
        return None
    manifest = table.manifest()
    recipe = manifest.get("recipe", {})
    settings = {table.schema.name: recipe.get("settings", {})}
    started = datetime.datetime.fromtimestamp(table.manifest_file.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")
    return {"recipe": recipe, "settings": settings, "started": started, "versions": manifest.get("facts", {}).get("versions", {})}


def write_record(table: TableFolder, record: Mapping[str, Any]) -> None:
    make_folder(table.folder)
    with atomic_write(table.folder / FILE) as temporary:
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


AUTO = "auto"  # a number of steps that the data decide


def begin(project: Project, stage: str, versions: Mapping[str, str], name: str = "", steps: int = 0) -> None:
    """Record that a run of the present settings starts or goes on; without `name` it keeps its name. Raises ValueError.

    `steps`: of the whole run, in place of "auto".
    """
    table = project.current(stage)
    old = read_record(table) or {}
    if name:
        check_name(project, name, table.folder.name)
    settings = present_settings(project, stage)
    if settings[stage].get("steps") == AUTO:
        settings[stage]["steps"] = steps
    write_record(
        table,
        {
            "name": name or old.get("name", ""),
            "started": old.get("started") or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "recipe": project.recipe(stage),
            "settings": settings,
            "versions": dict(versions),
            **{key: value for key, value in old.items() if key == "marked"},
        },
    )


def rename(project: Project, run: TrainingRun, name: str) -> None:
    check_name(project, name, run.recipe)
    write_record(run.table, {**run.record, "name": name})


def mark(run: TrainingRun, step: int | None) -> None:
    """Remember a checkpoint as the best one of its run; None: none. Raises ValueError."""
    if step is not None and step not in run.checkpoints:
        there = ", ".join(map(str, run.checkpoints)) or "none"
        raise ValueError(f"{run.label} has no checkpoint of step {step}; its checkpoints: {there}")
    kept = {key: value for key, value in run.record.items() if key != "marked"}
    write_record(run.table, kept if step is None else {**kept, "marked": step})


def check_name(project: Project, name: str, recipe: str) -> None:
    """Raises ValueError for a name that is not valid, looks like a recipe, or belongs to another run than `recipe`."""
    if not NAME.fullmatch(name) or RECIPE.fullmatch(name):
        raise ValueError(f"a run's name must be up to 40 letters, digits, dots, underscores and hyphens, got {name!r}")
    for run in find_runs(project):
        if run.name == name and run.recipe != recipe:
            raise ValueError(
                f"the run {run.recipe} is called {name!r} already; choose another name, or go on with it: --run {name}"
            )


def present_settings(project: Project, stage: str) -> dict[str, Any]:
    """Section -> settings that decide the rows of `stage`: [project], the stage and those before it. Plain JSON data."""
    names = [*project.pipeline.upstream(stage), stage]
    sections = {"project": project.config.project, **{name: project.config.sections[name] for name in names}}
    return {name: recorded(section) for name, section in sections.items()}


def differences(run: TrainingRun, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in `run`, value in `other`). Sections that `other` lacks are left out."""
    mine = run.settings
    sections = {key.split(".")[0] for key in mine} & {key.split(".")[0] for key in other}
    keys = [key for key in mine if key.split(".")[0] in sections]
    return {key: (mine.get(key), other.get(key)) for key in keys if other.get(key) not in (mine.get(key), AUTO)}


def other_data(project: Project, run: TrainingRun, different: Iterable[str]) -> bool:
    """True if `run` was trained on other data than are there now, and not because of one of the settings `different`."""
    from stages.tuner.config import TrainingConfig

    apart = {f"{run.stage}.{each.name}" for each in fields(TrainingConfig)} - {f"{run.stage}.initial"}
    if not {".".join(key.split(".")[:2]) for key in different} <= apart:
        return False
    with suppress(ValueError):  # an input or the weights are missing
        return bool(project.recipe(run.stage).get("snapshot") != run.record.get("recipe", {}).get("snapshot"))
    return False


def choose(project: Project, text: str, overrides: Overrides = ()) -> None:
    """Make `project` use the settings and the table of a recorded run. Raises ValueError if its settings are no longer valid."""
    run = find_run(project, text)
    changed: list[Any] = []
    for section, values in run.record.get("settings", {}).items():
        now = project.config.project if section == "project" else project.config.sections.get(section)
        present = recorded(now) if now is not None else {}
        changed += [(f"{section}.{key}", value) for key, value in values.items() if present.get(key) != value]
    given = overrides.items() if isinstance(overrides, Mapping) else overrides
    config = load(project.path / CONFIG, [*changed, *given])
    project.fix(FixedTable(run.stage, run.table, run.record.get("recipe", {})), config)


def news(project: Project, stage: str) -> Iterator[str]:
    """Messages before a new run of which an earlier one differs only in its data: it starts at step 0, or from that adapter. And
    before a run that is longer than the settings ask for is taken back.
    """
    from pipeline.terminal import format_seconds

    recipe, table = project.recipe(stage), project.current(stage)
    if read_record(table) is not None:
        asked = getattr(project.config.sections[stage], "steps", AUTO)  # a stage of one's own may train without this setting
        there = max(table.rows(columns=["step"])["step"].to_pylist(), default=0) if table.exists else 0
        if isinstance(asked, int) and there > asked:
            yield (
                f"the run has {there} steps, {asked} are asked for: its adapter is that of step {asked} again. For the longer "
                f"one: SET={stage}.steps={there} with make, `export --step {there}`, or {stage}.steps in project.toml"
            )
        return
    same = [run for run in find_runs(project) if _without_data(run.record.get("recipe", {})) == _without_data(recipe)]
    if not same:
        return
    linked = (project.path / "tables" / f"{stage}.lance").resolve().parent.name  # the last command's run, perhaps an earlier one
    before = next((run for run in same if run.recipe == linked), same[0])
    yield f"the data have changed since the run {before.label}: this is a new run, from step 0; {before.label} is kept"
    adapter = before.table.folder / "artifacts" / str(project.stage(stage).result)
    config = project.config.sections[stage]
    # A stage of one's own may train without these settings.
    if adapter.is_file() and before.steps.num_rows and hasattr(config, "steps") and hasattr(config, "initial"):
        seconds, steps = sum(before.steps["seconds"].to_pylist()) / before.steps.num_rows, config.steps
        steps = before.steps.num_rows if steps == AUTO else steps
        yield (
            f"{steps} steps take about {format_seconds(seconds * steps)}, by the speed of {before.label}; to start from its "
            f"adapter instead, with fewer steps and a new optimizer state: "
            f"--set '{stage}.initial=\"{adapter.relative_to(project.path)}\"'"
        )


def _without_data(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in ("snapshot", "tensors")}


def check_resumable(project: Project, stage: str) -> None:
    """Raises ValueError if the chosen run of `stage` cannot go on, since its data or weights have changed."""
    run = project.fixed
    if run is None or run.stage != stage:
        return
    fresh = project.fresh_recipe(stage)
    if recipe_id(fresh) != run.table.folder.name:
        changed = [key for key in fresh if fresh[key] != run.recipe.get(key)]
        raise ValueError(
            f"the run {run.table.folder.name} cannot go on: {', '.join(changed)} of its recipe changed since it began "
            "(what it was trained on, or its weights); it can be exported, drawn with and compared"
        )
