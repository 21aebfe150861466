"""What [train] stream_blocks costs on a CPU: `python -m tests.bench.streaming`.

Two training steps of `micro` with random weights, one with the blocks in memory and one with them on disk, are taken in
turns. CPU seconds are compared, because other work on the machine hardly counts in them.
"""

from __future__ import annotations

import json
import statistics
import time

import click

import stages  # noqa: F401  (a fast BLAS, before MLX)
from tests.bench.environment import describe


@click.command()
@click.option("--family", "name", default="micro", show_default=True)
@click.option("--px", default=192, show_default=True)
@click.option("--bits", default=16, show_default=True)
@click.option("--steps", default=20, show_default=True, help="Measured steps of each kind, after two to warm up.")
def main(name: str, px: int, bits: int, steps: int) -> None:
    """Print a row for each way: median and least CPU seconds of a step."""
    from stages.text_to_image.families import family
    from stages.text_to_image.train.memory import BatchShape
    from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
    from stages.tuner.memory import MemoryPlan
    from tests.bench.run import take_step

    record = family(name)
    batch = random_batch(record, BatchShape(1, px, px, record.text_tokens, record.architecture.pixels_per_token))
    ways, seconds = {}, {False: list[float](), True: list[float]()}
    for streamed in seconds:
        ways[streamed] = random_training(record, profile_settings(base_bits=bits, stream_blocks=streamed))
        ways[streamed].memory = MemoryPlan("blocks")
    for number in range(steps + 2):
        for streamed in (False, True) if number % 2 else (True, False):
            began = time.process_time()
            take_step(ways[streamed], batch)
            seconds[streamed].append(time.process_time() - began)
    for streamed, found in seconds.items():
        about = {"kind": "streaming", "family": name, "px": px, "bits": bits, "stream": streamed, "steps": steps}
        row = about | {"cpu_s": statistics.median(found[2:]), "least_cpu_s": min(found[2:])}
        click.echo(json.dumps(row | describe("mlx")))


if __name__ == "__main__":
    main()
