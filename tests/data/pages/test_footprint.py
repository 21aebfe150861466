"""data/docs/memory.md: the rows show what the page claims."""

import json

from data.research.pages import footprint


def test_every_stage_runs_in_what_is_announced_at_its_speed():
    rows = [row for line in footprint.ROWS.read_text().splitlines() if "free_gb" in (row := json.loads(line))]
    for free, held in zip(rows[::2], rows[1::2], strict=True):
        assert footprint.label(free) == footprint.label(held)
        assert held["free_gb"] < 1.051 * free["announced_gb"] and held["s"] < 1.03 * free["s"]
