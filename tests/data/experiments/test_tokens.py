"""The experiment about fewer tokens a step: routing computes what its paper says."""

import functools
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from data.research.experiments import tokens
from data.research.experiments.routing import Route, Routed, RoutedFlowMatching
from stages.models.transformer import joined
from stages.text_to_image.families import family
from stages.text_to_image.train.memory import BatchShape
from stages.text_to_image.train.profile import profile_settings, random_batch, random_transformer
from stages.tuner import diffusion
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import target_scales
from stages.tuner.blockwise.backprop import loss_and_grads, predict
from stages.tuner.step import choose_targets, starting_adapter
from tests.stages.text_to_image.train.test_task import Project


def test_tokens_that_skip_a_range_keep_their_values_and_gradients_by_blocks_are_those_of_the_whole():
    record, config = family("tiny"), profile_settings(precision="float32", rank=2)
    model, samples = random_transformer(record, config), 2
    last = len(model.blocks) - 2
    routed, height, width = Routed(model, Route(0.5, 0, -2)), 4, 6
    objective = RoutedFlowMatching(record.architecture, config.loss)
    per = record.architecture.pixels_per_token
    batch = random_batch(record, BatchShape(samples, width * per, height * per, record.text_tokens, per))
    x_BLC, target_BLC = objective.mix(batch)
    plain, loss = objective.inputs(batch, x_BLC, batch.ctx_BTJ), functools.partial(diffusion.mse, target_BLC=target_BLC)
    order_BL = np.stack([np.random.default_rng(n).permutation(height * width) for n in range(samples)]).astype(np.int32)
    targets = choose_targets(model.linears(), config)
    given = starting_adapter(model, targets, config)
    adapter, scales = (
        {name: 0.1 * mx.random.normal(a.shape, key=mx.random.key(n)) for n, (name, a) in enumerate(given.items())},
        target_scales(targets),
    )
    names = [block.name for block in model.blocks]
    scales_of = lora.split_by_block(names, scales)[0]

    def expected(adapter):
        found = []
        for n in range(samples):
            one = {name: value[n : n + 1] if isinstance(value, mx.array) else value for name, value in plain.items()}
            (text, image), shared = model.enter(**one)
            T, stay = text.shape[1], mx.array(np.sort(order_BL[n, : height * width // 2]))
            inside = shared | {"image": [each[:, stay] for each in shared["image"]]}
            inside["single"] = [each[:, : T + stay.size] for each in shared["single"]]
            inside["rope"] = [mx.concatenate([turn[:T], turn[T:][stay]]) for turn in shared["rope"]]
            h = text, image[:, stay]
            for number, (block, own, scale) in enumerate(
                zip(model.blocks, lora.split_by_block(names, adapter)[0], scales_of, strict=True)
            ):
                among = inside if number <= last else shared
                h = model.block(block.kind)(block.weights, h, among, lora.AdaptedLinear(own, scale))
                if number == last:
                    place = mx.array(np.eye(height * width, dtype=np.float32)[:, np.array(stay)])
                    skipped = image * (1 - place.sum(1))[:, None]
                    h = mx.concatenate([joined(h)[:, :T], place @ joined(h)[:, T:] + skipped], axis=1)
            found.append(model.leave(h, shared))
        return mx.concatenate(found)

    inputs = plain | {"order_BL": mx.array(order_BL)}
    np.testing.assert_allclose(predict(routed, adapter, scales, inputs), expected(adapter), rtol=1e-4, atol=1e-5)
    wanted = mx.grad(lambda adapter: loss(expected(adapter)).mean())(adapter)
    for plan in ("blocks", "whole"):
        grads = loss_and_grads(routed, adapter, scales, inputs, loss, plan)[1]
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, wanted[name], rtol=1e-3, atol=1e-3 * mx.abs(wanted[name]).max().item())
    assert mx.array_equal(predict(routed, adapter, scales, plain), predict(model, adapter, scales, plain))


@pytest.mark.parametrize("name", tokens.RUNS)
def test_runs_at_equal_work_compute_as_many_tokens_as_the_plain_one_and_have_valid_settings(name):
    plan, steps = tokens.RUNS[name][0], tokens.steps_of(name, 300)
    assert not tokens.RUNS[name][1] or plan.work * steps == pytest.approx(300, rel=0.003)
    data, turns = tokens.project(plan.settings(steps)).config.sections["train"].data, plan.turns(steps)
    assert max(turns.items())[1] == tokens.FULL and {str(px) for px in turns.values()} == {
        px for px, share in data.resolutions.items() if share
    }


def test_sizes_in_turn_have_each_size_in_its_part_and_every_picture_equally_often():
    made = tokens.SizesInTurn(Project(), {1: 512, 301: 768})
    samples = [(step, sample.crop) for step in range(1, 401) for batch in made.draw(step) for sample in batch]
    assert {(step > 300, crop.resolution) for step, crop in samples} == {(False, 512), (True, 768)}
    counts = Counter(crop.image_id for _, crop in samples)
    assert max(counts.values()) - min(counts.values()) <= 6
