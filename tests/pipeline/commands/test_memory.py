import json
import re
from dataclasses import replace

import mlx.core as mx
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.pages import recipe
from pipeline import runner
from pipeline.commands import memory
from pipeline.commands.clean import clean
from pipeline.commands.memory import Setup
from pipeline.commands.plots import TEXT_CHUNK
from pipeline.commands.query import run_query
from pipeline.project.project import Project
from stages.text_to_image.families import FAMILIES
from stages.text_to_image.train import memory_plan
from stages.tuner.blockwise.meter import Meter
from stages.tuner.blockwise.planner import FACTOR
from tests import projects
from tests.bench.steps import Rig, settings

TINY = Setup(FAMILIES["tiny"], settings(rank=4), 128)


@pytest.fixture(scope="module")
def rig():
    return Rig(TINY.family, settings(), TINY.batch(128))


class Leaking(Rig):
    """A trainer that forgets to forget something of its inputs."""

    def __init__(self, *arguments, values):
        super().__init__(*arguments)
        self.kept, self.values = [], values

    def inputs(self, x_BLC):
        made = super().inputs(x_BLC)
        self.kept.append(mx.zeros((self.values,)) + 1)
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


@pytest.mark.parametrize(("values", "size"), [(1 << 19, "2.1 MB"), (1 << 17, "524 kB"), (1 << 13, "32.8 kB")])
def test_a_planted_leak_is_found_in_its_phase_however_small(values, size):
    (found,) = memory.leaks(memory.profile(Leaking(TINY.family, TINY.train, TINY.batch(64), values=values), "whole", 6))
    assert found == f"LEAK: batch keeps {size} more every step"


def test_where_nothing_leaks_it_is_said_from_what_size_on_and_from_few_steps_nothing_is_said(rig):
    assert list(memory.leaks(memory.profile(rig, "whole", 6))) == ["no phase keeps 16.4 kB or more from step to step"]
    (said,) = memory.leaks(memory.profile(rig, "whole", 4))
    assert said == "too few steps to tell whether a phase keeps more from step to step; 5 or more are wanted"


def test_a_report_has_rows_a_plot_and_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64, 96))
    train = settings(base_bits=4, rank=4, variant="dora", batch_size=2)
    said = list(memory.report(replace(TINY, train=train, steps=2), tmp_path))
    rows = pq.read_table(tmp_path / memory.ROWS).to_pylist()
    assert [(row["step"], row["phase"]) for row in rows] == [
        (step, phase) for step in (1, 2) for phase in ("batch", "gradients", "optimizer")
    ]
    assert all(row["peak"] >= row["active"] > 0 and row["bits"] == 4 and row["samples"] == 2 for row in rows)
    with Image.open(tmp_path / memory.PICTURE) as picture:
        assert picture.size[0] > 500 and len(picture.convert("RGB").getcolors(1 << 20)) > 8
        drawn = json.loads(picture.info[TEXT_CHUNK])
    assert [sorted(curves) for curves in drawn.values()] == 2 * [["batch", "gradients", "optimizer"]]
    assert said[0].endswith("128 px x 2, 4 bits, dora of rank 4, adamw, plan whole")
    assert "96 px would fit with [train] base_bits = 16, plan whole" in said


def test_the_profile_hands_over_work_as_training_does_before_it_asks_for_an_array(monkeypatch, tmp_path):
    asked = []

    def settle(*given):
        asked.append("estimated")
        raise ValueError("far enough")

    monkeypatch.setattr(memory, "limit_command_buffers", lambda: asked.append("decided"))
    monkeypatch.setattr(memory_plan, "settle", settle)
    with pytest.raises(ValueError, match="far enough"):
        next(memory.report(TINY, tmp_path))
    assert asked == ["decided", "estimated"]


def test_what_is_expected_is_what_training_expects_and_near_what_is_measured(rig):
    setup = replace(TINY, train=rig.c)
    for plan in ("blocks", "whole"):
        train = replace(rig.c, memory=plan)
        samples, chosen, need = memory_plan.settle(replace(setup, train=train).ask, rig.batch, setup.limit)
        assert (samples, chosen) == (1, plan)
        meter = memory.profile(rig, plan, 2)
        elsewhere = meter.rows[0]["before"] - setup.ask.estimate(rig.batch, 1).held
        assert 1 / FACTOR < need / (meter.peak - elsewhere) < FACTOR


def test_advice_says_which_bits_would_fit_and_what_would_not(monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64, 128))

    def limited(side: int, bits: int) -> Setup:
        found = replace(TINY, train=settings(rank=4, base_bits=bits)).ask.estimate(TINY.batch(side), 1)
        return replace(TINY, train=settings(rank=4, memory_gb=found.peak("blocks") / 1e9 + 1e-6))

    assert list(memory.advice(limited(128, 16)))[-1] == "128 px would fit, plan blocks"
    assert list(memory.advice(limited(128, 4)))[-1] == "128 px would fit with [train] base_bits = 4, plan blocks"
    said = list(memory.advice(limited(64, 4)))
    assert said[-2] == "64 px would fit with [train] base_bits = 4, plan blocks"
    assert said[-1].startswith('128 px would not fit: with [train] base_bits = 4; [train.optimizer] kind = "adamw8bit" it needs ')


def test_what_cannot_fit_is_refused_as_training_refuses_it(tmp_path):
    setup = replace(TINY, train=settings(rank=4, memory_gb=1e-6))
    with pytest.raises(ValueError, match=r"^train: the plan blocks needs about .* base_bits = 4.* need .*, too much as well"):
        list(memory.report(setup, tmp_path))


def test_a_project_s_settings_are_profiled_and_what_is_given_holds_instead(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "project.toml").write_text(
        '[project]\nfamily = "tiny"\n[images]\nfolder = "images"\n'
        '[buckets]\nresolutions = [64, 96]\n[train]\nrank = 4\nbase_bits = 8\nvariant = "dora"\n'
    )
    nothing = dict.fromkeys(("family", "pixels", "bits", "plan", "rank")) | {"steps": 2}
    found = memory.asked(Project(folder), nothing | {"plan": "3", "bits": "16"})
    assert (found.family.name, found.pixels, found.steps) == ("tiny", 96, 2)
    assert (found.train.base_bits, found.train.rank, found.train.variant, found.train.memory) == (16, 4, "dora", 3)
    with pytest.raises(ValueError, match="500 pixels are wrong"):
        memory.asked(Project(folder), nothing | {"pixels": 500})
    with pytest.raises(ValueError, match="plan must be whole, blocks or a number of blocks"):
        list(memory.report(memory.asked(Project(folder), nothing | {"plan": "sideways"}), tmp_path))


class Keeping(projects.Silent):
    """A console that keeps an array each time that it is told of progress: a leak in whatever stage runs."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def progress(self, done, total, unit):
        self.kept.append(mx.zeros((1 << 14,)) + 1)
        mx.eval(self.kept[-1])


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_weights):
    """A project whose latents were made under a meter, and what was said."""
    folder = projects.make(tmp_path_factory.mktemp("measured") / "project", tiny_weights)
    projects.edit(folder, "[embeddings]", "[latents]\nbatch_size = 1\n\n[embeddings]")
    projects.build(folder, "images", "captions", "buckets")
    return folder, projects.latentmill(folder, "run", "latents", "--memory")


def test_any_stage_is_measured_at_its_real_work_batch_by_batch_with_the_same_rows(measured, tmp_path):
    folder, said = measured
    crops = len(projects.content(folder, "latents"))
    rows = pq.read_table(folder / "tables" / "memory" / "latents.parquet").to_pylist()
    assert [(row["step"], row["phase"]) for row in rows] == [*((n, "latents") for n in range(crops)), (crops, "end")]
    assert all(row["peak"] > 0 for row in rows[:-1])
    assert "no phase keeps 16.4 kB or more" in said and f"in {crops} batches" in said
    other = projects.copied(folder, tmp_path / "project")
    projects.build(other, "images", "captions", "buckets", "latents")
    assert projects.content(other, "latents") == projects.content(folder, "latents")
    assert "latents made nothing" in projects.latentmill(folder, "run", "latents", "--memory")


def test_a_leak_that_is_planted_in_a_stage_is_found_and_the_outcome_has_the_meter_s_peak(measured, tmp_path):
    folder = projects.copied(measured[0], tmp_path / "project")
    projects.build(folder, "images", "captions", "buckets")
    meter, console = Meter(), Keeping()
    outcome = runner.run(Project(folder), "latents", console, meter)
    assert meter.leaks() == {"latents": pytest.approx(4 << 14, rel=0.01)}
    assert outcome.peak_mlx == meter.peak > meter.rows[-1]["peak"]


PAGE = recipe.FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("sql", re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL))
def test_the_rows_answer_what_the_recipe_page_asks_them_and_no_command_minds_them(sql, measured, monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64,))
    folder, _ = measured
    list(memory.report(replace(TINY, steps=2), memory.folder_of(Project(folder))))
    head, *answer = run_query(folder, sql.replace("data/cats", str(folder)), "csv").splitlines()
    assert "phase" in head.split(",") and len(answer) >= 3
    assert "memory" not in {line.split()[0] for line in projects.latentmill(folder, "status").splitlines() if line}
    list(clean(Project(folder), runs=True, dry_run=False))
    assert (folder / "tables" / "memory" / "memory.parquet").is_file()
