"""The Python API: a project that runs its stages, reads its tables and answers SQL."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.project import project
from pipeline.project.config import Overrides
from stages.pipelines import load

if TYPE_CHECKING:
    from pipeline.commands.status import TableState
    from pipeline.commands.verify import Finding
    from pipeline.project.tables import Table
    from pipeline.runner import Outcome
    from pipeline.terminal import ProgressCallback


class Project(project.Project):
    """A training project, opened for use from Python. A project is a folder with project.toml, input files, and one
    table per stage. `path` is that folder. `overrides` replaces settings, such as `{"train.steps": 200}`.
    `p.run("train")` runs a stage, and `p["train"]` returns its table. Raises ValueError if the folder holds no project
    or a setting is wrong.

    If `fetch` is True, missing weights may be downloaded. `training_run` chooses an earlier training run, by its name
    or by the beginning of its recipe (the id of its settings). The settings and the table of that run are then used.
    """

    def __init__(self, path: str | Path, overrides: Overrides = (), *, fetch: bool = False, training_run: str = "") -> None:
        super().__init__(path, overrides, fetch=fetch)
        if training_run:
            from pipeline.project.runs import choose

            choose(self, training_run, overrides)

    def run(self, name: str, *, upstream: bool = False, progress: ProgressCallback | bool = True) -> Outcome:
        """Run the stage `name`, which brings the table of that name up to date. If `upstream` is True, run first all
        earlier stages that it needs. `progress` is True to show a bar and messages on standard error, and False to show
        nothing. It can also be a function, called with (stage, done, total, unit), such as ("latents", 8, 24,
        "images"). Return an `Outcome`: how many rows were written and removed, the time in seconds, and the peak memory
        in bytes.

        Raises ValueError for a mistake that the user can correct. Raises Stopped if the user interrupts the run.
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
        """Return the table of the stage `name`, with its rows and tensors. The table holds the result of a finished run
        with the present settings. If there is none, the newest table of other settings is returned. Raises ValueError
        if the stage does not exist or no run of it has finished.
        """
        from pipeline.project.tables import Table

        self.refresh()
        return Table(self.folder(self.stage(name).name))

    def sql(self, query: str) -> pa.Table:
        """Run an SQL query (DuckDB) over the project's tables and views, and return the rows as an Arrow table. Raises
        ValueError for a mistake in the SQL, or if the query names a table that is not built. The query reads only the tables:
        it reaches no file.
        """
        from pipeline.commands.query import answer

        self.refresh()
        return answer(self, query)

    def panel(self, name: str) -> pa.Table:
        """Run a panel by name, and return the rows as an Arrow table. A panel is a stored query of the project's pipeline.
        Raises ValueError, with the nearest name, if the pipeline has no such panel.
        """
        from pipeline.commands.panel import answer_panel

        self.refresh()
        return answer_panel(self, name)

    def lancedb(self) -> Any:
        """Return a LanceDB connection to the tables of the project. For example,
        `project.lancedb().open_table("images")` opens one table.

        A table is listed once its stage has run. The rows that this program shows are those whose column `live` is true.
        """
        import lancedb

        return lancedb.connect(self.path / "tables")

    def status(self) -> list[TableState]:
        """Return the state of every table, in the order of the stages: rows, bytes, and how many rows are missing. `str(state)`
        is a line of text such as "images: 24 rows, up to date".
        """
        from pipeline.commands.status import states

        self.refresh()
        return states(self)

    def verify(self, *, repair: bool = False) -> list[Finding]:
        """Check all files of the project, and return a list with one `Finding` for each damaged file. If `repair` is
        True, the damage is repaired first: damaged rows and files are removed, and the stages make them again. In this
        case, the list holds only the damage that remains.

        Rows and files are made again only in tables of the current settings. A table of other settings loses its
        damaged rows and files. It gets the rows back in the next run with those settings. Damaged weights are not
        repaired. A table that a process is writing is not checked.
        """
        from pipeline.commands.verify import find_damage, repair_project

        self.refresh()
        found = list(find_damage(self))
        if repair and found:
            repair_project(self, found)
            self.refresh()
            found = list(find_damage(self))
        return found

    def __getattr__(self, name: str) -> Any:
        """Return the method `name` that the project's pipeline adds (`Pipeline.methods`), bound to this project. Raises
        AttributeError if the pipeline adds no such method.
        """
        if name.startswith("_") or name == "pipeline" or name not in self.pipeline.methods:
            raise AttributeError(f"Project has no attribute {name!r}")
        return functools.partial(load(self.pipeline.methods[name]), self)

    def __dir__(self) -> list[str]:
        """Return the names of all attributes, including the methods that the project's pipeline adds."""
        return [*super().__dir__(), *self.pipeline.methods]
