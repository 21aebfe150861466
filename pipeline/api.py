"""The Python API: a project that runs its stages, reads its tables and answers SQL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.project import project
from pipeline.project.tables import Table
from stages.stage import load

if TYPE_CHECKING:
    from pipeline.commands.status import TableState
    from pipeline.runner import Outcome


class Project(project.Project):
    """One project of a pipeline: a folder with project.toml, the input files, and the tables that its stages write.

    `Project("data/cats", {"train.steps": 200})` opens the folder with some settings replaced. ValueError, in one line, if the
    folder holds no project or a setting is wrong. `project["images"]` is a table, `project.run("train")` runs a stage.
    """

    def run(self, name: str, *, upstream: bool = False, progress: Callable[[str, int, int, str], None] | bool = True) -> Outcome:
        """Bring the table `name` up to date, and with `upstream` first every table that it depends on.

        `progress`: True shows a bar and messages on standard error; False shows nothing; a function is called with
        (stage, done, total, unit) instead. Returns what the last stage did: rows written, seconds, peak memory.
        """
        from pipeline import runner
        from pipeline.terminal import console_for

        self.stage(name)
        for each in [*(self.pipeline.upstream(name) if upstream else ()), name]:
            self.refresh()
            with console_for(each, progress) as console:
                outcome = runner.run(self.fetching(), each, console)
        self.refresh()
        return outcome

    def __getitem__(self, name: str) -> Table:
        """The table of that name, as the last finished run left it. ValueError if it is not built."""
        self.refresh()
        return Table(self.folder(self.stage(name).name))

    def sql(self, query: str) -> pa.Table:
        """The answer to an SQL query (DuckDB) over all tables and views, as an Arrow table."""
        from pipeline.commands.query import answer

        self.refresh()
        return answer(self, query)

    def panel(self, name: str) -> pa.Table:
        """Return the answer of a panel of the pipeline as an Arrow table. ValueError, with the nearest name, if there is none."""
        from pipeline.commands.panel import answer_panel

        self.refresh()
        return answer_panel(self, name)

    def lancedb(self) -> Any:
        """Return a LanceDB connection to the tables: `project.lancedb().open_table("images")`.

        A table is listed once its stage has run. The rows that this program shows are those whose column `live` is true.
        """
        import lancedb

        return lancedb.connect(self.path / "tables")

    def status(self) -> list[TableState]:
        """For every table its rows, its size and what a run would do."""
        from pipeline.commands.status import states

        self.refresh()
        return states(self)

    def __getattr__(self, name: str) -> Any:
        """A method that only this project's pipeline has, such as `adapter` of text_to_image."""
        if name.startswith("_") or name == "pipeline" or name not in self.pipeline.methods:
            raise AttributeError(f"a project has no {name!r}")
        return functools.partial(load(self.pipeline.methods[name]), self)

    def __dir__(self) -> list[str]:
        """All methods, with those of the pipeline."""
        return [*super().__dir__(), *self.pipeline.methods]
