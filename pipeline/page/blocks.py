"""From a pipeline's pages to the data that the templates show: rows of SQL, curves, cards, cells, texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.status import states
from pipeline.page.catalog import PER_PAGE, Catalog, Row, errors_as_text, page_number
from pipeline.page.texts import editor_data
from pipeline.terminal import format_bytes
from stages.page import Block, Cards, Chart, Editor, Listing, Sheet

if TYPE_CHECKING:
    from pipeline.project.project import Project

CELL = 240  # letters of a cell
ROWS_SHOWN = 200  # rows of a table


def overview(project: Project) -> Row:
    """Return the data of the overview page as a dict. `project` is the opened project folder. "tables" is a list of
    dicts with the name, row count, size and state of each stage's table. "runs" is a list of dicts, one per training
    run, with the columns of the table `runs`. "disk" is a text that says how much disk space is free.
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
    """Return the data that the HTML template needs to show one block of a page, as a dict. `block` describes the block:
    a chart, a listing, a sheet, cards or an editor. Its SQL query selects the rows to show. `catalog` is the open
    database of the project. `chosen` holds the user's choices "filter", "order", "page" and "find" as texts. `folder`
    is the project's folder. If the query fails, nothing is raised; the entry "error" has the message.

    The entries "kind" and "title" are always there. A chart's data is JSON in the entry "chart". Other blocks add the
    entries of `listing_data`, `cards_data`, `sheet_data` or `editor_data`.
    """
    data: Row = {"kind": type(block).__name__.lower(), "title": block.title}
    with errors_as_text(data):
        if isinstance(block, Chart):
            data["chart"] = json.dumps(chart_data(catalog.rows(block.sql), block)).replace("<", "\\u003c")
        elif isinstance(block, Listing):
            (total,) = catalog.rows(f"select count(*) as rows from ({block.sql})")
            data |= listing_data(catalog.rows(block.sql, most=ROWS_SHOWN), total["rows"])
        elif isinstance(block, Cards):
            data |= cards_data(catalog, block, chosen)
        elif isinstance(block, Sheet):
            data |= sheet_data(catalog.rows(block.sql))
        elif isinstance(block, Editor):
            data |= editor_data(catalog, block, chosen, folder)
    return data


def chart_data(rows: list[Row], block: Chart) -> Row:
    """Return the curves of a chart as a dict for plotly. `rows` have the columns `series`, `x` and `y`, and each series
    becomes one curve. `block` describes the chart. The entry "traces" is the list of curves. "x" and "y" are the titles
    of the axes. "log" is True if the y axis is logarithmic.
    """
    curves: dict[str, tuple[list[Any], list[Any]]] = {}
    for row in rows:
        y = float(f"{row['y']:.6g}") if row["y"] is not None and math.isfinite(row["y"]) else None
        xs, ys = curves.setdefault(str(row["series"]), ([], []))
        xs.append(row["x"])
        ys.append(y)
    mode = "lines+markers" if max((len(xs) for xs, _ in curves.values()), default=0) <= 40 else "lines"
    traces = [{"name": name, "x": xs, "y": ys, "mode": mode, "type": "scatter"} for name, (xs, ys) in curves.items()]
    return {"traces": traces, "x": block.x_title, "y": block.y_title, "log": block.log}


def listing_data(rows: list[Row], count: int) -> Row:
    """Return a part of a table as a dict for the web page. `rows` are the rows to show. `count` is the number of all
    rows of the table. The dict has three entries. "names" lists the names of the columns. "rows" lists the rows, each a
    list of texts. "count" is `count`.

    A text of more than 240 characters is cut. Floats have 5 significant digits. None becomes "".
    """
    return {
        "names": list(rows[0]) if rows else [],
        "rows": [[_cell(value) for value in row.values()] for row in rows],
        "count": count,
    }


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL else f"{text[:CELL]} …"


def cards_data(catalog: Catalog, block: Cards, chosen: Mapping[str, str]) -> Row:
    """Return one page of cards as a dict. A card shows one row of a table. `catalog` is the open database of the
    project. `block` gives the SQL of the rows, the filters and the orders. `chosen` holds the user's choices as texts:
    "filter", "order", "page" and "find". The entry "cards" of the result lists the rows of the page as dicts. Its other
    entries are for the controls of the page.

    Of these, "filters" lists pairs (filter, number of rows). "orders" lists the names of the orders. "filter", "order",
    "page" (from 0) and "find" are the choices in use. "pages" is the number of pages. "searched" is True if the cards
    can be searched.

    If `block.searched` is set, only rows whose text contains "find" are counted and shown, in any case of letters.
    """
    counts = {"all": "true", **block.filters}
    name = chosen.get("filter", "all") if chosen.get("filter", "all") in counts else "all"
    order = chosen.get("order", "") if chosen.get("order") in block.orders else next(iter(block.orders), "")
    find = chosen.get("find", "") if block.searched else ""
    source = f"select * from ({block.sql}) where contains(lower({block.searched}), lower($find))" if find else block.sql
    values: Row = {"find": find} if find else {}
    sums = ", ".join(f"count(*) filter ({condition}) as n{number}" for number, condition in enumerate(counts.values()))
    numbers = list(catalog.rows(f"select {sums} from ({source})", **values)[0].values())
    page, pages = page_number(chosen, numbers[list(counts).index(name)])
    ordered = f" order by {block.orders[order]}" if order else ""
    shown = f"select * from ({source}) where {counts[name]}{ordered} limit {PER_PAGE} offset {page * PER_PAGE}"
    return {
        "cards": catalog.rows(shown, **values),
        "filters": list(zip(counts, numbers, strict=True)),
        "filter": name,
        "orders": list(block.orders),
        "order": order,
        "searched": bool(block.searched),
        "find": find,
        "page": page,
        "pages": pages,
    }


def sheet_data(rows: list[Row]) -> Row:
    """Return the data of a sheet as a dict. A sheet is a grid of pictures at several training steps. Each dict in
    `rows` is one picture. `row` and `column` are the headings of its cell, `step` is its training step, and `picture`
    is its name. In the result, "columns" lists the column headings. "table" lists pairs (row heading, cells). A cell is
    a list of pairs (step, picture). "steps" lists the steps of all pictures, except 0.
    """
    columns = list(dict.fromkeys(row["column"] for row in rows))
    heads = list(dict.fromkeys(row["row"] for row in rows))
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        cells.setdefault((row["row"], row["column"]), {})[row["step"]] = row["picture"]
    steps = sorted({step for by_step in cells.values() for step in by_step if step})
    table = [[sorted(cells.get((head, column), {}).items()) for column in columns] for head in heads]
    return {"columns": columns, "table": list(zip(heads, table, strict=True)), "steps": steps}
