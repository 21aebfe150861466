"""EfficientNet-Lite0 without its classifier: an image in, 1,280 features out.

Names of layers are the released PyTorch file's; data/research/judges/convert.py makes the file that `EfficientNet.load` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

SIDE = 224  # pixels: the size of the images that the network was trained on
FEATURES = 1280
MEAN, SPREAD = 127.0, 128.0  # normalise the input's colours, 0 to 255
# Block groups in order: input channels, output channels, expansion, kernel, stride of the first block, number of blocks.
GROUPS = (
    (32, 16, 1, 3, 1, 1),
    (16, 24, 6, 3, 2, 2),
    (24, 40, 6, 5, 2, 2),
    (40, 80, 6, 3, 2, 3),
    (80, 112, 6, 5, 1, 3),
    (112, 192, 6, 5, 2, 4),
    (192, 320, 6, 3, 1, 1),
)


def layers() -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> (batch norm's name, weight shape (out, height, width, in), stride), in order. `in` is 1 if depthwise."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {"_conv_stem": ("_bn0", (32, 3, 3, 3), 2)}
    number = 0
    for group_in, out, expansion, kernel, stride, count in GROUPS:
        for place in range(count):
            C, name = (out if place else group_in), f"_blocks.{number}."
            inner = C * expansion
            if expansion > 1:
                found[name + "_expand_conv"] = (name + "_bn0", (inner, 1, 1, C), 1)
            found[name + "_depthwise_conv"] = (name + "_bn1", (inner, kernel, kernel, 1), 1 if place else stride)
            found[name + "_project_conv"] = (name + "_bn2", (out, 1, 1, inner), 1)
            number += 1
    found["_conv_head"] = ("_bn1", (FEATURES, 1, 1, GROUPS[-1][1]), 1)
    return found


class EfficientNet:
    """`weights`: layer -> (weight (out, height, width, in), bias (out,)), float32, with the batch norm folded in."""

    def __init__(self, weights: Mapping[str, tuple[mx.array, mx.array]]) -> None:
        self.strides = {name: stride for name, (_, _, stride) in layers().items()}
        self.weights = dict(weights)
        mx.eval(self.weights)

    @classmethod
    def load(cls, file: Path) -> EfficientNet:
        """NAME.weight, NAME.bias and, for int8, NAME.scale per output channel. ValueError if damaged or of another network."""
        try:
            with safe_open(file, framework="numpy") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
        weights = {}
        for name, (_, shape, _) in layers().items():
            weight, bias = (tensors.get(f"{name}.{part}", np.zeros(0)) for part in ("weight", "bias"))
            scale = tensors.get(f"{name}.scale", np.ones(shape[:1], np.float32))
            if weight.shape != shape or bias.shape != shape[:1] or scale.shape != shape[:1]:
                raise ValueError(f"{file} is not EfficientNet-Lite0: {name} is missing or of another shape")
            weights[name] = (mx.array(dequantise(weight, scale)), mx.array(bias.astype(np.float32)))
        return cls(weights)

    def __call__(self, image_BHWC: mx.array) -> mx.array:
        """RGB (B, 224, 224, 3) from 0 to 255 -> float32 (B, 1280)."""
        x_BHWC = self._conv("_conv_stem", (image_BHWC - MEAN) / SPREAD)
        number = 0
        for *_, count in GROUPS:
            for place in range(count):
                y_BHWC = self._block(f"_blocks.{number}.", x_BHWC)
                x_BHWC = x_BHWC + y_BHWC if place else y_BHWC
                number += 1
        return self._conv("_conv_head", x_BHWC).mean(axis=(1, 2))

    def _block(self, name: str, x_BHWC: mx.array) -> mx.array:
        if name + "_expand_conv" in self.weights:
            x_BHWC = self._conv(name + "_expand_conv", x_BHWC)
        return self._conv(name + "_project_conv", self._conv(name + "_depthwise_conv", x_BHWC), act=False)

    def _conv(self, name: str, x_BHWC: mx.array, act: bool = True) -> mx.array:
        weight, bias = self.weights[name]
        kernel, stride = weight.shape[1], self.strides[name]
        edges = [(0, 0), *(same_padding(size, kernel, stride) for size in x_BHWC.shape[1:3]), (0, 0)]
        if kernel == 1:
            x_BHWC = x_BHWC @ weight[:, 0, 0].T
        elif weight.shape[-1] == 1:
            x_BHWC = depthwise(mx.pad(x_BHWC, edges), weight, stride)
        else:
            x_BHWC = mx.conv2d(mx.pad(x_BHWC, edges), weight, stride)
        return mx.clip(x_BHWC + bias, 0, 6) if act else x_BHWC + bias


def depthwise(x_BHWC: mx.array, weight: mx.array, stride: int) -> mx.array:
    """Each channel with its own kernel, (C, k, k, 1), without padding."""
    kernel = weight.shape[1]
    H, W = ((size - kernel) // stride * stride + 1 for size in x_BHWC.shape[1:3])
    # A sum of shifted products is four times as fast as MLX's own grouped convolution on a CPU.
    y_BHWC = mx.zeros(1)
    for i, j in np.ndindex(kernel, kernel):
        y_BHWC = y_BHWC + x_BHWC[:, i : i + H : stride, j : j + W : stride] * weight[:, i, j, 0]
    return y_BHWC


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """(zeros before, zeros after) of TensorFlow's SAME padding along one axis. An odd zero goes after."""
    total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
    return total // 2, total - total // 2


def dequantise(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    product: np.ndarray = weight.astype(np.float32) * scale.astype(np.float32)[:, None, None, None]
    return product
