"""The tables, views and functions that SQL finds in a project: `open_catalog`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.project.project import Project
from pipeline.project.runs import WINDOW, TrainingRun, differences, find_runs, flatten, other_data, present_settings, trains
from pipeline.store.lock import lock_holder
from pipeline.terminal import format_cell
from stages.pipelines import load

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from pipeline.store.table import TableFolder
    from schemas.table import TableSchema

# The value of a bfloat16 word: sign, 8 bits of exponent, 7 of fraction. Denormals count as zero.
BF16 = """
create or replace temp macro bf16(u) as (case
    when (u & 32767) = 0 or ((u >> 7) & 255) = 0 then 0.0
    when ((u >> 7) & 255) = 255 and (u & 127) > 0 then 'nan'::float
    when ((u >> 7) & 255) = 255 then (case when u >= 32768 then '-inf' else 'inf' end)::float
    else (1 - 2 * (u >> 15)::int) * pow(2.0, ((u >> 7) & 255)::int - 127) * (1 + (u & 127) / 128.0) end)::float
"""

OTHER_DATA = "and other data"
TABLES = {
    "stage": "string",
    "built": "bool",
    "recipe": "string",
    "rows": "int64",
    "dead": "int64",
    "bytes": "int64",
    "folder": "string",
    "doc": "string",
}
COLUMNS = {"stage": "string", "name": "string", "type": "string", "key": "bool", "doc": "string"}
RUNS = {
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
    "marked_step": "int64",
    "peak_bytes": "int64",
    "footprint": "int64",
    "data_rows": "int64",
    "snapshot": "string",
    "settings": "string",
    "differs": "string",
    "versions": "string",
    "folder": "string",
}


def open_catalog(
    project: Project | Path | str,
    connection: duckdb.DuckDBPyConnection | None = None,
    tables: Mapping[str, Any] | None = None,
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with every table and view of a project; a table that is not built has columns and no rows.

    Beside the stages' tables there are `tables` (what is built), `columns` (what each column holds), `runs`, the rows of all
    runs (`all_train`), and the function bf16(word), the value of a stored bfloat16. Tensors are left out. `tables`: of
    `read_tables`, if they are read already.
    """
    import duckdb

    opened = Project(project) if isinstance(project, str | Path) else project
    catalog = connection or duckdb.connect(config={"autoinstall_known_extensions": "false"})  # a typo must not download anything
    for name, rows in (read_tables(opened) if tables is None else tables).items():
        catalog.register(name, rows)
    catalog.execute(BF16)
    for name, view in opened.pipeline.views.items():
        catalog.execute(f"create or replace temp view {name} as {view.sql}")
    return catalog


def read_tables(opened: Project) -> dict[str, Any]:
    """What SQL finds, by name: tables of Arrow, and data sets that are read when a query asks for them."""
    import pyarrow as pa

    from pipeline.commands.rows_of_runs import RowsOfRuns

    runs = find_runs(opened)
    facts = [run_facts(opened, run) for run in runs]
    registered: dict[str, Any] = {
        "tables": pa.Table.from_pylist(list(_tables(opened)), schema=pa.schema(TABLES)),
        "columns": pa.Table.from_pylist(list(_columns(opened)), schema=pa.schema(COLUMNS)),
        "runs": pa.Table.from_pylist(facts, schema=pa.schema(RUNS)),
        **rows_of_results(opened, runs),
    }
    for name, schema in table_schemas(opened).items():
        tables = folders_of(opened, name)
        found = [({"recipe": each.folder.name, "family": _drew(opened, each)}, each.rows()) for each in tables]
        if name not in opened.stage_names:
            registered[name] = _joined(("recipe", "family"), found, schema)
        else:
            rows = found[0][1] if found else schema.stored.empty_table()
            registered[name] = _with_nulls(rows, opened.pipeline.null_if_empty)
        if trains(schema):
            own = {(run.recipe, run.label): run.table for run in runs if run.stage == name}
            registered[f"all_{name}"] = RowsOfRuns(own, schema)
    return registered


def _with_nulls(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in set(names) & set(rows.column_names):
        place = rows.schema.get_field_index(name)
        values = pc.if_else(pc.equal(rows[name], ""), pa.scalar(None, pa.string()), rows[name])
        rows = rows.set_column(place, rows.schema.field(place).with_nullable(True), values)
    return rows


def dicts(catalog: duckdb.DuckDBPyConnection, sql: str, most: int | None = None, **values: Any) -> list[dict[str, Any]]:
    """The rows of a query, at most `most`. `values` are its parameters: `step=5` sets `$step`."""
    result = catalog.execute(sql, values or None)
    names = [column[0] for column in result.description]
    found = result.fetchall() if most is None else result.fetchmany(most)
    return [dict(zip(names, row, strict=True)) for row in found]


def table_schemas(project: Project) -> dict[str, TableSchema]:
    """Of the stages' tables, and of those that commands write, such as generated."""
    stages = {name: project.stage(name).writes for name in project.stage_names}
    return stages | {name: load(reference) for name, reference in project.pipeline.tables.items()}


def folders_of(project: Project, name: str) -> list[TableFolder]:
    """The built folders whose rows SQL finds as a table: of a stage's one, of a command's table all."""
    from pipeline.store.table import TableFolder

    if name in project.stage_names:
        found = [project.folder(name)]
    else:
        schema = table_schemas(project)[name]
        found = [TableFolder(path.parent, schema) for path in sorted((project.path / "tables" / name).glob("*/manifest.json"))]
    return [table for table in found if table.exists]  # one whose manifest is damaged does not


def _tables(project: Project) -> Iterator[dict[str, Any]]:
    for name, schema in table_schemas(project).items():
        built = folders_of(project, name)
        usages = [table.usage() for table in built]
        folder = built[-1].folder if built else project.path / "tables" / name
        yield {
            "stage": name,
            "built": bool(built),
            "recipe": folder.name if built else None,
            **{key: sum(usage[key] for usage in usages) for key in ("rows", "dead", "bytes")},
            "folder": str(folder),
            "doc": schema.doc,
        }


def _columns(project: Project) -> Iterator[dict[str, Any]]:
    for name, schema in table_schemas(project).items():
        for field in schema.stored:
            doc = (field.metadata or {}).get(b"doc", b"").decode()
            yield {"stage": name, "name": field.name, "type": str(field.type), "key": field.name in schema.key, "doc": doc}


def run_facts(project: Project, run: TrainingRun) -> dict[str, Any]:
    """The run's row of the table `runs`, and "different": key -> (value of the run, present value)."""
    import pyarrow.compute as pc

    run = dataclasses.replace(run)  # what it reads is freed with it: of many long runs, that would fill the memory of a page
    steps = run.steps
    count = steps["step"][-1].as_py() if steps.num_rows else 0
    snapshot = run.record.get("recipe", {}).get("snapshot") or {}
    best, held_out, settings = run.best_step, run.held_out, run.settings
    wanted = settings.get(f"{run.stage}.steps")
    result = run.table.folder / "artifacts" / (project.stage(run.stage).result or "-")
    writer = lock_holder(run.table.folder / "lock")
    facts = (run.table.manifest() if run.table.exists else {}).get("facts", {}).get("run", {})
    # The adapter of a run that was stopped while it was made longer is that of fewer steps.
    left = bool(facts.get("left")) and isinstance(wanted, int) and count < wanted
    # The loss of one step is noise.
    recent = [loss for loss in steps["loss"][-WINDOW:].to_pylist() if loss is not None]
    different = differences(run, flatten(present_settings(project, run.stage))) if settings else {}
    also = [OTHER_DATA] if different and not run.current and other_data(project, run, different) else []
    return {
        "run": run.recipe,
        "name": run.name or None,
        "stage": run.stage,
        "current": run.current,
        "state": "running" if writer else "finished" if result.exists() and not left else "interrupted",
        "started": run.record.get("started"),
        "seconds": float(pc.sum(steps["seconds"]).as_py() or 0),
        "steps": count,
        "wanted_steps": wanted if isinstance(wanted, int) else None,
        "loss": sum(recent) / len(recent) if recent else None,
        "held_out_loss": list(held_out.values())[-1] if held_out else None,
        "best_step": best,
        "best_loss": held_out[best] if best is not None else None,
        "marked_step": run.marked_step,
        "peak_bytes": pc.max(steps["peak_bytes"]).as_py() or 0,
        "footprint": facts.get("footprint"),
        "data_rows": snapshot.get("rows"),
        "snapshot": snapshot.get("sha256"),
        "settings": json.dumps(settings, ensure_ascii=False),
        "differs": ", ".join([*(f"{key} {plain(value)}" for key, (value, _) in different.items()), *also]),
        "different": different,
        "versions": json.dumps(run.record.get("versions", {})),
        "folder": str(run.table.folder),
    }


def plain(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):  # such as [[images.folder]]
        given = ([f"{key} {plain(one)}" for key, one in each.items() if one not in (None, "", [])] for each in value)
        return format_cell("; ".join(" ".join(each) for each in given))
    return "unset" if value is None else format_cell(value if isinstance(value, str | float) else json.dumps(value))


def rows_of_results(project: Project, runs: Sequence[TrainingRun]) -> dict[str, pa.Table]:
    """Table name -> rows of all settings whose file exists (all_samples), with `recipe`, `run_name`, `family` in front.

    `run_name` is the run of the adapter, null for the base, the start of the adapter's id if the run is unknown. `family` is
    the model that drew.
    """
    import pyarrow as pa

    from pipeline.store.table import TableFolder

    found = {}
    labels = {digest: run.label for run in runs for digest in run.adapters}
    for name in project.pipeline.results:
        stored = project.stage(name).writes.stored
        if not {"adapter_id", "path"} <= set(stored.names):
            continue
        rows: list[dict[str, Any]] = []
        for folder in sorted((project.path / "tables" / name).glob("*/rows.lance")):
            table = TableFolder(folder.parent, project.stage(name).writes)
            about = {"recipe": folder.parent.name, "family": _drew(project, table)}
            rows += [
                {**about, "run_name": labels.get(digest := row["adapter_id"].rpartition("*")[2], digest[:8] or None)} | row
                for row in table.committed().drop_columns(["live"]).to_pylist()
                if (folder.parent / "artifacts" / row["path"]).is_file()
            ]
        schema = pa.schema([*((column, pa.string()) for column in ("recipe", "run_name", "family")), *stored])
        found[f"all_{name}"] = pa.Table.from_pylist(rows, schema=schema)
    return found


def _drew(project: Project, table: TableFolder) -> str:
    """The family that a table's pictures are of, "" without families."""
    if not project.pipeline.families:
        return ""
    made = table.manifest()["recipe"] if table.exists else {}
    return made.get("family") or made.get("settings", {}).get("family") or project.family.name


def _joined(front: Sequence[str], parts: Sequence[tuple[dict[str, str], pa.Table]], schema: TableSchema) -> pa.Table:
    import pyarrow as pa

    whole = pa.schema([*((name, pa.string()) for name in front), *schema.stored])
    tables = [whole.empty_table()]
    for texts, rows in parts:
        columns = [pa.array([texts[name]] * rows.num_rows, pa.string()) for name in front]
        tables.append(pa.Table.from_arrays([*columns, *rows.columns], schema=whole))
    return pa.concat_tables(tables)
