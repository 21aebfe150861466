"""Blocks whose weights stay on disk: the same bits, two blocks in memory at most, and nothing left behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from stages.tuner import quantize, stored
from stages.tuner.blockwise.backprop import loss_and_grads, predict_base
from stages.tuner.blockwise.forward import model_forward
from stages.tuner.blockwise.visit import Visit
from stages.tuner.memory import Blocks
from stages.tuner.stored import StoredWeight, WeightFolder
from tests.stages.tuner.blockwise.test_backprop import Stream, assert_same, batch, loss_of, tiny, trained

WIDTH, BLOCKS, ROWS = 1024, 12, 8
BYTES = 4 * WIDTH * WIDTH  # of a block's weight


def streamed(model: Any, folder: Path) -> Any:
    """The model with the matrices of its blocks in files."""
    files = WeightFolder(folder)
    for block in model.blocks:
        for name, weight in block.weights.items():
            if len(weight.shape) == 2:
                block.weights[name] = files.store(f"{block.name}.{name}", weight)
    files.belongs_to(model)
    return model


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("plan", ["whole", "blocks", 2])
def test_weights_read_from_disk_give_the_same_bits_of_every_gradient(plan, bits, tmp_path):
    found = []
    for on_disk in (False, True):
        model = tiny()
        for block in model.blocks:
            block.weights.update({name: quantize.pack_if_possible(weight, bits) for name, weight in block.weights.items()})
        adapters, scales = trained(model)
        model = streamed(model, tmp_path) if on_disk else model
        losses_B, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
        drawn = model_forward(model, (adapters, scales))(**batch())
        found.append(({"loss": losses_B, "drawn": drawn, "base": predict_base(model, batch())}, grads))
    (kept, kept_grads), (read, read_grads) = found
    assert_same(read, kept, 0)
    assert_same(read_grads, kept_grads, 0)


class Heavy(Stream):
    """Blocks of one Linear each whose weights are larger than everything else, so that memory can be counted in weights."""

    def __init__(self) -> None:
        self.x_BK = mx.random.normal((ROWS, WIDTH), key=mx.random.key(1))
        self.blocks = [type(Stream().blocks[0])("stream", f"streams.{n}", {"fc.weight": drawn(n)}) for n in range(BLOCKS)]
        small = mx.random.normal((BLOCKS, 2, WIDTH), key=mx.random.key(3)) / WIDTH
        self.adapters = {f"streams.{n}.fc.lora_A.weight": small[n] for n in range(BLOCKS)}
        self.adapters |= {f"streams.{n}.fc.lora_B.weight": small[n].T for n in range(BLOCKS)}
        mx.eval(self.x_BK, self.adapters, [block.weights for block in self.blocks])


def drawn(n: int) -> mx.array:
    return mx.random.normal((WIDTH, WIDTH), key=mx.random.key(100 + n)) / WIDTH**0.5


def peak_in_weights(compute: Any) -> float:
    """The peak of MLX's memory while `compute()` runs, counted in weights of a block."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compute())
    return (mx.get_peak_memory() - before) / BYTES


@pytest.mark.parametrize(("plan", "most"), [("blocks", 2.2), (4, 5.4)])
def test_the_peak_is_that_of_two_blocks_or_of_those_that_keep_their_activations(plan, most, tmp_path):
    chain = streamed(Heavy(), tmp_path)
    scales = {f"{block.name}.fc": 0.1 for block in chain.blocks}
    needs = Blocks(0, 0, 0, 0, (0,) * BLOCKS, (0,) * BLOCKS, stored=(BYTES,) * BLOCKS)
    found = peak_in_weights(lambda: loss_and_grads(chain, chain.adapters, scales, {}, lambda h: mx.square(h).mean(-1), plan))
    assert found < most
    assert needs.stored_work(plan) == (2 if plan == "blocks" else 5) * BYTES
    if plan == "blocks":
        assert peak_in_weights(lambda: model_forward(_described(chain), None)()) < most


def _described(chain: Any) -> Any:
    chain.linears = lambda: {f"{block.name}.fc": (WIDTH, WIDTH) for block in chain.blocks}
    chain.dtype = mx.float32
    return chain


def test_the_files_are_deleted_with_the_model_and_those_of_ended_processes_with_the_next(tmp_path, monkeypatch):
    left = tmp_path / f"{stored.platform.node()}-999999999"
    left.mkdir()
    (left / "a.safetensors").write_bytes(b"")
    other = tmp_path / "another-machine-1"
    other.mkdir()
    model = streamed(Stream(), tmp_path)
    assert not left.exists() and other.exists() and len(list(tmp_path.glob("*/*.safetensors"))) == 20
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == [other]


def test_two_models_of_one_process_keep_their_files_apart(tmp_path):
    first, second = WeightFolder(tmp_path), WeightFolder(tmp_path)
    weights = [folder.store("toys.0", value * mx.ones((8, 64))) for value, folder in ((1, first), (2, second))]
    assert [float(stored.read(one).max()) for one in weights] == [1, 2]


def test_a_file_that_the_disk_has_no_room_for_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(mx, "save_safetensors", lambda path, arrays: Path(path).write_bytes(b"cut short"))
    with pytest.raises(OSError, match=r"toys\.0\.safetensors could not be written in full: free disk space"):
        WeightFolder(tmp_path).store("toys.0", mx.ones((8, 64)))


def test_a_visit_reads_one_block_ahead_and_waits_for_the_block_before(tmp_path, monkeypatch):
    chain = streamed(Heavy(), tmp_path)
    seen: list[str] = []
    whole = StoredWeight.read
    monkeypatch.setattr(StoredWeight, "read", lambda self: (seen.append(self.file.stem), whole(self))[1])
    visit = Visit(chain.blocks, (3, 2, 1))
    for n in visit:
        seen.append(f"compute {n}")
        visit.dispatch(visit.weights["fc.weight"].sum())
    assert seen == [
        *("streams.3.fc.weight", "compute 3", "streams.2.fc.weight", "compute 2"),
        *("streams.1.fc.weight", "compute 1"),
    ]
