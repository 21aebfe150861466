"""An estimate of the autoencoder's memory from shapes alone. It follows the strips of rows in which images are computed.

Each large step yields (held, temporary): array values in memory during the whole step, and at most beside them.
H and W are rows and columns of an activation, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx

from stages import kernels
from stages.memory import COLUMNS, EXACT, EXTRA, INPUTS, OUTPUTS, POOL_INEXACT, WINOGRAD, Memory
from stages.models.autoencoder import AutoencoderConfig, query_rows, strip_rows


def autoencoder_memory(
    config: AutoencoderConfig, height: int, width: int, itemsize: int, encodes: bool, exact: bool | None = None
) -> Memory:
    """See `Architecture.autoencoder_memory`."""
    weights = sum(itemsize * math.prod(shape) for shape in config.shapes().values())
    exactly = kernels.exact() if exact is None else exact
    half = (encoding if encodes else decoding)(config, height, width, exactly)
    image = 4 * height * width * 3  # float32 pixels, as input or output
    work = int(max(held + work for held, work in half) * itemsize) + image
    return Memory(weights, work, weights + work, pool=POOL_INEXACT if encodes and not exactly else None)


def encoding(config: AutoencoderConfig, height: int, width: int, exact: bool) -> Iterator[tuple[float, float]]:
    channels, inputs = config.block_out_channels, config.block_out_channels[0]
    yield 0, conv_work(height, width, config.in_channels, inputs, exact)
    for level, outputs in enumerate(channels):
        H, W = height >> level, width >> level
        for _ in range(config.layers_per_block):
            yield from resnet(H, W, inputs, outputs, exact)
            inputs = outputs
        if level < len(channels) - 1:
            # The input, and the output of a quarter of its positions.
            yield H * W * outputs * 1.25, conv_work(H, W, outputs, outputs, exact)
    yield from middle(config, height >> (len(channels) - 1), width >> (len(channels) - 1), inputs, exact)


def decoding(config: AutoencoderConfig, height: int, width: int, exact: bool) -> Iterator[tuple[float, float]]:
    channels = config.decoder_channels[::-1]
    inputs, last = channels[0], len(channels) - 1
    yield from middle(config, height >> last, width >> last, inputs, exact)
    for level, outputs in enumerate(channels):
        H, W = height >> (last - level), width >> (last - level)
        for _ in range(config.layers_per_block + 1):
            yield from resnet(H, W, inputs, outputs, exact)
            inputs = outputs
        if level < last:
            # The input, and the output of four times its positions.
            yield 5 * H * W * outputs, conv_work(2 * H, 2 * W, outputs, outputs, exact)


def resnet(H: int, W: int, inputs: int, outputs: int, exact: bool) -> Iterator[tuple[float, float]]:
    yield H * W * (inputs + outputs), conv_work(H, W, inputs, outputs, exact)
    yield H * W * 2 * outputs, conv_work(H, W, outputs, outputs, exact)


def middle(config: AutoencoderConfig, H: int, W: int, channels: int, exact: bool) -> Iterator[tuple[float, float]]:
    yield from resnet(H, W, channels, channels, exact)
    if config.mid_block_add_attention:
        # x, its normalised form, q, k, v, the parts of the result, and these joined.
        yield 7 * H * W * channels, 2 * query_rows(H * W, channels) * H * W


def conv_work(H: int, W: int, inputs: int, outputs: int, exact: bool) -> float:
    """Array values beside input and output while one strip of a convolution is computed."""
    strip = min(strip_rows(H, W, inputs, outputs, exact=exact), H) * W
    if mx.default_device() == mx.cpu:
        return strip * (COLUMNS * inputs + EXTRA * max(inputs, outputs))
    inexactly, exactly = (WINOGRAD, 0.0) if mx.metal.is_available() else (0.0, EXACT)
    scratch = exactly if exact else inexactly
    copies = INPUTS if strip < H * W else 1
    return strip * ((copies + scratch) * inputs + (OUTPUTS + scratch) * outputs)
