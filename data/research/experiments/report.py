"""Write the page of the experiments: its tables and charts are made from results.jsonl.

    python -m data.research.experiments.report

writes the tables into README.md, between `<!-- NAME: generated -->` and `<!-- end -->`, and the charts beside it. No
experiment is run.
"""

from __future__ import annotations

from pathlib import Path

from data import DOCS
from data.research.experiments.charts import CHARTS
from data.research.experiments.results import Results, read
from data.research.experiments.tables import TABLES
from pipeline.plots import save

FOLDER = DOCS / "experiments"
PAGE = "README.md"


def with_tables(page: str, results: Results) -> str:
    """Return the text `page` with every generated table replaced. `results` are the rows of results.jsonl. Raises
    AssertionError if the page has no place for a table.
    """
    for name, table in TABLES.items():
        page = with_table(page, name, table(results))
    return page


def with_table(page: str, name: str, table: str) -> str:
    """Return the text `page` with one generated table replaced by the text `table`. The table stands between the comments
    `<!-- NAME: generated -->`, where NAME is `name`, and `<!-- end -->`. Raises AssertionError if the page lacks them.
    """
    begin, end = f"<!-- {name}: generated -->", "<!-- end -->"
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    assert opened and closed, f"the page has no place for {name}"
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def write(folder: Path, results: Results) -> None:
    """Draw the charts into a folder, and update its page if it has one."""
    for name, panels in CHARTS.items():
        drawn = panels(results)
        save(drawn, folder / name, columns=len(drawn))
    page = folder / PAGE
    if page.exists():
        page.write_text(with_tables(page.read_text(), results))


if __name__ == "__main__":
    write(FOLDER, read())
