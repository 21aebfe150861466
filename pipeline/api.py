"""The Python API: a project that runs its stages, reads its tables and answers SQL."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.project import project
from stages.stage import load

if TYPE_CHECKING:
    from pipeline.commands.status import TableState
    from pipeline.project.tables import Table
    from pipeline.runner import Outcome
    from pipeline.terminal import ProgressCallback


class Project(project.Project):
    """A project: a folder with project.toml, the input files, and the tables that the stages of its pipeline write.

    `p = Project("data/cats", {"train.steps": 200})` opens the folder with some settings replaced; p.run("train") runs a stage,
    p["train"] is its table. ValueError, in one line, if the folder holds no project or a setting is wrong.
    """

    def run(self, name: str, *, upstream: bool = False, progress: ProgressCallback | bool = True) -> Outcome:
        """Bring the table `name` up to date, with `upstream` after every table that it depends on. Returns what the stage did.

        `progress`: True shows a bar and messages on standard error; False shows nothing; a function is called with
        (stage, done, total, unit) instead. ValueError, in one line, for what the user can correct; Stopped on an interrupt.
        """
        from pipeline import runner
        from pipeline.terminal import console_for

        self.stage(name)
        for each in [*(self.pipeline.upstream(name) if upstream else ()), name]:
            self.refresh()
            with console_for(each, progress) as console:
                outcome = runner.run(self.allow_downloads(), each, console)
        self.refresh()
        return outcome

    def __getitem__(self, name: str) -> Table:
        """Return the table `name` as the last finished run left it, with rows and tensors. ValueError if it is not built."""
        from pipeline.project.tables import Table

        self.refresh()
        return Table(self.folder(self.stage(name).name))

    def sql(self, query: str) -> pa.Table:
        """Return the answer to an SQL query (DuckDB) over all tables and views as an Arrow table. ValueError for wrong SQL."""
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
        """Return the state of every table: rows, size, and what is missing. `str(state)` tells it in words."""
        from pipeline.commands.status import states

        self.refresh()
        return states(self)

    def __getattr__(self, name: str) -> Any:
        """Return a method that the project's pipeline adds (`Pipeline.methods`). AttributeError for another name."""
        if name.startswith("_") or name == "pipeline" or name not in self.pipeline.methods:
            raise AttributeError(f"Project has no attribute {name!r}")
        return functools.partial(load(self.pipeline.methods[name]), self)

    def __dir__(self) -> list[str]:
        """Return the names of all attributes, with the methods that the pipeline adds."""
        return [*super().__dir__(), *self.pipeline.methods]
