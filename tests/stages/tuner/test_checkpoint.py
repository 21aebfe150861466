import contextlib
import json
from pathlib import Path

import mlx.core as mx
import pyarrow as pa
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import checkpoint
from stages.tuner.checkpoint import ADAPTER, OPTIMIZER, ROWS, STATE
from tests.harness import writer_into

ADAPTERS = {"b.lora_B.weight": mx.array([[1.0], [-2.5]]), "b.lora_A.weight": mx.array([[0.5, 3.0, 4.0]])}
STATES = {"step": mx.array(7, mx.int32), "b.m": mx.zeros((2, 2))}


def save(folder: Path, step: int, **facts):
    return checkpoint.save(writer_into(folder), step, ADAPTERS, STATES, pa.table({"step": [step]}), {"rank": "1"}, facts)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_no_file_is_written_of_values_that_are_not_finite(tmp_path, value):
    arrays = ADAPTERS | {"b.lora_B.weight": mx.array([[1.0], [value]])}
    with pytest.raises(ValueError, match=r"b.lora_B.weight has values that are not finite, .*; lower the learning rate"):
        checkpoint.save(writer_into(tmp_path), 7, arrays, STATES, pa.table({"step": [7]}), {}, {})
    assert not checkpoint.find_checkpoints(tmp_path) and not list(tmp_path.rglob("[!.]*.safetensors"))


@pytest.mark.parametrize("name", [ADAPTER, OPTIMIZER, ROWS])
def test_a_checkpoint_with_a_missing_cut_or_changed_file_is_not_intact(tmp_path, name):
    for number, damage in enumerate((lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: None)):
        saved = save(tmp_path / str(number), 7)
        damaged = damage((saved.folder / name).read_bytes())
        (saved.folder / name).unlink() if damaged is None else (saved.folder / name).write_bytes(damaged)
        (found,) = checkpoint.find_checkpoints(tmp_path / str(number))
        assert not found.intact(name)
        assert all(found.intact(other) for other in {ADAPTER, OPTIMIZER, ROWS} - {name})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", json.dumps({"step": 3}), json.dumps({"step": None, "files": {}})),
        json.dumps({"step": 7, "files": {ADAPTER: {"byteq": 8, "sha256": "0"}}}),
        json.dumps({"step": 7, "files": {ADAPTER: {"bytes": 8, "shb256": "0"}}}),
        json.dumps({"step": 7, "files": [ADAPTER]}),
    ],
)
def test_a_folder_without_a_readable_state_is_no_checkpoint(tmp_path, text):
    saved = save(tmp_path, 7)
    (saved.folder / STATE).write_text(text)
    assert checkpoint.find_checkpoints(tmp_path) == []


# The second: a run made shorter retains its own beside those of the longer one.
@pytest.mark.parametrize(("steps", "last", "left"), [((5, 20, 10), 20, [20, 10]), ((30, 20, 1, 2, 3), 3, [30, 20, 3, 2])])
def test_checkpoints_are_listed_newest_first_and_only_the_newest_retain_their_optimizer_state(steps, last, left, tmp_path):
    for step in steps:
        save(tmp_path, step)
    assert [found.step for found in checkpoint.find_checkpoints(tmp_path)] == sorted(steps, reverse=True)
    checkpoint.prune(tmp_path, last, 2)
    assert [found.step for found in checkpoint.find_checkpoints(tmp_path) if found.intact(OPTIMIZER)] == left
    assert all(found.intact(ADAPTER, ROWS) for found in checkpoint.find_checkpoints(tmp_path))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("deleted", range(6))
def test_a_kill_while_an_old_timed_checkpoint_is_deleted_leaves_no_damaged_one(deleted, tmp_path, monkeypatch):
    for step in (5, 10):
        save(tmp_path, step, timed=True)
    real, left = Path.unlink, [deleted]

    def unlink(path, missing_ok=False):
        if not left[0]:
            raise Killed
        left[0] -= 1
        real(path, missing_ok)

    def rmtree(folder, ignore_errors=False):
        for path in sorted(Path(folder).iterdir()):
            path.unlink()
        Path(folder).rmdir()

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Path, "unlink", unlink)
        patch.setattr(checkpoint.shutil, "rmtree", rmtree)
        checkpoint.prune_timed(tmp_path, 10)
    assert checkpoint.damaged_checkpoints(tmp_path) == {}
    checkpoint.delete_incomplete(tmp_path, 10)
    assert [path.name for path in (tmp_path / checkpoint.FOLDER).iterdir()] == ["step-000010"]
