"""EfficientNet-Lite0 against PyTorch's own convolutions, on the stored weights."""

import mlx.core as mx
import numpy as np

from stages.models.efficientnet import FEATURES, GROUPS, MEAN, SIDE, SPREAD, EfficientNet
from stages.text_to_image.scores import IMAGE_WEIGHTS


def features_by_torch(weights, x):
    """The network as its paper describes it, in PyTorch, from the weights of an EfficientNet."""
    import torch
    from torch.nn import functional

    def conv(x, name, stride=1, act=True):
        weight, bias = (torch.from_numpy(np.array(array)) for array in weights[name])
        weight = weight.permute(0, 3, 1, 2)
        sides = []
        for size in (x.shape[3], x.shape[2]):  # as TensorFlow's SAME pads
            total = max(0, (-(-size // stride) - 1) * stride + weight.shape[2] - size)
            sides += [total // 2, total - total // 2]
        groups = x.shape[1] if weight.shape[1] == 1 else 1
        y = functional.conv2d(functional.pad(x, sides), weight, bias, stride=stride, groups=groups)
        return functional.relu6(y) if act else y

    x = conv(torch.from_numpy(x).permute(0, 3, 1, 2), "_conv_stem", 2)
    number = 0
    for _, _, expansion, _, first, count in GROUPS:
        for place in range(count):
            name, y = f"_blocks.{number}.", x
            if expansion > 1:
                y = conv(y, name + "_expand_conv")
            y = conv(y, name + "_depthwise_conv", first if place == 0 else 1)
            y = conv(y, name + "_project_conv", act=False)
            x, number = (x + y if place else y), number + 1
    return conv(x, "_conv_head").mean((2, 3)).numpy()


def test_the_features_are_those_of_pytorch_on_the_stored_weights():
    pixels = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3)).astype(np.float32)
    network = EfficientNet.load(IMAGE_WEIGHTS)
    found = np.array(network(mx.array(pixels)))
    expected = features_by_torch(network.weights, (pixels - MEAN) / SPREAD)
    assert found.shape == (1, FEATURES)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
