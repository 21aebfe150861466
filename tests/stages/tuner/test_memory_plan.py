"""The size of micro-batches and the limit of live memory, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.blockwise import planner
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.memory_plan import Candidate, adjust_max_tokens, live_bytes_limit, plan_run
from tests.stages.tuner.toy import CONFIG

ESTIMATE = planner.Estimate(100, 10, 20, 5, (50, 50, 40, 40), (3, 3, 4, 4))


def test_the_micro_batch_halves_above_the_limit_and_doubles_far_below_it():
    assert adjust_max_tokens(100, 100, held=10, peak=60, limit=50) == 50
    assert adjust_max_tokens(100, 100, held=10, peak=30, limit=100) == 200
    assert adjust_max_tokens(100, 100, held=10, peak=60, limit=100) == 100
    assert adjust_max_tokens(100, 40, held=10, peak=20, limit=100) == 100, "a small step says nothing about a large one"


def test_the_micro_batch_doubles_only_if_the_peak_then_stays_below_nine_tenths_of_the_limit():
    assert adjust_max_tokens(100, 100, held=10, peak=50, limit=100) == 200
    assert adjust_max_tokens(100, 100, held=10, peak=51, limit=100) == 100
    assert adjust_max_tokens(100, 100, held=10, peak=100, limit=100) == 100
    assert adjust_max_tokens(100, 100, held=10, peak=101, limit=100) == 50


def test_unpacked_weights_are_no_allowance_for_working_ahead():
    packed = planner.Estimate(100, 10, 20, 5, (50, 50, 40, 40), (3, 3, 4, 4), unpacked=30)
    bare = replace(packed, unpacked=0)
    assert packed.peak("blocks") > bare.peak("blocks")
    assert live_bytes_limit(packed, "blocks", 10**6) == live_bytes_limit(bare, "blocks", 10**6) > bare.peak("blocks")
    assert live_bytes_limit(packed, "whole", 10**6) == 10**6 - round(0.25 * packed.block_work) < 10**6


def test_a_resumed_run_reads_its_micro_batch_size_by_its_present_and_by_its_former_name():
    config = replace(CONFIG, micro_batch="auto")
    for state in ({"plan": "whole", "max_tokens": 44}, {"plan": "whole", "piece": 44}):
        start = Checkpoint(3, Path(), state)
        assert plan_run(config, Candidate(4, "whole", ESTIMATE), 100, 10**6, start, print).max_tokens == 44
    assert plan_run(config, Candidate(4, "whole", ESTIMATE), 100, 10**6, None, print).max_tokens == 400
