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
from pipeline.store.disk import format_bytes
from stages.page import Block, Cards, Chart, Editor, Listing, Sheet

if TYPE_CHECKING:
    from pipeline.project.project import Project

CELL = 240  # letters of a cell
ROWS_SHOWN = 200  # rows of a table


def overview(project: Project) -> Row:
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
    """The variables of a block's template. If its query fails, "error" has the message."""
    data: Row = {"kind": type(block).__name__.lower(), "title": block.title}
    with errors_as_text(data):
        if isinstance(block, Chart):
            # The JSON stands in a script element, which "</script" would end.
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
    """`count`: the rows of the whole table, of which `rows` are shown."""
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
    """For the template: a row of "table" is (heading, cells), a cell a list of (step, picture). "steps" leaves out 0."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    heads = list(dict.fromkeys(row["row"] for row in rows))
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        cells.setdefault((row["row"], row["column"]), {})[row["step"]] = row["picture"]
    steps = sorted({step for by_step in cells.values() for step in by_step if step})
    table = [[sorted(cells.get((head, column), {}).items()) for column in columns] for head in heads]
    return {"columns": columns, "table": list(zip(heads, table, strict=True)), "steps": steps}
