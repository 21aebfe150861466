"""Training steps on a CPU beside PyTorch's: `python -m tests.bench.cpu --threads 1 --threads 2`.

Both sides train LoRA on the transformer of `data/assets/micro`, with equal shapes, targets and optimizer, in float32. PyTorch
runs
diffusers' Flux2Transformer2DModel with peft. Each side is a process of its own, and the two take steps in turns. So other work on
the machine slows both, and the least seconds of each can be compared. On a busy machine compare the CPU seconds of one thread:
waiting for a core does not count in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click

from stages.footprint import peak_resident
from tests.bench.environment import describe

FAMILY, FOLDER = "micro", "data/assets/micro/transformer"
SIDES = ("mlx", "torch")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PASSIVE = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}  # idle threads sleep


@dataclass(frozen=True)
class Shape:
    batch: int = 4
    pixels: int = 192
    rank: int = 32


class Side:
    """A process that takes a training step when it is asked to."""

    def __init__(self, name: str, shape: Shape, threads: int) -> None:
        self.name, self.rows = name, list[dict[str, float]]()
        command = [sys.executable, "-m", "tests.bench.cpu", "--serve", name, "--shape", json.dumps(asdict(shape))]
        environment = {**os.environ, **PASSIVE, **dict.fromkeys(THREADS, str(threads))}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> None:
        """Keeps its row: seconds, CPU seconds, and peak memory of the process in GB."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self.name} ended with exit status {self.process.wait()}")
        self.rows.append(json.loads(line))

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()

    def summary(self, warm: int) -> dict[str, float]:
        """Of the steps after the first `warm`; the peak memory in GB."""
        rows = self.rows[warm:]
        seconds = [row["s"] for row in rows]
        return {
            "least_s": min(seconds),
            "s": statistics.median(seconds),
            "cpu_s": min(row["cpu_s"] for row in rows),
            "peak_gb": rows[-1]["peak_gb"],
        }


def compare(shape: Shape, threads: int, steps: int) -> dict[str, Any]:
    """In turns, after two steps to warm up."""
    sides = [Side(name, shape, threads) for name in SIDES]
    try:
        for _ in range(steps + 2):
            for side in sides:
                side.step()
    finally:
        for side in sides:
            side.close()
    ours, theirs = (side.summary(2) for side in sides)
    return {
        "threads": threads,
        **asdict(shape),
        **{f"{name}_{key}": value for name, row in zip(SIDES, (ours, theirs), strict=True) for key, value in row.items()},
        **{f"{key}_ratio": ours[key] / theirs[key] for key in ours},
    }


def mlx_step(shape: Shape) -> Callable[[], Any]:
    import stages  # noqa: F401  (a fast BLAS, before MLX)
    from stages.tuner.blockwise.device import configure_scheduler

    configure_scheduler()  # as in training, before MLX's first operation
    from stages.text_to_image.families import family
    from stages.text_to_image.train.memory import BatchShape
    from stages.text_to_image.train.profile import profile_settings, random_batch, random_training

    record = family(FAMILY)
    config = profile_settings(rank=shape.rank, batch_size=shape.batch, precision="float32")
    training = random_training(record, config)
    size = BatchShape(shape.batch, shape.pixels, shape.pixels, record.text_tokens, record.architecture.pixels_per_token)
    batch = random_batch(record, size)
    return lambda: training.step([batch], config.lr)


def torch_step(shape: Shape) -> Callable[[], Any]:
    import torch
    from diffusers import Flux2Transformer2DModel
    from peft import LoraConfig

    from stages.text_to_image.families import family

    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ[THREADS[0]]))
    model = Flux2Transformer2DModel.from_pretrained(FOLDER, torch_dtype=torch.float32)
    model.requires_grad_(False)
    linears = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "transformer_blocks" in name]
    model.add_adapter(LoraConfig(r=shape.rank, lora_alpha=shape.rank, target_modules=linears))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4)
    record, side = family(FAMILY), shape.pixels // 16
    x = torch.randn(shape.batch, side * side, model.config.in_channels)
    noise = torch.randn_like(x)
    text = torch.randn(shape.batch, record.text_tokens, model.config.joint_attention_dim)
    at = torch.arange(side)
    x_ids = torch.cartesian_prod(torch.arange(1), at, at, torch.arange(1)).expand(shape.batch, -1, -1)
    text_ids = torch.cartesian_prod(*(torch.arange(1),) * 3, torch.arange(record.text_tokens)).expand(shape.batch, -1, -1)
    timestep = torch.full((shape.batch,), 0.5)

    def step() -> float:
        noisy = 0.5 * x + 0.5 * noise
        made = model(
            hidden_states=noisy, encoder_hidden_states=text, timestep=timestep, img_ids=x_ids, txt_ids=text_ids, guidance=None
        ).sample
        loss = torch.nn.functional.mse_loss(made, noise - x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def serve(side: str, shape: Shape) -> None:
    step = {"mlx": mlx_step, "torch": torch_step}[side](shape)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        step()
        row = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        row["peak_gb"] = peak_resident() / 1e9
        click.echo(json.dumps(row))


@click.command()
@click.option("--threads", multiple=True, type=int, default=(1, 2), show_default=True, help="Threads of each side.")
@click.option("--steps", default=20, show_default=True, help="Measured steps of each side, after two to warm up.")
@click.option("--shape", default="{}", help="batch, pixels and rank as a JSON object; what is left out has a default.")
@click.option("--serve", "side", type=click.Choice(SIDES), help="Be one side: take a step for each line of standard input.")
def main(threads: tuple[int, ...], steps: int, shape: str, side: str | None) -> None:
    """Compare a training step on this CPU with PyTorch's, and print one row for each number of threads in `threads`. With
    `side`, "mlx" or "torch", take steps of that side for a comparing process instead.
    """
    sizes = Shape(**json.loads(shape))
    if side:
        serve(side, sizes)
        return
    for count in threads:
        row = {key: round(value, 4) for key, value in compare(sizes, count, steps).items()}
        click.echo(json.dumps({"kind": "cpu", "family": FAMILY} | row | describe("mlx")))


if __name__ == "__main__":
    main()
