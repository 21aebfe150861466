from dataclasses import replace

import mlx.core as mx
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline import memory, plot
from pipeline.bench_train import Rig
from pipeline.memory import Setup
from pipeline.project import Project
from stages.models.families import FAMILIES
from stages.models.flux2 import Flux2Config

TINY = Setup(FAMILIES["tiny"], 128, steps=6)


@pytest.fixture(scope="module")
def rig():
    return Rig(TINY.family, 16, 32, "adamw", (128, 128))


class Leaking(Rig):
    """A trainer that forgets to forget its adapters' gradients."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = []

    def inputs(self, x_BLC):
        made = super().inputs(x_BLC)
        self.kept.append(mx.zeros((1 << 19,)) + 1)
        mx.eval(self.kept[-1])
        return made


def test_the_peak_of_all_phases_is_mlx_s_own_within_a_hundredth(rig):
    rig.step("whole")
    peaks = []
    original = mx.reset_peak_memory
    high = 0

    def reset():
        nonlocal high
        high = max(high, mx.get_peak_memory())
        original()

    original()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "reset_peak_memory", reset)
        for _ in range(3):
            meter = memory.profile(rig, "whole", 3)
            peaks.append(abs(max(high, mx.get_peak_memory()) / meter.peak - 1))
            high = 0
            original()
    assert min(peaks) < 0.01


def test_a_planted_leak_is_found_in_its_phase_and_none_where_there_is_none(rig):
    assert list(memory.leaks(memory.profile(rig, "whole", 6))) == ["no phase keeps more from step to step"]
    found = list(memory.leaks(memory.profile(Leaking(TINY.family, 16, 4, "adamw", (64, 64)), "whole", 6)))
    assert len(found) == 1
    assert found[0].startswith("LEAK: batch keeps 2.1")


def test_a_report_has_rows_a_plot_and_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64, 96))
    said = list(memory.report(replace(TINY, steps=2, bits=4, limit=10**10), tmp_path))
    rows = pq.read_table(tmp_path / memory.ROWS).to_pylist()
    assert [(row["step"], row["phase"]) for row in rows] == [
        (step, phase) for step in (1, 2) for phase in ("batch", "gradients", "optimizer")
    ]
    assert all(row["peak"] >= row["active"] > 0 and row["bits"] == 4 for row in rows)
    assert set(plot.read(tmp_path / memory.PICTURE)) and Image.open(tmp_path / memory.PICTURE).size[0] > 500
    assert "96 px would fit, plan whole" in said


def test_advice_says_which_bits_would_fit_and_what_would_not(monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64, 128))
    monkeypatch.setattr(memory, "print_of", lambda setup, side, rig, bits: fake(side * bits))
    monkeypatch.setattr(memory, "_rigs", lambda setup: [(bits, None) for bits in memory.BITS])
    said = list(memory.advice(replace(TINY, limit=128 * 8)))
    assert said[-2:] == ["64 px would fit, plan whole", "128 px would fit with base_bits = 8, plan whole"]
    assert list(memory.advice(replace(TINY, limit=300)))[-1] == "128 px would not fit: with base_bits = 4 it needs 512 B"


def fake(need):
    return memory.Footprint(need, 0, ("single",), {"single": 0}, {"single": 0}, {"single": 0})


def test_one_block_of_each_kind_foretells_the_whole(rig):
    config = Flux2Config.from_dict(TINY.family.transformer)
    small = Rig(TINY.family, 16, 32, "adamw", (128, 128), replace(config, num_layers=1, num_single_layers=1))
    told, measured = memory.print_of(TINY, 128, small, 16), rig.footprint()
    assert told.kinds == measured.kinds
    assert told.grads == measured.grads
    held = sum(v.nbytes for v in rig.adapters.values()) + sum(v.nbytes for v in rig.state.values())
    weights = sum(v.nbytes for b in rig.model.blocks for v in b.weights.values()) + sum(v.nbytes for v in rig.model.top.values())
    assert told.held == pytest.approx(held + weights, rel=0.01)


def test_a_project_s_settings_are_profiled_and_what_is_given_holds_instead(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "project.toml").write_text(
        '[project]\nfamily = "tiny"\n[images]\nfolder = "images"\n'
        "[buckets]\nresolutions = [64, 96]\n[train]\nrank = 4\nbase_bits = 8\n"
    )
    nothing = dict.fromkeys(("family", "pixels", "bits", "plan", "rank"))
    found = memory.of_project(Project.open(folder), {"pixels": None, "steps": 2, "plan": "blocks"})
    assert (found.pixels, found.bits, found.rank, found.plan, found.steps) == (96, 8, 4, "blocks", 2)
    with pytest.raises(ValueError, match="500 pixels are wrong"):
        list(memory.command(Project.open(folder), nothing | {"pixels": 500, "steps": 1}))
