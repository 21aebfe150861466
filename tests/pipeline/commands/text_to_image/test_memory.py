import re
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx
import pyarrow.parquet as pq
import pytest

from data.research.pages import recipe
from pipeline.commands.clean import clean
from pipeline.commands.query import Limits, run_query
from pipeline.commands.text_to_image import memory
from pipeline.commands.text_to_image.memory import Profile
from pipeline.project.project import Project
from stages.memory import FACTOR
from stages.text_to_image.families import FAMILIES
from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
from stages.text_to_image.train.task import FlowMatching
from stages.tuner.memory import MemoryPlan, require_fit
from tests import projects

TINY = Profile(FAMILIES["tiny"], profile_settings(rank=4), 128)


def batch(side=128):
    return random_batch(TINY.family, TINY.batch(side))


@pytest.fixture(scope="module")
def training():
    return random_training(TINY.family, profile_settings())


class Leaking(FlowMatching):
    kept: ClassVar[list[mx.array]] = []
    values = 0

    def terms(self, model, batch):
        self.kept.append(mx.zeros((self.values,)) + 1)
        mx.eval(self.kept[-1])
        yield from super().terms(model, batch)


def test_the_largest_peak_of_all_phases_is_mlx_s_own_within_one_percent(training):
    training.step([batch()], 1e-4)
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
            meter = memory.measure_steps(training, batch(), 3)
            peaks.append(abs(max(high, mx.get_peak_memory()) / meter.peak - 1))
            high = 0
            original()
    assert min(peaks) < 0.01


@pytest.mark.parametrize(("values", "size"), [(1 << 19, "2.1 MB"), (1 << 13, "32.8 kB")])
def test_a_planted_leak_is_found_in_its_phase_however_small(values, size, monkeypatch):
    leaking = random_training(TINY.family, TINY.train)
    leaking.objective = Leaking(TINY.family.architecture, TINY.train.loss)
    monkeypatch.setattr(Leaking, "values", values)
    (found,) = memory.leak_lines(memory.measure_steps(leaking, batch(64), 6))
    Leaking.kept.clear()
    assert found == f"LEAK: batch retains {size} more every step"


def test_without_a_leak_the_report_says_which_leaks_would_be_seen_and_few_steps_find_none(training):
    assert list(memory.leak_lines(memory.measure_steps(training, batch(), 6))) == ["no phase retains 16.4 kB or more per step"]
    (line,) = memory.leak_lines(memory.measure_steps(training, batch(), 4))
    assert line == "too few steps to find leaks; measure 5 or more"


def test_the_estimate_is_that_of_training_and_near_the_measured_peak(training):
    for plan in ("blocks", "whole"):
        profile = replace(TINY, train=replace(training.config, memory=plan))
        found = require_fit(profile.estimator(128), profile.limit)
        assert (found.samples, found.plan) == (1, plan)
        training.memory = MemoryPlan(plan)
        meter = memory.measure_steps(training, batch(), 2)
        elsewhere = meter.rows[0]["before"] - found.blocks.held
        assert 1 / FACTOR < found.peak / (meter.peak - elsewhere) < FACTOR


def test_advice_names_the_bits_that_would_fit_and_the_sizes_that_would_not(monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64, 128))

    def limited(side: int, bits: int) -> Profile:
        found = replace(TINY, train=profile_settings(rank=4, base_bits=bits)).estimator(side).blocks(1)
        return replace(TINY, train=profile_settings(rank=4, memory_gb=found.memory("blocks").peak / 1e9 + 1e-6))

    assert list(memory.advice(limited(128, 16)))[-1] == "128 px would fit, plan blocks"
    assert list(memory.advice(limited(128, 4)))[-1] == "128 px would fit with [train] base_bits = 4, plan blocks"
    said = list(memory.advice(limited(64, 4)))
    assert said[-2] == "64 px would fit with [train] base_bits = 4, plan blocks"
    least = 'with [train] base_bits = 4, stream_blocks = true; [train.optimizer] kind = "adamw8bit"'
    assert said[-1].startswith(f"128 px would not fit: {least} it needs ")


def test_a_project_s_settings_are_measured_unless_an_option_replaces_them_and_refused_as_training_refuses_them(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "project.toml").write_text(
        '[project]\nfamily = "tiny"\n[images]\nfolder = "images"\n'
        '[buckets]\nresolutions = [64, 96]\n[train]\nrank = 4\nbase_bits = 8\nvariant = "dora"\n'
    )
    nothing = dict.fromkeys(("family", "pixels", "bits", "plan", "rank")) | {"steps": 2}
    found = memory.parse_options(Project(folder), nothing | {"plan": "3", "bits": "16"})
    assert (found.family.name, found.pixels, found.steps) == ("tiny", 96, 2)
    assert (found.train.base_bits, found.train.rank, found.train.variant, found.train.memory) == (16, 4, "dora", 3)
    with pytest.raises(ValueError, match="--pixels must be a multiple of 16, 32 or more, got 500"):
        memory.parse_options(Project(folder), nothing | {"pixels": 500})
    with pytest.raises(ValueError, match="plan must be whole, blocks or a number"):
        list(memory.report(memory.parse_options(Project(folder), nothing | {"plan": "sideways"}), tmp_path))
    profile = replace(TINY, train=profile_settings(rank=4, memory_gb=1e-6))
    with pytest.raises(ValueError, match=r"^train: plan blocks needs about .* base_bits = 4.* need .*, too much as well"):
        list(memory.report(profile, tmp_path))


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_weights):
    folder = projects.make(tmp_path_factory.mktemp("measured") / "project", tiny_weights)
    projects.edit(folder, "[embeddings]", "[latents]\nbatch_size = 1\n\n[embeddings]")
    projects.build(folder, "images", "captions", "buckets")
    return folder, projects.latentmill(folder, "run", "latents", "--only", "--memory")


def test_any_stage_can_be_measured_batch_by_batch_and_writes_the_same_rows(measured, tmp_path):
    folder, said = measured
    crops = len(projects.content(folder, "latents"))
    rows = pq.read_table(folder / "tables" / "memory" / "latents.parquet").to_pylist()
    assert [(row["step"], row["phase"]) for row in rows] == [*((n, "latents") for n in range(crops)), (crops, "end")]
    assert all(row["peak"] > 0 for row in rows[:-1])
    peak = Project(folder).current("latents").manifest()["facts"]["run"]["peak_mlx"]
    assert peak >= max(row["peak"] for row in rows), "what MLX counts begins anew with every batch"
    assert "no phase retains 16.4 kB or more" in said and f"in {crops} batches" in said
    other = projects.copied(folder, tmp_path / "project")
    projects.build(other, "images", "captions", "buckets", "latents")
    assert projects.content(other, "latents") == projects.content(folder, "latents")
    assert "latents computed no batch" in projects.latentmill(folder, "run", "latents", "--only", "--memory")


def test_the_queries_of_the_recipe_page_run_on_the_rows_and_no_command_stumbles_over_them(measured, monkeypatch):
    monkeypatch.setattr(memory, "SIDES", (64,))
    folder, _ = measured
    list(memory.report(replace(TINY, steps=2), folder / "tables" / "memory"))
    queries = re.findall(r"```sql\n(.*?)```", recipe.FILE.read_text(encoding="utf-8"), re.DOTALL)
    for sql in queries:
        head, *rows = run_query(Project(folder), sql.replace("data/cats", str(folder)), "csv", Limits(unsafe=True)).splitlines()
        assert "phase" in head.split(",") and len(rows) >= 3
    assert queries
    assert "memory" not in {line.split()[0] for line in projects.latentmill(folder, "status").splitlines() if line}
    list(clean(Project(folder), runs=True, dry_run=False))
    assert (folder / "tables" / "memory" / "memory.parquet").is_file()
