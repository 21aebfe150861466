"""From the pages of a project to the data that the templates show: rows of SQL, curves, cards, cells, texts."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.catalog import run_facts
from pipeline.commands.runs import differing_settings
from pipeline.commands.status import PERHAPS, TableState, describe, settled, states
from pipeline.project.project import Project
from pipeline.project.runs import WINDOW, TrainingRun, find_runs, trains
from pipeline.queue import Job, Queue
from pipeline.store.disk import format_bytes
from pipeline.terminal import format_seconds
from stages.pipelines import Block, Cards, Chart, Editor, Form, Listing, Page, Query, Sheet, load
from stages.tuner.control import PAUSE

if TYPE_CHECKING:
    from pipeline.store.table import TableFolder

CELL = 240  # letters of a cell
ROWS_SHOWN = 200  # rows of a table
PER_PAGE = 60  # cards and texts on one page
POINTS = 400  # points of a curve, about
SHOWN_JOBS = 12
SHOWN_PICTURES = 6

# Of runs: at least 3:1 against the page, light and dark.
COLOURS = (
    "#2f7fd0",
    "#d9601a",
    "#239a4b",
    "#d43d51",
    "#8e63c7",
    "#a87b00",
    "#c9489b",
    "#1593a5",
    "#7a8291",
    "#b06a4f",
)

Row = dict[str, Any]


@contextmanager
def errors_as_text(into: Row) -> Iterator[None]:
    """Errors of DuckDB and ValueErrors of the block become `into["error"]`, one line."""
    import duckdb

    try:
        yield
    except (duckdb.Error, ValueError) as error:
        into["error"] = " ".join(str(error).split())


def page_number(chosen: Mapping[str, str], rows: int) -> tuple[int, int]:
    """(page from 0, pages): the chosen page, or the nearest that exists."""
    pages = max(1, -(-rows // PER_PAGE))
    wanted = chosen.get("page", "0")
    return min(int(wanted) if wanted.isdecimal() and len(wanted) < 9 else 0, pages - 1), pages


# Which pages there are


def pages_of(project: Project) -> dict[str, Page]:
    """The pages of blocks by name, as in the menu; the page of curves takes the place and blocks of "training", or is last."""
    found = {page.name: page for page in project.pipeline.pages}
    if training := training_page(project):
        found["training"] = training
    return found


def training_page(project: Project) -> Page | None:
    """None if the pipeline does not train."""
    names = [name for name in project.stage_names if trains(project.stage(name).writes)]
    if not names:
        return None
    table = f"all_{names[0]}"
    # From `runs`: each look into the rows of all runs reads them.
    last = f"(select greatest(1, max(steps) // {POINTS}) from runs where stage = '{names[0]}')"
    curve = (
        f"select run_name as series, step // {last} * {last} as x, {{}} as y from {table} where split = '{{}}' "
        "group by all having y is not null order by series, x"
    )
    smooth = (
        f"with points as (select run_name as series, (step - 1) // {last} * {last} + {last} as x, sum(loss) as loss, "
        f"count(*) as rows from {table} where split = 'train' and isfinite(loss) group by all) "
        "select series, x, sum(loss) over near / sum(rows) over near as y from points "
        "window near as (partition by series order by x rows between 9 preceding and current row) order by series, x"
    )
    own = [block for page in project.pipeline.pages if page.name == "training" for block in page.blocks]
    return Page(
        "training",
        "Training",
        (
            Listing(
                "Runs",
                "select coalesce(name, run) as run, state, steps, wanted_steps as of, loss, held_out_loss, best_step, "
                "marked_step, round(seconds / 60, 1) as minutes, differs as settings_that_differ from runs",
            ),
            Chart("Loss, mean of the last ten points", smooth, "step", "loss"),
            Chart(
                "Loss of held-out samples, which are not trained on",
                curve.format("avg(loss)", "validation"),
                "step",
                "loss",
            ),
            *(block for block in own if isinstance(block, Chart)),
            Chart("Learning rate", curve.format("max(lr)", "train"), "step", "learning rate"),
            Chart("Norm of the gradient", curve.format("avg(grad_norm)", "train"), "step", "norm", log=True),
            Chart("Time of a step", curve.format("avg(seconds)", "train"), "step", "seconds"),
            Chart("Peak memory of MLX", curve.format("max(peak_bytes) / 1e9", "train"), "step", "GB"),
            *(block for block in own if not isinstance(block, Chart)),
        ),
    )


# The data of a page


def overview(project: Project, query: Query) -> Row:
    found = states(project)
    tables = [
        {"name": each.stage_name, "rows": each.rows, "size": format_bytes(each.nbytes), "state": describe(each)} for each in found
    ]
    words = main_command(project)
    own = [each for each in found if each.stage_name in (*project.chain(words[-1]), words[-1])]
    disk = shutil.disk_usage(project.path)
    runs = find_runs(project)
    data: Row = {
        "tables": tables,
        "runs": [run_facts(project, run) for run in runs],
        "disk": f"{format_bytes(disk.free)} of {format_bytes(disk.total)} are free",
        "next": next_work(found, own),
        "then": next_training(found),
        "anew": new_run(found),
        "button": button(project, own),
        "command": " ".join(words),
        "pictures": newest_pictures(project, query, next((run.label for run in runs if run.current), "")),
        "pausing": any(run.current and (run.table.folder / "artifacts" / PAUSE).exists() for run in runs),
    }
    with errors_as_text(data):
        data |= queue_data(Queue(project.path))
        stage = data["told"].get("stage", "")
        present = next((run for run in runs if run.current and run.stage == stage), None)
        data["draws"] = bool(sheets(project))
        data |= {"trains": present is not None, "training": training_facts(present) if present else ""}
    return data


def next_work(found: Sequence[TableState], own: Sequence[TableState]) -> str:
    """What the main command, whose tables are `own`, begins with, else what other commands would do; "" if all is up to date."""
    left = [f"{each.stage_name}: {describe(each)}" for each in own if not settled(each)]
    others = [f"{each.stage_name}: {describe(each)}" for each in found if each not in own and not settled(each)]
    return left[0] if left else "; ".join([f"{own[-1].stage_name} is up to date", *others]) if others else ""


def button(project: Project, found: Sequence[TableState]) -> str:
    """What the main command begins with: "Train", or the stage if no training is left to do."""
    left = [each for each in found if describe(each) != "up to date"]
    training = [place for place, each in enumerate(found) if trains(project.stage(each.stage_name).writes)]
    if not training:
        return "Run"
    return "Train" if not left or found.index(left[0]) <= training[-1] else f"Run {left[0].stage_name}"


def next_training(found: Sequence[TableState]) -> str:
    """What training that has a run will do next, if that is more than to go on with it; else ""."""
    each = next((each for each in found if each.then), None)
    if each is None:
        return ""
    time = f", about {format_seconds(each.seconds)}" if each.seconds else ""
    why = ", since settings, data or weights differ" if each.anew and each.then != PERHAPS else ""
    why += ". The runs that are there are kept" if each.anew else ""
    return f"{each.stage_name}: {each.then}{time}{why}."


def new_run(found: Sequence[TableState]) -> str:
    """What the user should know before a run begins although one is there, else ""."""
    return next_training(found) if any(each.anew for each in found) else ""


def main_command(project: Project) -> list[str]:
    """What brings the project's last result up to date."""
    return ["run", ([*project.pipeline.results] or project.stage_names)[-1]]


def queue_data(queue: Queue) -> Row:
    jobs = queue.jobs()
    newest = next((job for job in jobs if job.state == "running"), next((job for job in reversed(jobs) if job.over), None))
    return {
        "jobs": [dataclasses.asdict(job) | {"over": job.over, "command": " ".join(job.words)} for job in jobs[-SHOWN_JOBS:]],
        "job": newest and newest.number,
        "works": bool(newest and newest.state == "running"),
        "log": "\n".join(queue.log(newest.number).splitlines()[-40:]) if newest else "",
        "told": told(queue, jobs),
        "queue_paused": queue.paused,
        "interrupted": any(job.state == "interrupted" for job in jobs),
    }


def told(queue: Queue, jobs: Sequence[Job]) -> Row:
    """{"job", "done", "total", "text"} of the running job, or {}."""
    job = next((job for job in jobs if job.state == "running"), None)
    found = queue.progress(job.number) if job else {}
    if not job or not found:
        return {}
    stage, done, total, unit = (found[name] for name in ("stage", "done", "total", "unit"))
    speed = (done - found["before"]) / max(found["at"] - found["began"], 1e-6)
    left = f", {format_seconds((total - done) / speed)} left" if speed > 0 and done < total else ""
    return {
        "job": job.number,
        "stage": stage,
        "done": done,
        "total": total,
        "text": f"{stage}: {done} of {total} {unit.removesuffix('s')}s{left}",
    }


def newest_pictures(project: Project, query: Query, label: str) -> list[Row]:
    """Picture, row and step of the last step, at most SHOWN_PICTURES; of the run `label`, if it has drawn, and of pictures that
    the table still has, if there are any.
    """
    here = [f"{name}/{path}" for name in project.pipeline.results for path in used_files(project.folder(name))]
    first = 'rank() over (order by starts_with("column", $label) desc, picture in (select unnest($here)) desc, step desc)'
    sql = f"select * from ({{}}) qualify {first} = 1 limit {SHOWN_PICTURES}"
    return sheet_rows(project, query, sql, label=label, here=here)


def used_files(table: TableFolder) -> list[str]:
    """RECIPE/PATH of the rows that readers see or will see; none if rows have no path."""
    import pyarrow.compute as pc

    if "path" not in table.schema.stored.names:
        return []
    rows = table.committed(["path", "live"])
    return [f"{table.folder.name}/{path}" for path in rows.filter(pc.fill_null(rows["live"], True))["path"].to_pylist()]


def last_ended(jobs: Sequence[Job]) -> str:
    last = max((job for job in jobs if job.over), key=lambda job: job.ended, default=None)
    why = f": {last.said}" if last and last.state == "failed" else ""
    return f"job {last.number}, {' '.join(last.words)}: {last.state}{why}" if last else ""


def training_facts(run: TrainingRun) -> str:
    """Loss, time of a step and memory of a run, from what it has committed."""
    from stages.tuner.blockwise.device import memory_budget

    near = run.steps.slice(max(0, run.steps.num_rows - WINDOW)).to_pydict()
    if not near["step"]:
        return ""
    loss, seconds = (sum(value or 0 for value in near[name]) / len(near[name]) for name in ("loss", "seconds"))
    peak = max(value or 0 for value in near["peak_bytes"])
    memory = f"arrays take {format_bytes(peak)} of {format_bytes(memory_budget())} to use"
    return f"step {near['step'][-1]}: loss {loss:.4g}, {seconds:.3g} s a step, {memory}"


def sheet_rows(project: Project, query: Query, sql: str = "{}", **values: Any) -> list[Row]:
    """A query over the first Sheet of the pipeline's pages."""
    into: Row = {}
    with errors_as_text(into):  # no results yet
        for sheet in sheets(project):
            return query(sql.format(sheet.sql), **values)
    return []


def sheets(project: Project) -> list[Sheet]:
    return [block for page in project.pipeline.pages for block in page.blocks if isinstance(block, Sheet)]


def run_colours(runs: Sequence[TrainingRun]) -> dict[str, str]:
    """Label of a run -> its colour, which further runs do not change. `runs`: the newest first."""
    return {run.label: COLOURS[place % len(COLOURS)] for place, run in enumerate(reversed(runs))}


def compare_data(project: Project, query: Query, chosen: Mapping[str, str]) -> Row:
    """The runs, the settings that differ, and the pictures of two of them ("a" and "b": "RUN@STEP") side by side."""
    runs = find_runs(project)
    colours = run_colours(runs)
    rows = sheet_rows(project, query)
    sides = {f"{row['column']}@{row['step']}": f"{row['column']}, step {row['step']}" for row in rows}
    names = list(sides)
    a = chosen["a"] if chosen.get("a") in sides else next(iter(names), "")
    own = [side for side in names for run in runs if run.current and side.startswith((f"{run.label}@", f"{run.label},"))]
    b = chosen["b"] if chosen.get("b") in sides else (own or names or [""])[-1]
    pictures: dict[str, dict[str, str]] = {}
    for row in rows:
        pictures.setdefault(row["row"], {})[f"{row['column']}@{row['step']}"] = row["picture"]
    facts = [run_facts(project, run) | {"label": run.label, "checkpoints": list(run.checkpoints)} for run in runs]
    return {
        "runs": [
            fact
            | {"colour": colours[fact["label"]]}
            | {"drawn": {row["step"] for row in rows if row["column"].startswith(fact["label"])}}
            for fact in facts
        ],
        "labels": [run.label for run in runs],
        "differ": differing_settings(runs) if len(runs) > 1 else [],
        "sides": sides,
        "a": a,
        "b": b,
        "pairs": [(head, cells[a], cells[b]) for head, cells in pictures.items() if a in cells and b in cells],
    }


def block_data(query: Query, block: Block, chosen: Mapping[str, str], project: Project, colours: Mapping[str, str]) -> Row:
    """The variables of a block's template. If its query fails, "error" has the message. `colours`: of curves, by name."""
    data: Row = {"kind": type(block).__name__.lower(), "title": block.title}
    with errors_as_text(data):
        if isinstance(block, Chart):
            # The JSON stands in a script element, which "</script" would end.
            data["chart"] = json.dumps(chart_data(query(block.sql), block, colours)).replace("<", "\\u003c")
        elif isinstance(block, Listing):
            (total,) = query(f"select count(*) as rows from ({block.sql})")
            rows = query(block.sql, most=ROWS_SHOWN)
            data |= listing_data(list(rows[0]) if rows else [], [list(row.values()) for row in rows], total["rows"])
        elif isinstance(block, Cards):
            data |= cards_data(query, block, chosen)
        elif isinstance(block, Sheet):
            data |= sheet_data(query(block.sql))
        elif isinstance(block, Form):
            data |= form_data(block, project)
        else:
            data |= editor_data(project, query, block, chosen)
    return data


def chart_data(rows: list[Row], block: Chart, colours: Mapping[str, str]) -> Row:
    traces: dict[str, Row] = {}
    for row in rows:
        name = str(row["series"])
        trace = traces.setdefault(name, {"name": name, "x": [], "y": [], "type": "scatter"})
        if name in colours:
            trace["line"] = {"color": colours[name]}
        trace["x"].append(row["x"])
        trace["y"].append(float(f"{row['y']:.6g}") if row["y"] is not None and math.isfinite(row["y"]) else None)
    few = all(len(trace["x"]) <= 40 for trace in traces.values())
    curves = [trace | {"mode": "lines+markers" if few else "lines"} for trace in traces.values()]
    return {"traces": curves, "x": block.x_title, "y": block.y_title, "log": block.log}


def listing_data(names: Sequence[str], rows: Sequence[Sequence[Any]], count: int) -> Row:
    """`count`: the rows of the whole table, of which `rows` are shown."""
    return {"names": names, "rows": [[_cell(value) for value in row] for row in rows], "count": count}


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL else f"{text[:CELL]} …"


def cards_data(query: Query, block: Cards, chosen: Mapping[str, str]) -> Row:
    counts = {"all": "true", **block.filters}
    where, source, values = chosen_cards(block, chosen)
    name, order, find = where["filter"], where["order"], where["find"]
    sums = ", ".join(f"count(*) filter ({condition}) as n{number}" for number, condition in enumerate(counts.values()))
    numbers = list(query(f"select {sums} from ({source})", **values)[0].values())
    page, pages = page_number(chosen, numbers[list(counts).index(name)])
    ordered = f" order by {block.orders[order]}" if order else ""
    shown = f"select * from ({source}) where {counts[name]}{ordered} limit {PER_PAGE} offset {page * PER_PAGE}"
    return {
        "cards": query(shown, **values),
        "filters": list(zip(counts, numbers, strict=True)),
        "filter": name,
        "orders": list(block.orders),
        "where": where,
        "order": order,
        "searched": bool(block.searched),
        "find": find,
        "page": page,
        "pages": pages,
    }


def chosen_cards(block: Cards, chosen: Mapping[str, str]) -> tuple[dict[str, str], str, Row]:
    """The user's filter, order and search as far as they exist, the SQL of the cards that are searched, and its values."""
    name = chosen["filter"] if chosen.get("filter") in block.filters else "all"
    order = chosen["order"] if chosen.get("order") in block.orders else next(iter(block.orders), "")
    find = chosen.get("find", "") if block.searched else ""
    source = f"select * from ({block.sql}) where contains(lower({block.searched}), lower($find))" if find else block.sql
    return {"filter": name, "order": order, "find": find}, source, {"find": find} if find else {}


def neighbours(query: Query, block: Cards, chosen: Mapping[str, str], key: str) -> Row:
    """The card with that key, and the keys "before" and "after" it among the chosen ones, null at the ends; {} if it is none."""
    where, source, values = chosen_cards(block, chosen)
    rows = query(
        f"select * from (select *, lag(key) over near as before, lead(key) over near as after from ({source}) "
        f"where {block.filters.get(where['filter'], 'true')} "
        f"window near as (order by {', '.join(filter(None, (block.orders.get(where['order']), 'key')))})) where key = $key",
        key=key,
        **values,
    )
    return {"where": where, **rows[0]} if rows else {}


def sheet_data(rows: list[Row]) -> Row:
    """For the template: a row of "table" is (heading, cells), a cell a list of (step, picture). "steps" leaves out 0."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    heads = list(dict.fromkeys(row["row"] for row in rows))
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        cells.setdefault((row["row"], row["column"]), {})[row["step"]] = row["picture"]
    steps = sorted({step for by_step in cells.values() for step in by_step if step})
    table = [[sorted(cells.get((head, column), {}).items()) for column in columns] for head in heads]
    return {"columns": columns, "table": list(zip(heads, table, strict=True)), "steps": steps}


def form_data(block: Form, project: Project) -> Row:
    files = exported(project.path, block.folder) if block.folder else {}
    return {
        "fields": [field for field in block.fields if field.of(project.family)],
        "button": block.button,
        "note": block.note,
        "folder": block.folder,
        "files": [(name, format_bytes(path.stat().st_size)) for name, path in files.items()],
    }


def exported(project: Path, name: str) -> dict[str, Path]:
    """The files of a folder and of the folders in it by their names there, without links and what is hidden or still written."""
    root = project.resolve() / name
    found = sorted(path for pattern in ("*", "*/*") for path in root.glob(pattern) if path.is_file() and path.resolve() == path)
    names = {path.relative_to(root).as_posix(): path for path in found}
    return {name: path for name, path in names.items() if not name.startswith(".") and "/." not in name}


# Texts that the user may edit


# The texts of an editor with the edits, and the changes of the user's files, that the table does not have yet.
SHOWN = """
with edits as (select unnest($keys::varchar[]) as key, unnest($texts::varchar[]) as text),
present as (select unnest($present_keys::varchar[]) as key, unnest($present_texts::varchar[]) as text),
shown as (
    select stored.* replace (coalesce(edits.text, present.text, stored.text) as text, edits.text is not null as edited),
        stored.edited and edits.text is null as taken_back
    from ({sql}) as stored left join edits using (key) left join present using (key)
)
"""
REPEATED = """
select phrase, count(*) as texts from (select distinct key, trim(unnest(string_split(text, ','))) as phrase from shown)
where phrase <> '' group by phrase having count(*) > 1 order by texts desc, phrase limit 12
"""


class Texts:
    def __init__(self, project: Project, query: Query, block: Editor) -> None:
        self.query, self.block = query, block
        edits: dict[str, str] = load(block.read)(project.path)
        present: dict[str, str] = {}
        if block.present:
            with suppress(ValueError, OSError):  # a file of the user that cannot be read
                present = load(block.present)(project.open(block.stage))
        self.values: Row = {"keys": list(edits), "texts": list(edits.values())}
        self.values |= {"present_keys": list(present), "present_texts": list(present.values())}

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """A query over `shown`: the table's texts with the edits, `edited`, `taken_back` (an edit that the table still has)."""
        import duckdb

        try:
            return self.query(SHOWN.format(sql=self.block.sql) + sql, **self.values, **values)
        except duckdb.InvalidInputException:
            raise ValueError("the text must be valid Unicode, got half of a surrogate pair") from None

    def of_keys(self, keys: list[str]) -> dict[str, str]:
        found = self.rows("select key, text from shown where key in (select unnest($wanted::varchar[]))", wanted=keys)
        return {row["key"]: row["text"] for row in found}

    def replaced(self, find: str, by: str) -> dict[str, dict[str, Any]]:
        """The edits that replace `find` in every text that contains it, {key: {"before", "edited", "text"}}."""
        found = self.rows("select key, text as before, edited from shown where contains(text, $find) order by key", find=find)
        return {row.pop("key"): row | {"text": row["before"].replace(find, by)} for row in found}


def editor_data(project: Project, query: Query, block: Editor, chosen: Mapping[str, str]) -> Row:
    """The variables of the template. "phrases": (part between commas, texts that have it), the most frequent."""
    folder, find = project.path, chosen.get("find", "")
    texts, doubts = Texts(project, query, block), dict[str, str]()
    (counted,) = texts.rows(
        "select count(*) filter (contains(lower(text), lower($find))) as texts, count(*) filter (edited) as edits from shown",
        find=find,
    )
    page, pages = page_number(chosen, counted["texts"])
    found = texts.rows(
        "select * from shown where contains(lower(text), lower($find)) order by name, length(key), key "
        f"limit {PER_PAGE} offset {page * PER_PAGE}",
        find=find,
    )
    if block.doubts and counted["edits"]:
        with suppress(ValueError, OSError):  # a file of the user that cannot be read
            doubts = load(block.doubts)(project.open(block.stage))
    return {
        "texts": [row | {"name": ": ".join(filter(None, [row["name"], doubts.get(row["key"])]))} for row in found],
        "find": find,
        "count": counted["texts"],
        "edits": counted["edits"],
        "page": page,
        "pages": pages,
        "phrases": [(row["phrase"], row["texts"]) for row in texts.rows(REPEATED)],
        "note": block.note,
        "files": bool(block.write_files),
        "written": bool(block.written and load(block.written)(folder)),
    }
