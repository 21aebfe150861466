"""The Python API: a project that runs its stages, reads its tables and answers SQL."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.commands import own
from pipeline.project import project
from pipeline.project.config import Overrides
from stages.pipelines import load

if TYPE_CHECKING:
    from pipeline.commands.status import TableState
    from pipeline.commands.verify import Finding
    from pipeline.project.tables import Table
    from pipeline.queue import Queue
    from pipeline.runner import Outcome
    from pipeline.terminal import ProgressCallback


class Project(project.Project):
    """A folder with project.toml, input files and one table per stage, opened for use from Python.

    `p.run("train")` runs a stage, `p["train"]` is its table. `overrides` replaces settings: `{"train.steps": 200}`.
    `training_run` chooses an earlier run, with its settings, by its name or the beginning of its recipe. `fetch` allows
    downloads of weights. Raises ValueError if the folder holds no project or a setting is wrong.
    """

    def __init__(self, path: str | Path, overrides: Overrides = (), *, fetch: bool = False, training_run: str = "") -> None:
        super().__init__(path, overrides, fetch=fetch)
        if training_run:
            from pipeline.project.runs import choose

            choose(self, training_run, overrides)

    def run(self, name: str, *, upstream: bool = False, progress: ProgressCallback | bool = True) -> Outcome:
        """Bring the table `name` up to date; with `upstream`, first all that it needs.

        `progress`: True for a bar on standard error, False for nothing, or a function of (stage, done, total, unit).
        Raises ValueError for mistakes of the user, Stopped after an interrupt.
        """
        from pipeline.runner import run_chain

        return run_chain(self, [*(self.chain(name) if upstream else ()), self.stage(name).name], progress)

    def __getitem__(self, name: str) -> Table:
        """The table of the present settings, or else the newest of others. ValueError if no run has finished."""
        from pipeline.project.tables import Table

        self.refresh()
        return Table(self.folder(self.stage(name).name))

    def sql(self, query: str) -> pa.Table:
        """Rows of a DuckDB query, which reaches no file. Raises ValueError for wrong SQL or a table that is not built."""
        from pipeline.commands.query import answer

        self.refresh()
        return answer(self, query)

    def panel(self, name: str) -> pa.Table:
        """Rows of a stored query of the pipeline. Raises ValueError, with the nearest name, if there is none of that name."""
        from pipeline.commands.query import answer_panel

        self.refresh()
        return answer_panel(self, name)

    def lancedb(self) -> Any:
        """Connection to the tables of finished stages. The rows that this program shows are those with `live` true."""
        import lancedb

        return lancedb.connect(self.path / "tables")

    def status(self) -> list[TableState]:
        """The state of every table, in the order of the stages; `str(state)` is such as "images: 24 rows, up to date"."""
        from pipeline.commands.status import states

        self.refresh()
        return states(self)

    @property
    def queue(self) -> Queue:
        """Commands that run one after another: `p.queue.add(["train"])`, `p.queue.jobs()`."""
        from pipeline.queue import Queue

        return Queue(self.path)

    def verify(self, *, repair: bool = False) -> list[Finding]:
        """One `Finding` per damaged file; with `repair`, those that remain after damaged rows and files are made again.

        Tables of other settings get their rows back only in a run with those settings. Weights are not repaired, and a
        table that is being written is not checked.
        """
        from pipeline.commands.verify import verify

        self.refresh()
        return verify(self, repair)

    def __getattr__(self, name: str) -> Any:
        """Methods that the project's pipeline adds (`pipeline.commands.Own.methods`)."""
        # `config` is missing until __init__ has set it: to look it up below would recurse.
        methods = {} if name.startswith("_") or name == "config" else own(self.config.project.pipeline).methods
        if name not in methods:
            raise AttributeError(f"Project has no attribute {name!r}")
        return functools.partial(load(methods[name]), self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *own(self.config.project.pipeline).methods]
