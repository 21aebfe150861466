"""`latentmill runs`: lists all training runs of a project, and names them. `runs_table` is the table `runs` of queries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from pipeline.options import with_project
from pipeline.project.run import Run, flatten
from pipeline.project.runs import WINDOW, differences, find_run, find_runs, present_settings, rename
from pipeline.store.lock import lock_holder
from pipeline.terminal import format_cell, format_seconds, format_table
from stages.pipelines import load

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.project.project import Project

SHOWN = 3  # settings that a line of the list names


@click.command("runs")
@click.argument("run", required=False, envvar="LATENTMILL_RUN")
@click.option("--name", envvar="LATENTMILL_NAME", help="Give RUN this name.")
@with_project
def command(run: str | None, name: str | None, project: Project) -> None:
    """List all training runs of a project, or show or name one run. RUN is the name of a run, or the first digits of
    its recipe. The recipe is the run's id of 12 hex digits. With RUN, the facts about this run are shown. With RUN and
    `--name`, this run gets the given name. Earlier runs are kept when the settings change. To use an earlier run in
    another command, give that command the option `--run` with the run's name.
    """
    if name and not run:
        raise ValueError("which run? latentmill runs RUN --name NAME; `latentmill runs` lists them")
    if run:
        found = find_run(project, run)
        if name:
            rename(project, found, name)
            click.echo(f"the run {found.recipe} is called {name}")
        else:
            click.echo(describe_run(project, found))
        return
    click.echo(list_runs(project) or f"{project.name} has no run yet; run: latentmill train")


def list_runs(project: Project) -> str:
    rows = []
    for run in find_runs(project):
        facts = run_facts(project, run)
        different = [f"{key.removeprefix(run.stage + '.')} {_plain(value)}" for key, (value, _) in _differs(project, run).items()]
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        rows.append(
            (
                f"{run.label}{' *' if run.current else ''}",
                f"{facts['steps']}/{facts['wanted_steps']}" if facts["wanted_steps"] else str(facts["steps"]),
                _number(facts["loss"]),
                f"{facts['best_step']}: {facts['best_loss']:.4g}" if facts["best_step"] else None,
                ", ".join(different[:SHOWN]) + more
                if different
                else ("present settings" if run.current else "none: other data, weights or version"),
            )
        )
    return format_table(("run", "steps", "loss", "best", "settings that differ"), rows, right=("steps", "loss")) if rows else ""


def describe_run(project: Project, run: Run) -> str:
    facts = run_facts(project, run)
    facts["seconds"] = format_seconds(facts["seconds"])
    lines = [(key, value) for key, value in facts.items() if key not in ("settings", "differs", "versions")]
    lines += [(key, f"{_plain(mine)}, now {_plain(now)}") for key, (mine, now) in _differs(project, run).items()]
    return format_table(("fact", "value"), lines)


def run_facts(project: Project, run: Run) -> dict[str, Any]:
    """The run's row of the table `runs`: a value for each of `COLUMNS`."""
    steps = run.steps
    count = steps["step"][-1].as_py() if steps.num_rows else 0
    snapshot = run.record.get("recipe", {}).get("snapshot") or {}
    best, held_out = run.best_step, run.held_out
    wanted = flatten(run.record.get("settings", {})).get(f"{run.stage}.steps")
    writer = lock_holder(run.table.folder / "lock")
    state = "running" if writer else "finished" if _is_finished(project, run) else "interrupted"
    return {
        "run": run.recipe,
        "name": run.name or None,
        "stage": run.stage,
        "current": run.current,
        "state": state,
        "started": run.record.get("started"),
        "seconds": float(sum(value or 0 for value in steps["seconds"].to_pylist())),
        "steps": count,
        "wanted_steps": wanted if isinstance(wanted, int) else None,
        "loss": _recent_loss(steps),
        "held_out_loss": list(held_out.values())[-1] if held_out else None,
        "best_step": best,
        "best_loss": held_out[best] if best is not None else None,
        "peak_bytes": max((value or 0 for value in steps["peak_bytes"].to_pylist()), default=0),
        "data_rows": snapshot.get("rows"),
        "snapshot": snapshot.get("sha256"),
        "settings": json.dumps(run.settings, ensure_ascii=False),
        "differs": ", ".join(f"{key} {_plain(value)}" for key, (value, _) in _differs(project, run).items()),
        "versions": json.dumps(run.record.get("versions", {})),
        "folder": str(run.table.folder),
    }


def _recent_loss(steps: pa.Table) -> float | None:
    # The loss of one step is noise.
    losses = [loss for loss in steps["loss"].to_pylist()[-WINDOW:] if loss is not None]
    return sum(losses) / len(losses) if losses else None


def _is_finished(project: Project, run: Run) -> bool:
    return (run.table.folder / "artifacts" / str(getattr(project.stage(run.stage), "result", "") or "-")).exists()


def _differs(project: Project, run: Run) -> dict[str, tuple[Any, Any]]:
    if not run.settings:
        return {}
    return differences(run, flatten(present_settings(project, run.stage)))


COLUMNS = {
    "run": "string",
    "name": "string",
    "stage": "string",
    "current": "bool",
    "state": "string",
    "started": "string",
    "seconds": "float64",
    "steps": "int64",
    "wanted_steps": "int64",
    "loss": "float64",
    "held_out_loss": "float64",
    "best_step": "int64",
    "best_loss": "float64",
    "peak_bytes": "int64",
    "data_rows": "int64",
    "snapshot": "string",
    "settings": "string",
    "differs": "string",
    "versions": "string",
    "folder": "string",
}


def runs_table(project: Project) -> pa.Table:
    import pyarrow as pa

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    return pa.Table.from_pylist([run_facts(project, run) for run in find_runs(project)], schema=schema)


def rows_of_runs(project: Project) -> dict[str, pa.Table]:
    """Table name -> rows of all runs (all_train), with `run` and `run_name` in front, and the tables of results and commands."""
    import pyarrow as pa

    from pipeline.project.runs import trains

    found = {}
    for stage in project.stage_names:
        schema = project.stage(stage).writes
        if not trains(schema):
            continue
        stored = schema.stored
        names = pa.schema([("run", pa.string()), ("run_name", pa.string()), *stored])
        parts = [names.empty_table()]
        for run in find_runs(project):
            if run.stage == stage:
                rows = run.rows.cast(stored)
                texts = [pa.array([text] * rows.num_rows, pa.string()) for text in (run.recipe, run.label)]
                parts.append(pa.Table.from_arrays([*texts, *rows.columns], schema=names))
        found[f"all_{stage}"] = pa.concat_tables(parts)
    return found | rows_of_results(project)


def rows_of_results(project: Project) -> dict[str, pa.Table]:
    """Table name -> rows of all settings whose file exists (all_samples), with `recipe` and `run_name` in front.

    `run_name` is the run of the adapter, null for the base, the start of the adapter's id if the run is unknown.
    """
    import pyarrow as pa

    from pipeline.store.table import TableFolder

    found = {}
    for name in project.pipeline.results:
        stored = project.stage(name).writes.stored
        if not {"adapter_id", "path"} <= set(stored.names):
            continue
        labels = {digest: run.label for run in find_runs(project) for digest in run.adapters}
        rows: list[dict[str, Any]] = []
        for folder in sorted((project.path / "tables" / name).glob("*/rows.lance")):
            table = TableFolder(folder.parent, project.stage(name).writes)
            rows += [
                {"recipe": folder.parent.name, "run_name": labels.get(row["adapter_id"], row["adapter_id"][:8] or None)} | row
                for row in table.committed().drop_columns(["live"]).to_pylist()
                if (folder.parent / "artifacts" / row["path"]).is_file()
            ]
        schema = pa.schema([("recipe", pa.string()), ("run_name", pa.string()), *stored])
        found[f"all_{name}"] = pa.Table.from_pylist(rows, schema=schema)
    return found | rows_of_commands(project)


def rows_of_commands(project: Project) -> dict[str, pa.Table]:
    """Table name -> rows of all folders of a table that a command writes (generated), with `recipe` in front."""
    import pyarrow as pa

    from pipeline.store.table import TableFolder

    found = {}
    for name, reference in project.pipeline.tables.items():
        table_schema = load(reference)
        schema = pa.schema([("recipe", pa.string()), *table_schema.stored])
        parts = [schema.empty_table()]
        for folder in sorted((project.path / "tables" / name).glob("*/manifest.json")):
            table = TableFolder(folder.parent, table_schema)
            if table.exists:  # its manifest is not damaged
                rows = table.rows()
                names = pa.array([folder.parent.name] * rows.num_rows, pa.string())
                parts.append(pa.Table.from_arrays([names, *rows.columns], schema=schema))
        found[name] = pa.concat_tables(parts)
    return found


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _plain(value: Any) -> str:
    return "unset" if value is None else format_cell(value if isinstance(value, str | float) else json.dumps(value))
