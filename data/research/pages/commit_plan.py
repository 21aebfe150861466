"""How long the committing processes of a very large table take: formulas, and a simulation commit by commit."""

from __future__ import annotations

from dataclasses import dataclass

COMMITS = 64  # commits after which the index is rewritten: pipeline.store.table.COMMITS
SHARD_BYTES = 64 << 20  # pipeline.store.shards.SHARD_BYTES


@dataclass(frozen=True)
class Ceiling:
    """The measured speed of one process that commits rows. `rows_s` and `mb_s` are rows and megabytes per second into a
    small table. `row_rewrite_s` is the seconds to rewrite one row of the index. `index_bytes` is the size of a row of the
    index on disk, and `memory_bytes` its size in memory.
    """

    rows_s: float
    mb_s: float
    row_rewrite_s: float
    index_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class Plan:
    """A table of `rows` rows with tensors of `row_bytes`, computed by `workers` workers that need `row_s` seconds a row.
    The rows are divided among `tables` tables by their key, each with a committing process of its own.
    """

    rows: int
    row_bytes: int
    row_s: float
    workers: int
    tables: int = 1

    @property
    def commits(self) -> int:
        """The number of commits of each table: one for each shard."""
        return -(-self.rows * self.row_bytes // (self.tables * SHARD_BYTES))

    def rewritten(self) -> float:
        """Return how many rows of its index each table rewrites in total. The index is written again after every COMMITS
        commits.
        """
        return self.commits / COMMITS * (self.rows / self.tables) / 2

    def compute_s(self) -> float:
        """Return the seconds in which the workers compute all rows."""
        return self.rows * self.row_s / self.workers

    def commit_s(self, ceiling: Ceiling) -> float:
        """Return the seconds that each committing process needs for its rows."""
        megabytes = self.rows * self.row_bytes / self.tables / 1e6
        return megabytes / ceiling.mb_s + self.rewritten() * ceiling.row_rewrite_s

    def saturates_at(self, ceiling: Ceiling) -> float:
        """Return the number of workers that keep the committing processes busy all the time."""
        return self.rows * self.row_s / self.commit_s(ceiling)


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation. `seconds` is the time to the last commit. `waits_from` is the number of rows after which
    the workers first wait for a committing process, or None if they never do.
    """

    seconds: float
    waits_from: int | None


def simulate(plan: Plan, ceiling: Ceiling) -> Simulation:
    """Simulate a plan in steps of COMMITS commits, after which an index is rewritten. The workers fill all tables evenly,
    and are at most one step ahead of the committing processes. `ceiling` has the speed of a committing process.
    """
    group = COMMITS * SHARD_BYTES // plan.row_bytes  # rows of one table in a step
    computing = group * plan.tables * plan.row_s / plan.workers
    writing = group * plan.row_bytes / 1e6 / ceiling.mb_s
    rows, computed, committed, waits_from = 0, 0.0, 0.0, None
    while rows < plan.rows // plan.tables:
        ready = computed + computing
        if committed > ready and waits_from is None:
            waits_from = rows * plan.tables
        computed = max(ready, committed)
        rows += group
        committed = computed + writing + rows * ceiling.row_rewrite_s
    return Simulation(committed, waits_from)
