import functools
import math

import mlx.core as mx

from stages.text_to_image.families import family
from stages.text_to_image.train import memory_plan
from stages.text_to_image.train.profile import profile_settings as settings
from stages.tuner.adapters.lora import B
from stages.tuner.blockwise.backprop import loss_and_grads
from tests.bench.steps import Rig, plain


def test_the_plain_graph_has_the_gradients_of_our_plans():
    c = settings(base_bits=16, rank=4)
    rig = Rig(family("tiny"), c, memory_plan.BatchShape(1, 64, 48, 64, 16))
    filled = {n: mx.random.normal(a.shape) / 8 if n.endswith(B) else a for n, a in rig.masters.unstack().items()}
    inputs = rig.inputs(mx.random.normal((1, math.prod(rig.batch.grid), rig.config.in_channels)))
    asked = functools.partial(lambda prediction, target: mx.square(prediction - target).mean((1, 2)), target=inputs["x_BLC"])
    losses_B, grads = plain(rig.model, filled, rig.scales, inputs, asked)
    true_B, true = loss_and_grads(rig.model, filled, rig.scales, inputs, asked, "whole")
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert set(grads) == set(true)
    for name, grad in true.items():
        assert mx.abs(grads[name] - grad).max() <= 1e-5 * mx.abs(grad).max() > 0, name


def test_the_plain_plan_of_a_rig_takes_the_plain_graph(monkeypatch):
    monkeypatch.setattr("tests.bench.steps.loss_and_grads", None)
    assert math.isfinite(Rig(family("tiny"), settings(rank=4), memory_plan.BatchShape(1, 64, 48, 64, 16)).step("plain"))
