"""Measure the cost of splitting large kernels as on Metal: `python -m tests.bench.kernel_limit`.

Training steps with random weights of a family's true widths alternate between two ways: with kernels as the device has
them, and with kernels of at most --tflop. A GPU is timed by the clock, a CPU in CPU seconds.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

import click

import stages  # noqa: F401  (a fast BLAS, before MLX)
from tests.bench.environment import describe


@click.command()
@click.option("--family", "name", default="klein-base-4b", show_default=True)
@click.option("--px", default=512, show_default=True)
@click.option("--blocks", default=1, show_default=True, help="Blocks of each kind; 0: all of the family.")
@click.option("--tflop", default=0.25, show_default=True, help="Most work of one kernel where kernels are cut.")
@click.option("--steps", default=5, show_default=True, help="Measured steps of each kind, after one to warm up.")
def main(name: str, px: int, blocks: int, tflop: float, steps: int) -> None:
    """Print one row for each of the two ways: the median and the smallest seconds of a step. `name` is the model family,
    `px` the side of the image, and `blocks` the number of blocks. `tflop` is the limit of a kernel, and `steps` the number
    of steps.
    """
    from stages import kernels
    from stages.text_to_image.families import family
    from stages.text_to_image.train.memory import BatchShape
    from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
    from stages.tuner.memory import MemoryPlan
    from tests.bench.run import take_step

    record = family(name)
    if blocks:
        record = replace(record, transformer={**record.transformer, "num_layers": blocks, "num_single_layers": blocks})
    kernels.LIMIT = tflop * 1e12
    batch = random_batch(record, BatchShape(1, px, px, record.text_tokens, record.architecture.pixels_per_token))
    clock = time.perf_counter if kernels.compiles() else time.process_time
    cut, ways, seconds = [False], {}, {False: list[float](), True: list[float]()}
    kernels.limited = lambda: cut[0]
    for way in seconds:
        ways[way] = random_training(record, profile_settings())
        ways[way].memory = MemoryPlan("blocks")
    for number in range(steps + 1):
        for way in (False, True) if number % 2 else (True, False):
            cut[0], began = way, clock()
            take_step(ways[way], batch)
            seconds[way].append(clock() - began)
    for way, found in seconds.items():
        about = {
            "kind": "kernel_limit",
            "family": name,
            "px": px,
            "blocks": blocks,
            "tflop": tflop if way else None,
            "steps": steps,
        }
        click.echo(json.dumps(about | {"s": statistics.median(found[1:]), "least_s": min(found[1:])} | describe("mlx")))


if __name__ == "__main__":
    main()
