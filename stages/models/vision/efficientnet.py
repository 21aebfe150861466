"""EfficientNet-Lite0 as a feature extractor: a picture in, 1,280 numbers out that say what it shows and in which look.

The classifier is left out: the features are what its last Linear reads. Batch normalisation is folded into the convolutions
when the weights are read. Names of tensors are those of the released PyTorch file.

B batch, H and W pixels, C channels, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.vision import torchfile

SIDE = 224  # pixels: what it was trained on
FEATURES = 1280
MEAN, SPREAD = 127.0, 128.0  # of its input's colours, of 0 to 255
EPS = 1e-3  # of its batch norms
# Blocks in order: inputs, outputs, expansion, kernel, stride of the first, how many.
STAGES = (
    (32, 16, 1, 3, 1, 1),
    (16, 24, 6, 3, 2, 2),
    (24, 40, 6, 5, 2, 2),
    (40, 80, 6, 3, 2, 3),
    (80, 112, 6, 5, 1, 3),
    (112, 192, 6, 5, 2, 4),
    (192, 320, 6, 3, 1, 1),
)
CLASSIFIER = ("_fc.weight", "_fc.bias")


def layers() -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Each convolution in order: name -> (its batch norm's name, the shape of its weight, its stride)."""
    made: dict[str, tuple[str, tuple[int, ...], int]] = {"_conv_stem": ("_bn0", (32, 3, 3, 3), 2)}
    number = 0
    for into, out, expansion, kernel, stride, count in STAGES:
        for place in range(count):
            C, inner, name = (into if place == 0 else out), (into if place == 0 else out) * expansion, f"_blocks.{number}."
            if expansion > 1:
                made[name + "_expand_conv"] = (name + "_bn0", (inner, C, 1, 1), 1)
            made[name + "_depthwise_conv"] = (name + "_bn1", (inner, 1, kernel, kernel), stride if place == 0 else 1)
            made[name + "_project_conv"] = (name + "_bn2", (out, inner, 1, 1), 1)
            number += 1
    made["_conv_head"] = ("_bn1", (FEATURES, STAGES[-1][1], 1, 1), 1)
    return made


class EfficientNet:
    """The network. `weights` are those of the released file, by their names there."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.layers = layers()
        self.weights = {name: folded(weights, name, bn) for name, (bn, _, _) in self.layers.items()}
        mx.eval(self.weights)

    @classmethod
    def load(cls, path: Path) -> EfficientNet:
        """From the released file. ValueError if it is another network's."""
        found = torchfile.read(path)
        expected = {f"{name}.weight": shape for name, (_, shape, _) in layers().items()}
        wrong = [name for name, shape in expected.items() if name not in found or found[name].shape != shape]
        if wrong:
            raise ValueError(f"{path} is not EfficientNet-Lite0: {wrong[0]} is missing or of another shape")
        return cls(found)

    def __call__(self, image_BHWC: mx.array) -> mx.array:
        """Features (B,D) of RGB pictures of SIDE pixels, 0 to 255."""
        x_BHWC = self._conv("_conv_stem", (image_BHWC - MEAN) / SPREAD)
        number = 0
        for *_, count in STAGES:
            for place in range(count):
                y_BHWC = self._block(f"_blocks.{number}.", x_BHWC)
                x_BHWC = x_BHWC + y_BHWC if place else y_BHWC
                number += 1
        return self._conv("_conv_head", x_BHWC).mean(axis=(1, 2))

    def _block(self, name: str, x_BHWC: mx.array) -> mx.array:
        if name + "_expand_conv" in self.layers:
            x_BHWC = self._conv(name + "_expand_conv", x_BHWC)
        return self._conv(name + "_project_conv", self._conv(name + "_depthwise_conv", x_BHWC), act=False)

    def _conv(self, name: str, x_BHWC: mx.array, act: bool = True) -> mx.array:
        weight, bias = self.weights[name]
        kernel, stride = weight.shape[1], self.layers[name][2]
        edges = [(0, 0), *(border(size, kernel, stride) for size in x_BHWC.shape[1:3]), (0, 0)]
        if kernel == 1:
            x_BHWC = x_BHWC @ weight[:, 0, 0].T
        elif weight.shape[-1] == 1:
            x_BHWC = depthwise(mx.pad(x_BHWC, edges), weight, stride)
        else:
            x_BHWC = mx.conv2d(mx.pad(x_BHWC, edges), weight, stride)
        return mx.clip(x_BHWC + bias, 0, 6) if act else x_BHWC + bias


def depthwise(x_BHWC: mx.array, weight: mx.array, stride: int) -> mx.array:
    """Each channel convolved by itself, as a sum of shifted products: four times as fast as MLX's own on a CPU."""
    kernel = weight.shape[1]
    H, W = ((size - kernel) // stride * stride + 1 for size in x_BHWC.shape[1:3])
    y_BHWC = mx.zeros(1)
    for i, j in np.ndindex(kernel, kernel):
        y_BHWC = y_BHWC + x_BHWC[:, i : i + H : stride, j : j + W : stride] * weight[:, i, j, 0]
    return y_BHWC


def border(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after `size` pixels, as TensorFlow's SAME has them: the odd one comes after."""
    total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
    return total // 2, total - total // 2


def folded(weights: Mapping[str, np.ndarray], name: str, norm: str) -> tuple[mx.array, mx.array]:
    """A convolution's weight (out, height, width, in) and bias with its batch norm in them."""
    scale = weights[f"{norm}.weight"] / np.sqrt(weights[f"{norm}.running_var"] + EPS)
    bias = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    weight = weights[f"{name}.weight"] * scale[:, None, None, None]
    return mx.array(weight.transpose(0, 2, 3, 1)), mx.array(bias)
