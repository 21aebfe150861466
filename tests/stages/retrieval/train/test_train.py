"""The stage train of the pipeline retrieval: what it learns, its rows, its checkpoints, its mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pipeline import api
from pipeline.project.project import Project
from stages.retrieval.encoder import read_adapter
from stages.retrieval.train.stage import PairTask, length_pools
from tests import projects
from tests.stages.retrieval import project

UPSTREAM = ("sources", "units", "pairs", "tokens", "negatives")
SETTINGS = """
[pairs]
split = "unit"
valid = 0.3
test = 0.1
max_leak = 1.0

[tokens]
query_tokens = 24
document_tokens = 96

[train]
steps = 30
batch_size = 12
rank = 4
alpha = 8.0
lr = 5e-3
precision = "float32"
targets = ["*"]
checkpoint_every = 10

[train.schedule]
shape = "constant"
warmup_steps = 3

[train.validation]
every = 10
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose tables up to `negatives` are built."""
    folder = project.make(tmp_path_factory.mktemp("base") / "code-project", SETTINGS, verbs=10, things=8)
    project.run(folder, *UPSTREAM)
    return folder


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "project"))


def train(folder: Path, **overrides: Any) -> list[dict[str, Any]]:
    settings = {f"train.{name.replace('__', '.')}": value for name, value in overrides.items()}
    project.run(folder, "train", overrides=settings)
    return project.rows(folder, "train", settings)


def mrr(rows: list[dict[str, Any]], step: int) -> float:
    found = [1 / row["rank"] for row in rows if (row["split"], row["step"]) == ("validation", step)]
    return sum(found) / len(found)


def test_a_few_steps_raise_the_held_out_mrr(copy: Path) -> None:
    rows = train(copy, steps=20)
    assert mrr(rows, 20) >= mrr(rows, 0) + 0.05, [mrr(rows, step) for step in (0, 10, 20)]


def test_early_stopping_watches_the_mrr_which_does_not_rise_with_a_learning_rate_of_almost_zero(copy: Path) -> None:
    rows = train(copy, lr=1e-9, steps=30, validation__every=2, validation__patience=2)
    assert max(row["step"] for row in rows) == 4
    assert mrr(rows, 4) <= mrr(rows, 0) + 0.01


def test_rows_say_the_rank_of_the_own_document_and_the_hardest_other_one_and_a_micro_batch_trains_alike_up_to_rounding(
    copy: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(copy, tmp_path / "other" / "project"))
    settings = {"steps": 2, "hard_negatives": 2, "validation__every": 2}
    rows, parts = train(copy, **settings), train(other, **settings, micro_batch=5)
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in rows], rel=1e-3, abs=1e-4)
    trained = [row for row in rows if row["split"] == "train"]
    assert len(trained) == 24
    texts = {row["text_id"] for row in project.rows(copy, "tokens") if row["role"] == "document"}
    for row in trained:
        assert 1 <= row["rank"] <= row["candidates"] <= 36
        assert row["hardest_id"] in texts - {row["text_id"]}
        assert (row["rank"] == 1) == (row["score"] > row["hardest_score"])
        assert np.isfinite(row["loss"])
    held = [row for row in rows if row["split"] == "validation"]
    assert all(row["loss"] == pytest.approx(1 - 1 / row["rank"], abs=1e-6) for row in held)


def test_the_linears_of_the_settings_are_trained_and_a_file_that_lacks_one_of_them_or_half_of_one_is_refused(copy: Path) -> None:
    settings: dict[str, Any] = {"train.steps": 2, "train.targets": ["q", "v"], "train.validation.every": 2}
    project.run(copy, "train", overrides=settings)
    file = Project(copy, settings).folder("train").folder / "artifacts" / "adapter.safetensors"
    linears = PairTask(Project(copy, settings).open("train")).linears
    arrays, scales = read_adapter(file, linears)
    attention = {f"encoder.block.{n}.layer.0.SelfAttention.{name}" for n in range(2) for name in "qv"}
    assert set(scales) == attention | {"head.linear"}
    assert {scales[name] for name in attention} == {2.0}
    assert all(np.abs(np.array(value)).max() > 0 for value in arrays.values())
    stored, metadata = mx.load(str(file), return_metadata=True)
    assert set(json.loads(metadata["linears"])) == set(scales)
    changed = copy / "adapter.safetensors"
    for gone, message in (
        (["encoder.block.1.layer.0.SelfAttention.v.lora_A.weight"], r"lacks encoder.block.1.layer.0.SelfAttention.v.lora_A"),
        (
            [f"encoder.block.0.layer.0.SelfAttention.q.lora_{x}.weight" for x in "AB"],
            r"the file lacks the arrays of .*SelfAttention.q",
        ),
        (["head.linear.diff"], r"the file lacks the arrays of head.linear"),
    ):
        mx.save_safetensors(str(changed), {name: value for name, value in stored.items() if name not in gone}, metadata)
        with pytest.raises(ValueError, match=message):
            read_adapter(changed, linears)
    with pytest.raises(ValueError, match="is it of another model"):
        read_adapter(file, {name: (outputs + 1, inputs) for name, (outputs, inputs) in linears.items()})


def test_a_damaged_checkpoint_is_made_again_with_the_same_bits(copy: Path) -> None:
    settings = {"train.steps": 2, "train.checkpoint_every": 1, "train.validation.every": 2}
    project.run(copy, "train", overrides=settings)
    found = api.Project(copy, settings)
    state = found.current("train").folder / "artifacts" / "checkpoints" / "step-000001" / "state.json"
    before = {path: path.read_bytes() for path in state.parent.iterdir()}
    state.write_text("{}")
    assert found.verify(repair=True) == []
    assert {path: path.read_bytes() for path in before} == before


def task_of(folder: Path, **overrides: Any) -> PairTask:
    opened = Project(folder, {f"train.{name}": value for name, value in overrides.items()}, fetch=True)
    return PairTask(opened.open("train"))


def test_an_epoch_draws_every_pair_once_in_batches_of_documents_of_similar_length(base: Path) -> None:
    task = task_of(base, batch_size=4)
    drawn = [[sample.pair for sample in each] for step in range(1, 1 + len(task.data.trained) // 4) for each in task.draw(step)]
    flat = [pair.pair_id for each in drawn for pair in each]
    assert len(set(flat)) == len(flat)
    assert all(len(each) == 4 for each in drawn)
    pools = length_pools(list(range(64)), 2)
    assert pools == sorted(pools) and set(pools) == set(range(8))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch_size": 999}, r"train.batch_size must be <= \d+, the number of training pairs, got 999"),
        ({"initial": "none.safetensors"}, r"\[train\] initial: there is no file"),
        ({"targets": ["qq"]}, r"targets: 'qq' matches no Linear"),
        ({"memory_gb": 1e-4}, r"train: plan \w+ needs about .* GB for 12 pairs, more than the 0.0001 GB"),
    ],
)
def test_a_mistake_is_one_line(copy: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        project.run(copy, "train", overrides={f"train.{name}": value for name, value in overrides.items()})
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.proof("two ranks compare every pair with the whole batch as one process does")
def test_two_ranks_compare_every_pair_with_the_whole_batch_as_one_process_does(base: Path, tmp_path: Path, cases, capfd) -> None:
    every: tuple[dict[str, Any], ...] = ({"micro_batch": 2, "hard_negatives": 2, "accumulate": 2, "ema__decay": 0.5}, {})
    for number, settings in enumerate(every[: cases(1, 2)]):
        places = [Path(shutil.copytree(base, tmp_path / str(number) / name / "project")) for name in ("alone", "ranked")]
        compare_ranks(settings, *places)
        assert "2 ranks train together" in capfd.readouterr().err


def compare_ranks(settings: dict[str, Any], copy: Path, other: Path) -> None:
    settings = {"steps": 4, "lr": 1e-3, "checkpoint_every": 2, "validation__every": 4, **settings}
    whole = train(copy, **settings)
    given = {f"train.{name.replace('__', '.')}": value for name, value in settings.items()}
    overrides = [f"--set={name}={value}" for name, value in given.items()]
    projects.latentmill(other, "launch", "--ranks", "2", *overrides)
    ranked = project.rows(other, "train", given)
    place = ["step", "split", "sample", "pair_id", "rank", "hardest_id"]
    whole, ranked = (sorted(rows, key=lambda row: [row[name] for name in place]) for rows in (whole, ranked))
    assert [[row[name] for name in place] for row in ranked] == [[row[name] for name in place] for row in whole]
    for most, steps in ((1e-6, {0, 1}), (1e-5, set(range(5)))):
        losses = [[row["loss"] for row in rows if row["step"] in steps] for rows in (whole, ranked)]
        np.testing.assert_allclose(*losses, rtol=most, atol=most)
    artifacts = [Project(folder, given).folder("train").folder / "artifacts" / "adapter.safetensors" for folder in (copy, other)]
    arrays = [dict(mx.load(str(file))) for file in artifacts]
    for name, value in arrays[0].items():
        np.testing.assert_allclose(np.array(value), np.array(arrays[1][name]), atol=3e-5, err_msg=name)
