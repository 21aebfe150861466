"""What fewer tokens save in a training step: `python -m tests.bench.tokens [--family klein-base-4b] [--out FILE]`.

One sample, bfloat16, block by block, random weights of true shapes: at 1024 px plain and with token routing (data/research/
experiments/routing.py), and at smaller sizes. All cases share one model, and take turns of a few steps. Each gives a row: the
median and the least seconds of a step, the median of its CPU seconds, and MLX's peak in GB.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import stages  # noqa: F401  (a fast BLAS, before MLX)

ROUNDS, WARM = 4, 2


def main() -> None:
    """Measure, print a row for each case, and add it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="klein-base-4b")
    parser.add_argument("--px", type=int, default=1024)
    parser.add_argument("--smaller", type=int, nargs="*", default=[768, 512])
    parser.add_argument("--steps", type=int, default=4, help=f"measured steps of each of {ROUNDS} turns")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    import mlx.core as mx
    import numpy as np

    from data.research.experiments.routing import Route, Routed, RoutedBatch, RoutedFlowMatching
    from stages.text_to_image.families import family
    from stages.text_to_image.train.memory import BatchShape
    from stages.text_to_image.train.profile import profile_settings, random_batch, random_transformer
    from stages.tuner import draws
    from stages.tuner.blockwise.device import configure_scheduler
    from stages.tuner.memory import MemoryPlan
    from stages.tuner.step import TrainingStep, choose_targets, starting_adapter
    from tests.bench.environment import commit, describe
    from tests.bench.run import take_step

    configure_scheduler()  # before MLX's first operation
    record, config = family(asked.family).without_references(), profile_settings()
    architecture, model = record.architecture, random_transformer(record, config)
    targets, multiple = choose_targets(model.linears(), config), 128 if asked.px > 512 else 1
    routes = {"plain": None, "0.4 over 3..-4": Route(0.4, 3, -4, multiple), "0.5 over 2..-2": Route(0.5, 2, -2, multiple)}
    cases = [(asked.px, *each) for each in routes.items()] + [(px, "plain", None) for px in asked.smaller]
    made = []
    for px, name, route in cases:
        shape = BatchShape(1, px, px, record.text_tokens, architecture.pixels_per_token)
        chain, batch, image = Routed(model, route) if route else model, random_batch(record, shape), math.prod(shape.grid)
        if route:
            batch = RoutedBatch(**vars(batch), order_BL=np.array([draws.permutation(image, 0, "route")], np.int32))
        work = route.work(image, shape.text_rows, len(model.blocks)) if route else 1.0
        about = {"px": px, "routing": name, "tokens": shape.tokens, "work": work}
        made.append((about, chain, batch, list[float](), list[float](), list[float]()))
    for turn in range(ROUNDS + 1):  # the first warms up
        for _, chain, batch, seconds, cpu, peaks in made:
            objective, adapter = RoutedFlowMatching(architecture, config.loss), starting_adapter(model, targets, config)
            training = TrainingStep(chain, objective, targets, config, adapter, memory=MemoryPlan("blocks"))
            mx.clear_cache()
            mx.reset_peak_memory()
            for step in range(WARM + asked.steps):
                began, work_began = time.perf_counter(), time.process_time()
                take_step(training, batch)
                if turn and step >= WARM:
                    seconds.append(time.perf_counter() - began)
                    cpu.append(time.process_time() - work_began)
            peaks.append(mx.get_peak_memory() / 1e9)
            del training, adapter
    plain = statistics.median(made[0][3])
    for about, _, _, seconds, cpu, peaks in made:
        row = {"kind": "step", "family": asked.family} | about | {"s": statistics.median(seconds), "least_s": min(seconds)}
        row["cpu_s"] = statistics.median(cpu)
        row |= {"of_plain": row["s"] / plain, "peak_gb": max(peaks[1:]), "steps": len(seconds), "batch": 1, "bits": 16}
        row |= {"rank": config.rank, "plan": "blocks", "commit": commit()} | describe("mlx")
        line = json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        if asked.out:
            with asked.out.open("a") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
