"""The page on several machines says what the code computes, from constants that the code has."""

from __future__ import annotations

import pytest

from data.research.pages import commit_plan
from data.research.pages.commit_plan import Ceiling, Plan, simulate
from pipeline.store import shards
from pipeline.store import table as store_table


def test_the_page_computes_with_the_constants_of_the_store() -> None:
    assert (commit_plan.COMMITS, commit_plan.SHARD_BYTES) == (store_table.COMMITS, shards.SHARD_BYTES)


def test_the_simulation_ends_when_the_slower_side_has_ended_and_names_the_row_from_which_workers_wait() -> None:
    limit = Ceiling(100.0, 100.0, 1e-6, 200.0, 300.0)
    for plan, waits in ((Plan(10**7, 2**20, 0.05, 64), True), (Plan(10**7, 2**20, 0.05, 64, 64), False)):
        found = simulate(plan, limit)
        assert found.seconds == pytest.approx(max(plan.compute_s(), plan.commit_s(limit)), rel=0.05)
        assert (found.waits_from is not None) == waits
    growing = simulate(Plan(10**7, 2**20, 0.05, 4), limit)
    assert growing.waits_from and 0 < growing.waits_from < 10**7, "the index grows until rewriting it decides"
