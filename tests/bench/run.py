"""Measure one case in this process and print its row as JSON: `python -m tests.bench.run '{"width": 512}'`.

Weights are random and have the shapes of the family, because time and memory depend on shapes alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stages  # noqa: F401  (before mlx.core)
from stages import footprint
from stages.tuner.launched import launched_rank
from tests.bench.cases import KINDS, TORCH_PLANS, Case
from tests.bench.environment import describe

if TYPE_CHECKING:
    from stages.memory import Memory
    from stages.models.family import Family
    from stages.text_to_image.train.batches import MicroBatch
    from stages.text_to_image.train.config import TrainConfig
    from stages.tuner.blockwise.meter import Meter
    from stages.tuner.step import TrainingStep


def time_steps(step: Callable[[], Any], count: int) -> dict[str, float]:
    """`count` + 2 calls: seconds of the first, and the median, least and most of the last `count`."""
    seconds = []
    for _ in range(count + 2):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    warm = seconds[2:]
    return {"first_s": seconds[0], "s": statistics.median(warm), "least_s": min(warm), "most_s": max(warm)}


def take_step(training: TrainingStep, batch: MicroBatch, meter: Meter | None = None) -> None:
    """Take one training step. ValueError if the gradient is not finite: its time would mean nothing.

    Several ranks also exchange their losses and agree on the end of the step, as the training loop does.
    """
    result = training.step([batch], training.config.lr, meter=meter)
    training.ranks.each(result.losses)
    training.ranks.first((False, False, False))
    if not result.finite:
        raise ValueError("the gradient is not finite")


def training_settings(case: Case, record: Family) -> TrainConfig:
    """As a new project of the family begins."""
    from stages.text_to_image.train.profile import profile_settings

    begun = record.begin.get("train", {})
    targets = {"targets": begun["targets"]} if "targets" in begun else {}
    return profile_settings(case.optimizer, base_bits=case.bits, rank=case.rank, stream_blocks=case.stream, **targets)


def measure_training(case: Case) -> dict[str, Any]:
    """Time the trainer's steps for a case, and measure their memory; one more step, phase by phase, says where it peaks."""
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.text_to_image.train.memory import BatchShape, ImageEstimator
    from stages.text_to_image.train.profile import random_batch, random_training
    from stages.tuner.blockwise.device import configure_scheduler, memory_budget
    from stages.tuner.blockwise.meter import Meter
    from stages.tuner.memory import MemoryPlan
    from stages.tuner.ranks import connect
    from tests.bench.plain import random_plain_training

    if case.memory_limited:
        configure_scheduler()  # before MLX's first operation
    ranks = connect()
    record = family(case.family).without_references()
    config = training_settings(case, record)
    architecture = record.architecture
    shape = BatchShape(1, case.width, case.height, case.text_rows or record.text_tokens, architecture.pixels_per_token)
    blocks = ImageEstimator(config, architecture, architecture.transformer_config(None, record), shape).blocks(1)
    training = (random_plain_training if case.plan == "plain" else random_training)(record, config)
    training.ranks = ranks
    sizes = {"load_peak_gb": mx.get_peak_memory(), "held_gb": mx.get_active_memory()}
    if case.plan != "plain":
        plan = int(case.plan) if case.plan.isdigit() else case.plan
        memory = blocks.memory(plan, memory_budget())
        training.memory = MemoryPlan(plan, memory.live if case.memory_limited else None)
        sizes |= {"estimated_gb": memory.peak, "announced_gb": memory.footprint}
    mx.clear_cache()
    mx.reset_peak_memory()
    batch = random_batch(record, shape)
    times = time_steps(lambda: take_step(training, batch), case.steps)
    sizes |= {"peak_gb": mx.get_peak_memory(), "cache_gb": mx.get_cache_memory()}
    meter = Meter()
    take_step(training, batch, meter)
    sizes |= {f"{row['phase']}_gb": row["peak"] for row in meter.rows}
    about = {"tokens": shape.tokens, "dtype": config.precision}
    return times | about | {name: size / 1e9 for name, size in sizes.items()}


def sizes_beside(memory: Memory) -> dict[str, float]:
    """What MLX counted since its peak was reset, in GB, beside what was estimated."""
    import mlx.core as mx

    sizes = {"peak_gb": mx.get_peak_memory(), "cache_gb": mx.get_cache_memory()}
    sizes |= {"estimated_gb": memory.peak, "announced_gb": memory.footprint}
    return {name: size / 1e9 for name, size in sizes.items()}


def measure_encoder(case: Case) -> dict[str, Any]:
    """One image by the autoencoder, or one caption."""
    import mlx.core as mx

    from stages.models import autoencoder
    from stages.text_to_image.embeddings import EmbeddingsConfig
    from stages.text_to_image.embeddings.memory import encoder_memory
    from stages.text_to_image.families import family
    from stages.tuner.blockwise.device import (
        compute_exactly,
        configure_convolutions,
        configure_scheduler,
        limit_command_buffers,
        live_memory_limit,
    )
    from tests.bench.encoders import Captions, CaptionsFromFiles, Images, Latents

    # Before the first MLX operation, as in the stages.
    if case.kind == "autoencoder":
        configure_convolutions()
    elif case.memory_limited:
        limit_command_buffers() if case.kind == "text_encoder" else configure_scheduler()
    if case.exact:
        compute_exactly()
    record, dtype = family(case.family), getattr(mx, case.dtype)
    if case.kind == "text_encoder":
        config = EmbeddingsConfig(precision=case.dtype, bits=case.bits)  # type: ignore[arg-type]
        files = Path(case.weights)
        encoder: Any = CaptionsFromFiles(record, files, config) if case.weights else Captions(record, dtype, case.bits)
        memory = encoder_memory(config, record, None, False)
    else:
        encodes = case.kind == "autoencoder"
        encoder = (Images if encodes else Latents)(record, (case.width, case.height), dtype)
        given = (None, record, case.height, case.width, dtype.size, encodes)
        memory = record.architecture.autoencoder_memory(*given)
    strips = (
        {} if case.kind == "text_encoder" else {"strip_mb": autoencoder.strip_bytes() >> 20, "in_flight": autoencoder.IN_FLIGHT}
    )
    weights_gb = mx.get_active_memory() / 1e9
    mx.clear_cache()
    mx.reset_peak_memory()
    with live_memory_limit(memory.live if case.memory_limited else None):
        times = time_steps(encoder.step, case.steps)
    return times | sizes_beside(memory) | {"held_gb": weights_gb} | strips


def measure_drawing(case: Case) -> dict[str, Any]:
    """Time and memory of one denoising forward pass of the transformer, block by block as the stage `samples` draws."""
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.text_to_image.sampler import drawing_memory
    from stages.text_to_image.samples.config import SamplesConfig
    from stages.text_to_image.train.profile import profile_settings, random_transformer
    from stages.tuner.blockwise.backprop import model_forward
    from stages.tuner.blockwise.device import configure_scheduler

    if case.memory_limited:
        configure_scheduler()  # before MLX's first operation
    record = family(case.family).without_references()
    config = profile_settings(base_bits=case.bits, stream_blocks=case.stream)
    packed = SamplesConfig(base_bits=case.bits, stream_blocks=case.stream)  # type: ignore[arg-type]
    memory = drawing_memory(record, None, packed, config.precision, (case.width, case.height), case.prompts)
    model = random_transformer(record, config)
    predict = model_forward(model, None)
    predict.live_bytes = memory.live if case.memory_limited else None
    grid = case.height // 16, case.width // 16
    inputs = record.architecture.zero_inputs(model.config, case.prompts, grid, case.text_rows or record.text_tokens)
    inputs |= {name: mx.random.normal(inputs[name].shape) for name in ("x_BLC", "ctx_BTJ")}
    mx.eval(inputs["x_BLC"], inputs["ctx_BTJ"])
    mx.clear_cache()
    mx.reset_peak_memory()
    times = time_steps(lambda: predict(**inputs), case.steps)
    return times | sizes_beside(memory) | {"held_gb": mx.get_active_memory() / 1e9}


def measure_preview(case: Case) -> dict[str, Any]:
    """Time of a picture as the stage `samples` draws it: every step, two passes where the family has guidance, and decoding."""
    import mlx.core as mx

    from stages.text_to_image.families import family
    from stages.text_to_image.sampler import LatentSampler, drawing_memory, passes
    from stages.text_to_image.samples.config import SamplesConfig
    from stages.text_to_image.samples.drawing import decode
    from stages.text_to_image.train.profile import profile_settings, random_transformer
    from stages.tuner.blockwise.backprop import model_forward
    from stages.tuner.blockwise.device import configure_scheduler
    from tests.bench.encoders import Latents

    configure_scheduler()  # before MLX's first operation
    record = family(case.family).without_references()
    config = profile_settings(base_bits=case.bits)
    settings = SamplesConfig(base_bits=case.bits)  # type: ignore[arg-type]
    both, size = passes(settings, record), (case.width, case.height)
    model = random_transformer(record, config)
    predict = model_forward(model, None)
    predict.live_bytes = drawing_memory(record, None, settings, config.precision, size, both).live
    autoencoder = Latents(record, size, mx.float32).model
    text_1TJ = mx.random.normal((1, record.architecture.text_rows(record.text_tokens), model.config.text_features))
    negative = text_1TJ if both > 1 else None
    sampler = LatentSampler("the preview", record, model, predict, record.sampling_steps, record.guidance, negative)

    def draw() -> None:
        latent_1Chw = sampler.draw(text_1TJ, 0, *size)
        assert latent_1Chw is not None  # nothing stops it
        decode(autoencoder, latent_1Chw)

    return time_steps(draw, case.steps) | {"peak_gb": mx.get_peak_memory() / 1e9}


def measure_rows(case: Case) -> dict[str, Any]:
    """Reading an epoch of the case's samples, or the time that checksums add to reading one for a training step."""
    from stages.text_to_image.families import family
    from tests.bench.reading import check_samples, read_epoch

    record = family(case.family)
    features = record.architecture.transformer_config(None, record).text_features
    if case.kind == "loader":
        return read_epoch(24 * case.steps, case.width, record.text_tokens, features)
    return check_samples(4 * case.steps, case.width, record.text_tokens, features)


def measure_cluster(case: Case) -> dict[str, Any]:
    """Committing latents of the case's size, 64 rows a step; or units of 0.1 s that use no CPU on Ray workers, 20 a step."""
    from tests.bench.cluster import measure_commits, measure_workers

    if case.kind == "commit":
        return measure_commits(64 * case.steps, case.width)
    return measure_workers(case.workers, 20 * case.steps, 0.1)


def run(case: Case) -> dict[str, Any]:
    """ValueError for an unknown kind or plan."""
    if case.kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {case.kind!r}")
    if case.backend == "torch" and case.kind == "train" and case.plan not in TORCH_PLANS:
        raise ValueError(f"plan must be one of {', '.join(TORCH_PLANS)} for PyTorch, got {case.plan!r}")
    if case.backend == "torch":
        from tests.bench.torch_reference import measure_torch

        measured = measure_torch(case, time_steps)
    else:
        kinds = {"train": measure_training, "loader": measure_rows, "checksums": measure_rows, "draw": measure_drawing}
        kinds |= {"commit": measure_cluster, "workers": measure_cluster, "preview": measure_preview}
        measured = kinds.get(case.kind, measure_encoder)(case)
    return asdict(case) | measured | machine_memory() | describe(case.backend)


def machine_memory() -> dict[str, float]:
    """Peaks of this process as the machine counts them, in GB. On CUDA also what of it the pool of arrays took, and filled."""
    sizes, gpu = {"footprint_gb": footprint.peak()}, footprint.gpu()
    if gpu and gpu.used_here():
        sizes |= {"pool_gb": gpu.pool(footprint.MOST_RESERVED), "pool_used_gb": gpu.pool(footprint.MOST_USED)}
    return {name: size / 1e9 for name, size in sizes.items()}


def run_on_ranks(case: Case) -> int:
    """In `case.ranks` processes on this machine, of which the first prints the row."""
    from pipeline.ranks import rank_environments, run_ranks, visible_gpus

    command = [sys.executable, "-m", "tests.bench.run", case.to_json()]
    with tempfile.TemporaryDirectory() as folder:
        environments = rank_environments(case.ranks, Path(folder, "hosts.json"), visible_gpus(case.ranks))
        return run_ranks(command, environments, lambda line: print(line, file=sys.stderr))  # noqa: T201


def main(text: str) -> int:
    """Run the case that `text` describes in JSON, and print its row. Returns the exit code."""
    case = Case.from_json(text)
    if case.ranks > 1 and launched_rank() is None:
        return run_on_ranks(case)
    row = run(case)
    if not launched_rank():
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
