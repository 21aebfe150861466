"""The plain reference computes what the trainer computes."""

import mlx.core as mx
import pytest

from stages.text_to_image.families import family
from stages.text_to_image.train.memory import BatchShape
from stages.text_to_image.train.profile import profile_settings, random_batch, random_training
from stages.tuner.adapters.lora import B
from stages.tuner.optimizers.step import Stacks
from tests.bench import plain
from tests.bench.plain import random_plain_training

TINY = family("tiny")
SHAPE = BatchShape(1, 64, 48, TINY.text_tokens, TINY.architecture.pixels_per_token)


def test_the_plain_graph_has_the_gradient_of_the_trainer():
    config, micro = profile_settings(base_bits=16, rank=4), random_batch(TINY, SHAPE)
    ours, reference = random_training(TINY, config), random_plain_training(TINY, config)
    arrays = {name: mx.random.normal(a.shape) / 8 if name.endswith(B) else a for name, a in ours.adapter.items()}
    ours.masters, reference.masters = Stacks.of(arrays), Stacks.of(arrays)
    expected, found = ours.gradient([micro]), reference.gradient([micro])
    assert mx.allclose(found.losses, expected.losses, rtol=1e-6)
    assert set(found.grads) == set(expected.grads)
    for name, grad in expected.grads.items():
        assert mx.abs(found.grads[name] - grad).max() <= 1e-5 * mx.abs(grad).max() > 0, name


def test_the_plain_step_computes_its_gradient_with_the_plain_graph(monkeypatch):
    training, micro = random_plain_training(TINY, profile_settings(rank=4)), random_batch(TINY, SHAPE)
    monkeypatch.setattr("stages.tuner.step.loss_and_grads", None)
    assert training.step([micro], lr=1e-4).finite
    monkeypatch.setattr(plain, "plain_loss_and_grads", None)
    with pytest.raises(TypeError):
        training.step([micro], lr=1e-4)
