"""From a pipeline's pages to the data that the templates show: rows of SQL, curves, cards, cells, texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.query import open_catalog
from pipeline.commands.status import states
from pipeline.project.runs import trains
from pipeline.terminal import format_bytes
from stages.page import Block, Cards, Chart, Editor, Listing, Page, Sheet
from stages.pipelines import load

if TYPE_CHECKING:
    import duckdb

    from pipeline.project.project import Project

PER_PAGE = 60  # cards and texts on one page
CELL = 240  # letters of a cell
ROWS_SHOWN = 500  # rows of a table
POINTS = 400  # points of a curve, about

Row = dict[str, Any]


class Catalog:
    """A database of the tables and views of `project`. Call `rows(sql)` to run a query. The tables are read when the
    object is created. Use the object in a `with` statement, which closes the database at the end.
    """

    def __init__(self, project: Project) -> None:
        self.connection: duckdb.DuckDBPyConnection = open_catalog(project)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """Run the query `sql` and return its rows as dicts. Further keyword arguments are the parameters of the query:
        `step=5` sets `$step`.
        """
        result = self.connection.execute(sql, values or None)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


@contextmanager
def errors_as_text(into: Row) -> Iterator[None]:
    """Catch an error in the body of a `with` statement and store its message as `into["error"]`. The message is one
    line. Only `ValueError` and errors of DuckDB are caught.
    """
    import duckdb

    try:
        yield
    except (duckdb.Error, ValueError) as error:
        into["error"] = " ".join(str(error).split())


def training_page(project: Project) -> Page | None:
    """Return the page with the curves of all training runs, or None if no stage of the pipeline trains."""
    names = [name for name in project.stage_names if trains(project.stage(name).writes)]
    if not names:
        return None
    table = f"all_{names[0]}"
    last = f"(select greatest(1, max(step) // {POINTS}) from {table})"
    curve = (
        f"select run_name as series, step // {last} * {last} as x, {{}} as y from {table} where split = '{{}}' "
        "group by all having y is not null order by series, x"
    )
    smooth = (
        f"select run_name as series, step // (5 * {last}) * (5 * {last}) as x, avg(loss) as y from {table} "
        "where split = 'train' and isfinite(loss) group by all order by series, x"
    )
    own = [block for page in project.pipeline.pages if page.name == "training" for block in page.blocks]
    return Page(
        "training",
        "Training",
        (
            Listing(
                "Runs",
                "select coalesce(name, run) as run, state, steps, wanted_steps as of, loss, held_out_loss, best_step, "
                "round(seconds / 60, 1) as minutes, differs as settings_that_differ from runs",
            ),
            Chart("Loss, mean of neighbouring steps", smooth, "step", "loss"),
            Chart("Loss of held-out samples", curve.format("avg(loss)", "validation"), "step", "loss"),
            *own,
            Chart("Learning rate", curve.format("max(lr)", "train"), "step", "learning rate"),
            Chart("Norm of the gradient", curve.format("avg(grad_norm)", "train"), "step", "norm", log=True),
            Chart("Time of a step", curve.format("avg(seconds)", "train"), "step", "seconds"),
            Chart("Peak memory of MLX", curve.format("max(peak_bytes) / 1e9", "train"), "step", "GB"),
        ),
    )


def pages_of(project: Project) -> dict[str, Page]:
    """Return the pages of `project` that consist of blocks, as a dict from page name to page. The dict has the order of
    the menu. If the pipeline trains, the page "training" shows the curves of all training runs.

    If the pipeline declares a page "training" too, the page with the curves takes its place in the menu. Otherwise the
    page with the curves comes last.
    """
    found = {page.name: page for page in project.pipeline.pages}
    training = training_page(project)
    if training:
        found = {name: page for name, page in found.items() if name != "training"} | {"training": training}
        order = (
            [page.name for page in project.pipeline.pages] if "training" in {p.name for p in project.pipeline.pages} else [*found]
        )
        found = {name: found[name] for name in order}
    return found


def overview(project: Project) -> Row:
    """Return the data of the overview page as a dict. "tables" is a list of dicts with the name, row count, size and
    state of each stage's table. "runs" is a list of dicts, one per training run, with the columns of the table `runs`.
    "disk" is a text that says how much disk space is free.
    """
    import shutil

    from pipeline.commands.runs import run_facts
    from pipeline.commands.status import describe
    from pipeline.project.runs import find_runs

    tables = [
        {"name": each.stage_name, "rows": each.rows, "size": format_bytes(each.nbytes), "state": describe(each)}
        for each in states(project)
    ]
    disk = shutil.disk_usage(project.path)
    return {
        "tables": tables,
        "runs": [run_facts(project, run) for run in find_runs(project)],
        "disk": f"{format_bytes(disk.free)} of {format_bytes(disk.total)} are free",
    }


def block_data(catalog: Catalog, block: Block, chosen: Mapping[str, str], folder: Path) -> Row:
    """Return the data that the HTML template needs to show one block of a page, as a dict. A block is a chart, listing,
    sheet, cards or editor. `chosen` holds the user's choices "filter", "order", "page" and "find" as texts. `folder` is
    the project's folder. If the SQL fails, the message is the entry "error"; nothing is raised.

    The entries "kind" and "title" are always there. A chart's data is JSON in the entry "chart". Other blocks add the
    entries of `listing_data`, `cards_data`, `sheet_data` or `editor_data`.
    """
    data: Row = {"kind": type(block).__name__.lower(), "title": block.title}
    with errors_as_text(data):
        if isinstance(block, Chart):
            data["chart"] = json.dumps(chart_data(catalog.rows(block.sql), block)).replace("<", "\\u003c")
        elif isinstance(block, Listing):
            data |= listing_data(catalog.rows(block.sql))
        elif isinstance(block, Cards):
            data |= cards_data(catalog, block, chosen)
        elif isinstance(block, Sheet):
            data |= sheet_data(catalog.rows(block.sql))
        elif isinstance(block, Editor):
            data |= editor_data(catalog, block, chosen, load(block.read)(folder))
    return data


def chart_data(rows: list[Row], block: Chart) -> Row:
    """Return the curves of a chart as a dict for plotly. `rows` have the columns `series`, `x` and `y`, and each series
    becomes one curve. `block` describes the chart. The entry "traces" is the list of curves. "x" and "y" are the titles
    of the axes. "log" is True if the y axis is logarithmic.
    """
    curves: dict[str, tuple[list[Any], list[Any]]] = {}
    for row in rows:
        y = row["y"] if row["y"] is None or math.isfinite(row["y"]) else None
        xs, ys = curves.setdefault(str(row["series"]), ([], []))
        xs.append(row["x"])
        ys.append(y)
    mode = "lines+markers" if max((len(xs) for xs, _ in curves.values()), default=0) <= 40 else "lines"
    traces = [{"name": name, "x": xs, "y": ys, "mode": mode, "type": "scatter"} for name, (xs, ys) in curves.items()]
    return {"traces": traces, "x": block.x_title, "y": block.y_title, "log": block.log}


def listing_data(rows: list[Row]) -> Row:
    """Return the first rows of a table as texts, with its columns, as a dict for the web page. `rows` are all rows of
    the table. In the result, "names" lists the columns. "rows" lists the cells of the first 500 rows. "count" is the
    number of all rows.

    A text of more than 240 characters is cut. Floats have 5 significant digits. None becomes "".
    """
    names = list(rows[0]) if rows else []
    return {"names": names, "rows": [[_cell(value) for value in row.values()] for row in rows[:ROWS_SHOWN]], "count": len(rows)}


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL else f"{text[:CELL]} …"


def cards_data(catalog: Catalog, block: Cards, chosen: Mapping[str, str]) -> Row:
    """Return the data of one page of cards as a dict. `block` gives the SQL, the filters and the orders. `chosen` holds
    the user's choices "filter", "order" and "page" as texts. In the result, "cards" lists the rows of the page as
    dicts. "filters" lists pairs (filter, number of rows). "orders" lists the names of the orders. "filter", "order" and
    "page" (from 0) are the choices in use. "pages" is the number of pages.
    """
    counts = {"all": "true", **block.filters}
    name = chosen.get("filter", "all") if chosen.get("filter", "all") in counts else "all"
    order = chosen.get("order", "") if chosen.get("order") in block.orders else next(iter(block.orders), "")
    sums = ", ".join(f"count(*) filter ({condition})" for condition in counts.values())
    numbers = catalog.connection.execute(f"select {sums} from ({block.sql})").fetchall()[0]
    page, pages = _page(chosen, numbers[list(counts).index(name)])
    ordered = f" order by {block.orders[order]}" if order else ""
    found = f"select * from ({block.sql}) where {counts[name]}{ordered} limit {PER_PAGE} offset {page * PER_PAGE}"
    return {
        "cards": catalog.rows(found),
        "filters": list(zip(counts, numbers, strict=True)),
        "filter": name,
        "orders": list(block.orders),
        "order": order,
        "page": page,
        "pages": pages,
    }


def _page(chosen: Mapping[str, str], rows: int) -> tuple[int, int]:
    """Return the number of the page to show, and the number of pages. Pages are counted from 0. `chosen` is what the
    user chose; its entry "page" is the wanted page. `rows` is the number of rows to show on all pages.
    """
    pages = max(1, -(-rows // PER_PAGE))
    wanted = chosen.get("page", "0")
    return min(int(wanted) if wanted.isdecimal() and len(wanted) < 9 else 0, pages - 1), pages


def sheet_data(rows: list[Row]) -> Row:
    """Return the data of a sheet as a dict. A sheet is a grid of pictures at several training steps. Each dict in
    `rows` is one picture. `row` and `column` are the headings of its cell, `step` is its training step, and `picture`
    is its name. In the result, "columns" lists the column headings, and "steps" lists all steps except 0.

    "table" lists pairs (row heading, cells). Each cell is a list of pairs (step, picture).
    """
    columns = list(dict.fromkeys(row["column"] for row in rows))
    heads = list(dict.fromkeys(row["row"] for row in rows))
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        cells.setdefault((row["row"], row["column"]), {})[row["step"]] = row["picture"]
    steps = sorted({step for by_step in cells.values() for step in by_step if step})
    table = [[sorted(cells.get((head, column), {}).items()) for column in columns] for head in heads]
    return {"columns": columns, "table": list(zip(heads, table, strict=True)), "steps": steps}


def editor_data(catalog: Catalog, block: Editor, chosen: Mapping[str, str], edits: Mapping[str, str]) -> Row:
    """Return the data of one page of a text editor as a dict. `block` is the editor. `chosen` holds the user's "page"
    and "find"; only texts that contain "find" are shown. `edits` maps a text's key to its edited text, which replaces
    the stored one. The result has the rows of the page in "texts".

    "count" is the number of texts found. "page" (from 0) and "pages" number the pages. "find" is the user's. "phrases"
    lists the most frequent phrases of all texts. "note" tells the user what an edit does.
    """
    find = chosen.get("find", "")
    everything = [
        row | {"text": edits.get(row["key"], row["text"]), "edited": row["key"] in edits} for row in catalog.rows(block.sql)
    ]
    texts = [row for row in everything if find.lower() in row["text"].lower()] if find else everything
    page, pages = _page(chosen, len(texts))
    return {
        "texts": texts[page * PER_PAGE : (page + 1) * PER_PAGE],
        "find": find,
        "count": len(texts),
        "page": page,
        "pages": pages,
        "phrases": repeated_phrases([row["text"] for row in everything]),
        "note": block.note,
    }


def repeated_phrases(texts: list[str], most: int = 12) -> list[tuple[str, int]]:
    """Return the phrases that occur in at least two of `texts`, the most frequent first. Phrases are the parts of a
    text between commas. Each result is a pair (phrase, number of texts). At most `most` pairs are returned.
    """
    from collections import Counter

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({part.strip() for part in text.split(",") if part.strip()})
    return [(part, count) for part, count in counts.most_common(most) if count > 1]
