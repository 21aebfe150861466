"""EfficientNet-Lite0 against PyTorch's own convolutions and batch norms, on the released weights and a real picture."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch.nn import functional

from stages.models.vision import efficientnet
from stages.models.vision.efficientnet import MEAN, SIDE, SPREAD, STAGES, EfficientNet
from stages.text_to_image.scores.features import PICTURES


def padded(x, kernel, stride):
    """SAME, as TensorFlow pads."""
    sides = []
    for size in (x.shape[3], x.shape[2]):
        total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        sides += [total // 2, total - total // 2]
    return functional.pad(x, sides)


class Reference:
    """The network as its paper has it, in PyTorch."""

    def __init__(self, weights):
        self.weights = weights

    def conv(self, x, name, norm, stride=1, act=True):
        weight = self.weights[name + ".weight"]
        groups = x.shape[1] if weight.shape[1] == 1 else 1
        y = functional.conv2d(padded(x, weight.shape[2], stride), weight, stride=stride, groups=groups)
        of = [self.weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        y = functional.batch_norm(y, *of, training=False, eps=1e-3)
        return functional.relu6(y) if act else y

    def features(self, x):
        x = self.conv(x, "_conv_stem", "_bn0", 2)
        number = 0
        for _, _, expansion, _, first, count in STAGES:
            for place in range(count):
                name, y = f"_blocks.{number}.", x
                if expansion > 1:
                    y = self.conv(y, name + "_expand_conv", name + "_bn0")
                y = self.conv(y, name + "_depthwise_conv", name + "_bn1", first if place == 0 else 1)
                y = self.conv(y, name + "_project_conv", name + "_bn2", act=False)
                x, number = (x + y if place else y), number + 1
        return self.conv(x, "_conv_head", "_bn1").mean((2, 3))


@pytest.fixture(scope="module")
def weights():
    return torch.load(PICTURES.path(), weights_only=True)


def test_the_features_are_those_of_pytorch_on_the_released_weights(weights):
    pixels = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3)).astype(np.float32)
    found = np.array(EfficientNet.load(PICTURES.path())(mx.array(pixels)))
    expected = Reference(weights).features(torch.from_numpy((pixels - MEAN) / SPREAD).permute(0, 3, 1, 2)).numpy()
    assert found.shape == (1, efficientnet.FEATURES)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [7, 8])
def test_a_depthwise_convolution_is_that_of_pytorch(kernel, stride, size):
    draw = np.random.default_rng(kernel)
    x, weight = draw.normal(size=(1, size, size + 1, 4)).astype(np.float32), draw.normal(size=(4, kernel, kernel, 1))
    edges = [(0, 0), *(efficientnet.border(s, kernel, stride) for s in (size, size + 1)), (0, 0)]
    weight = weight.astype(np.float32)
    found = np.array(efficientnet.depthwise(mx.pad(mx.array(x), edges), mx.array(weight), stride))
    torch_x, torch_weight = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(weight).permute(0, 3, 1, 2)
    expected = functional.conv2d(padded(torch_x, kernel, stride), torch_weight, stride=stride, groups=4)
    assert np.allclose(found, expected.permute(0, 2, 3, 1).numpy(), atol=1e-5)


def test_another_networks_file_is_refused(tmp_path, weights):
    del weights["_conv_head.weight"]
    torch.save(weights, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="_conv_head"):
        EfficientNet.load(tmp_path / "a.pth")
