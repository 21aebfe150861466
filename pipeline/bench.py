"""Measure training steps: MLX by plan, bits and attention routing, beside PyTorch. `python -m pipeline.bench --help`.

Every case runs in a process of its own, on random weights in a family's true shape, and prints one JSON row. A step is
what training does: noise in, losses and gradients, clip, AdamW, one wait at the end. B = 1, text rows as the family has.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

LR = 1e-4
UNFUSED = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}  # how Metal routes training
TIGHT = {"MLX_MAX_MB_PER_BUFFER": "200"}  # CUDA hands over less at a time and frees sooner; at 512 px that costs a quarter


@dataclass(frozen=True)
class Case:
    """One training set-up. `plan` is backprop's for MLX; for torch: eager or compiled, with +checkpoint."""

    family: str = "klein-base-4b"
    width: int = 1024
    height: int = 1024
    plan: str = "blocks"
    bits: int = 16
    rank: int = 32
    tight: bool = False  # hold live memory to what the plan was foretold to need; else MLX's own limit holds
    unfused: bool = False
    backend: str = "mlx"
    steps: int = 6

    @property
    def image_tokens(self) -> int:
        """L."""
        return self.width // 16 * (self.height // 16)


def measure(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Seconds of the first step and the median, least and most of the others, the second left out as warm-up too."""
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    warm = seconds[2:]
    return {"first_s": seconds[0], "s": statistics.median(warm), "least_s": min(warm), "most_s": max(warm)}


def run_mlx(case: Case) -> dict[str, Any]:
    """Train a few steps with the tuner."""
    import mlx.core as mx

    from stages.models.families import FAMILIES
    from stages.models.flux2 import Flux2, Flux2Config, image_ids, text_ids
    from stages.tuner import lora, quantize
    from stages.tuner.backprop import compiles, loss_and_grads
    from stages.tuner.memory import footprint
    from stages.tuner.optimizer import AdamW, clip, global_norm

    family = FAMILIES[case.family]
    config = Flux2Config.from_dict(family.transformer)
    pack = quantize.packer(case.bits, lambda name: "transformer_blocks." in name)
    weights = {}
    for number, (name, shape) in enumerate(config.shapes().items()):
        drawn = mx.random.normal(shape, mx.bfloat16, key=mx.random.key(number)) * shape[-1] ** -0.5
        weights[name] = pack(name, drawn)
        mx.eval(weights[name])
    load_peak = mx.get_peak_memory()
    model = Flux2(config, weights)
    del weights
    targets = lora.choose(model.linears(), ["*"], case.rank)
    adapters, scales, optimizer = lora.init(targets, 0), lora.scales(targets), AdamW()
    state = optimizer.init(adapters)
    update = mx.compile(optimizer.update) if compiles() else optimizer.update
    plan: Any = int(case.plan) if case.plan.isdigit() else case.plan
    L, T = case.image_tokens, 512
    ctx_BTJ = mx.random.normal((1, T, config.joint_attention_dim), mx.bfloat16)

    def squared_error(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
        return mx.square(v_BLC.astype(mx.float32) - target_BLC).mean(axis=(1, 2))

    def inputs_of(x_BLC: mx.array) -> dict[str, Any]:
        ids = {"x_ids_L4": image_ids(case.height // 16, case.width // 16), "ctx_ids_T4": text_ids(T)}
        guidance_B = mx.array([1.0]) if config.guidance_embeds else None
        return ids | {"x_BLC": x_BLC, "ctx_BTJ": ctx_BTJ, "timesteps_B": mx.array([0.5]), "guidance_B": guidance_B}

    def step() -> None:
        nonlocal adapters, state
        noise_BLC, x0_BLC = mx.random.normal((2, 1, L, 128))
        inputs = inputs_of((noise_BLC + x0_BLC) / 2)
        loss = functools.partial(squared_error, target_BLC=noise_BLC - x0_BLC)
        losses_B, grads = loss_and_grads(model, adapters, scales, inputs, loss, plan, need if case.tight else None)
        norm = global_norm(grads)
        adapters, state = update(adapters, clip(grads, norm, 1.0), state, LR)
        mx.eval(adapters, state, losses_B, norm)
        assert norm.item() == norm.item(), "the gradient is not finite"

    mx.eval(adapters, state)
    began = time.perf_counter()
    need = footprint(model, adapters, scales, inputs_of(mx.random.normal((1, L, 128)))).need(plan)
    tried = time.perf_counter() - began
    mx.clear_cache()
    mx.reset_peak_memory()
    found: dict[str, Any] = measure(step, case.steps)
    found["first_s"] += tried
    peak, active, cache = mx.get_peak_memory(), mx.get_active_memory(), mx.get_cache_memory()
    sizes = {"peak_gb": peak, "foretold_gb": need, "active_gb": active, "cache_gb": cache, "load_peak_gb": load_peak}
    return found | {name: size / 1e9 for name, size in sizes.items()} | {"version": importlib.metadata.version("mlx")}


def run(case: Case) -> dict[str, Any]:
    """A case's row: what was asked and what was found."""
    if case.backend == "torch":
        from pipeline.bench_torch import run_torch

        found = run_torch(case, measure)
    else:
        found = run_mlx(case)
    return asdict(case) | {"tokens": case.image_tokens + 512} | found


def apart(case: Case) -> dict[str, Any]:
    """The same in a process of its own; a failure is a row too."""
    command = [sys.executable, "-m", "pipeline.bench", "--one", json.dumps(asdict(case))]
    environment = os.environ | (UNFUSED if case.unfused else {}) | (TIGHT if case.tight else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return asdict(case) | {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def standard(family: str) -> Iterator[Case]:
    """The cases of the documentation's table."""
    for px in (512, 768, 1024):
        yield Case(family, px, px, "whole")
        yield Case(family, px, px, "blocks")
        yield from (Case(family, px, px, "blocks", bits, tight=True) for bits in (16, 8, 4))
    yield Case(family, plan="12", tight=True)
    yield Case(family, height=1008, tight=True)  # 4544 rows: no multiple of 128
    yield Case(family, 512, 528, plan="whole")
    yield Case(family, unfused=True, tight=True)
    if importlib.util.find_spec("torch"):
        for px in (512, 1024):
            for plan in ("eager", "compiled", "compiled+checkpoint"):
                yield Case(family, px, px, plan, backend="torch")


@click.command()
@click.option("--one", default="", help="a case as JSON: run it here and print its row")
@click.option("--case", "cases", multiple=True, help="a case as JSON, fields left out have defaults; may be repeated")
@click.option("--family", default="klein-base-4b", help="family of the standard cases, where no case is given")
def main(one: str, cases: tuple[str, ...], family: str) -> None:
    """Measure training steps and print one JSON row per case."""
    if one:
        click.echo(json.dumps(run(Case(**json.loads(one)))))
        return
    wanted = [Case(**json.loads(case)) for case in cases] or list(standard(family))
    for case in wanted:
        click.echo(json.dumps(apart(case)))


if __name__ == "__main__":
    main()
