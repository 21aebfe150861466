"""[train] stream_blocks: a run whose base stays on disk gives the bits of one whose base is in memory, in less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from stages.text_to_image.train.memory import ImageEstimator, largest_batch
from tests.stages.text_to_image.train.runs import BASE, EVERYTHING, TINY, Run, rich_tables, weights

DEEP = {"num_single_layers": 16, "num_attention_heads": 8, "attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8)}


SHORT = replace(EVERYTHING, steps=2, accumulate=1)


@pytest.mark.parametrize("config", [SHORT, replace(SHORT, variant="dora", memory="blocks")], ids=["lora", "dora"])
def test_a_run_with_its_base_on_disk_writes_the_same_rows_and_the_same_adapter(config, transformer, tmp_path):
    kept = Run(tmp_path / "kept", transformer, config, rich_tables()).go()
    read = Run(tmp_path / "read", transformer, replace(config, stream_blocks=True), rich_tables()).go()
    assert read.rows == kept.rows
    assert read.adapter == kept.adapter
    assert not (tmp_path / "read" / "streamed").exists()


def test_the_peak_is_lower_by_the_streamed_weights_and_as_estimated(tmp_path: Path):
    folder = weights(tmp_path / "transformer", **DEEP)
    sizes = TINY.architecture.transformer_config(folder, TINY)
    for plan in ("blocks", 6):
        peaks, estimates = [], []
        for on_disk in (False, True):
            config = replace(BASE, batch_size=1, steps=1, memory=plan, stream_blocks=on_disk)
            run = Run(tmp_path / f"{plan} {on_disk}", folder, config)
            training, batches = run.training(), run.micro_batches()
            training.memory = replace(training.memory, plan=plan)
            mx.clear_cache()
            mx.reset_peak_memory()
            training.step(batches, 1e-3)
            peaks.append(mx.get_peak_memory())
            size = largest_batch(run.task().sampler, TINY.architecture.pixels_per_token)
            blocks = ImageEstimator(config, TINY.architecture, sizes, size).blocks(1)
            estimates.append(blocks.memory(plan).peak)
            del training
        stored, needed = blocks.stored, blocks.stored_work(plan)
        assert needed == sum(stored[-2:] if plan == "blocks" else stored[-7:]) or plan == "blocks"
        saved = sum(stored) - needed
        assert saved <= peaks[0] - peaks[1] <= saved + max(stored), "at the peak, the next block may not be read yet"
        assert estimates[0] - estimates[1] == pytest.approx(saved, rel=0.05)
        assert saved > 0.55 * sum(stored)
