"""How the size of the autoencoder's strips changes time and memory: `python -m tests.bench.strips`."""

from __future__ import annotations

import json

import click

import stages  # noqa: F401  (a fast BLAS, before MLX)
from tests.bench.run import time_steps


def measure(family: str, px: int, megabytes: int, in_flight: int, steps: int, decodes: bool) -> dict[str, float]:
    """Of one image in float32 in strips of so many megabytes."""
    import mlx.core as mx

    from stages.models import autoencoder
    from stages.text_to_image.families import family as record_of
    from tests.bench.encoders import Images, Latents

    autoencoder.STRIP_BYTES = autoencoder.GPU_STRIP_BYTES = megabytes << 20
    autoencoder.IN_FLIGHT = in_flight
    record = record_of(family)
    images = (Latents if decodes else Images)(record, (px, px), mx.float32)
    mx.clear_cache()
    mx.reset_peak_memory()
    times = time_steps(images.step, steps)
    estimated = record.architecture.autoencoder_memory(None, record, px, px, 4, not decodes).peak / 1e9
    row = {"strip_mb": megabytes, "in_flight": in_flight, "decodes": decodes, **times}
    return row | {"peak_gb": mx.get_peak_memory() / 1e9, "estimated_gb": estimated}


@click.command()
@click.option("--family", default="klein-base-4b", show_default=True)
@click.option("--px", default=1024, show_default=True)
@click.option("--steps", default=5, show_default=True)
@click.option("--case", "cases", multiple=True, help="megabytes,strips in flight,encode or decode; may be repeated.")
def main(family: str, px: int, steps: int, cases: tuple[str, ...]) -> None:
    for case in cases or ("32,2,encode", "64,2,encode", "128,2,encode"):
        megabytes, in_flight, kind = case.split(",")
        click.echo(json.dumps(measure(family, px, int(megabytes), int(in_flight), steps, kind == "decode")))


if __name__ == "__main__":
    main()
