import functools
import gc

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.family import Block
from stages.models.flux2.transformer import Flux2, Flux2Config, image_ids, text_ids
from stages.tuner import quantize
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter
from stages.tuner.adapters.targets import select_targets, target_scales
from stages.tuner.blockwise import backprop
from stages.tuner.blockwise.backprop import kept_blocks, loss_and_grads
from stages.tuner.blockwise.device import live_memory_limit

CONFIG = Flux2Config(
    in_channels=8,
    num_layers=2,
    num_single_layers=3,
    attention_head_dim=32,
    num_attention_heads=2,
    joint_attention_dim=24,
    timestep_guidance_channels=16,
    mlp_ratio=3.0,
    axes_dims_rope=(8, 8, 8, 8),
    rope_theta=2000,
    eps=1e-6,
    guidance_embeds=False,
)
PLANS = ["whole", "blocks", 2, 4]


def tiny(dtype: mx.Dtype = mx.float32) -> Flux2:
    rng = np.random.default_rng(1)
    draw = {name: rng.normal(size=shape) / shape[-1] ** 0.5 for name, shape in CONFIG.shapes().items()}
    return Flux2(CONFIG, {name: mx.array(value, dtype) for name, value in draw.items()})


def trained(model: Flux2, patterns: tuple[str, ...] = ("*",)) -> tuple[dict[str, mx.array], dict[str, float]]:
    targets = select_targets(model.linears(), patterns, rank=4, alpha=6.0)
    adapters = fresh_adapter(targets, seed=3)
    rng = np.random.default_rng(2)
    filled = {n: mx.array(rng.normal(size=a.shape) / 8, mx.float32) if n.endswith("B.weight") else a for n, a in adapters.items()}
    return filled, target_scales(targets)


def batch(size: int = 2) -> dict:
    rng = np.random.default_rng(7)
    return {
        "x_BLC": mx.array(rng.normal(size=(size, 12, 8)), mx.float32),
        "x_ids_L4": image_ids(3, 4),
        "ctx_BTJ": mx.array(rng.normal(size=(size, 5, 24)), mx.float32),
        "ctx_ids_T4": text_ids(5),
        "timesteps_B": mx.array(rng.uniform(size=size), mx.float32),
    }


def squared(prediction: mx.array, target: mx.array) -> mx.array:
    return mx.square(prediction.astype(mx.float32) - target).mean(axis=(1, 2))


def loss_of(size: int = 2, seed: int = 9):
    return functools.partial(squared, target=mx.random.normal((size, 12, 8), key=mx.random.key(seed)))


def whole_graph_gradients(model, adapters, scales, inputs, loss):
    """Losses and gradients of the whole model as one plain graph."""

    def run(adapters):
        def linear_for(block):
            inside = {n.removeprefix(f"{block}."): a for n, a in adapters.items() if n.startswith(f"{block}.")}
            return lora.adapted_linear(inside, {n.removeprefix(f"{block}."): s for n, s in scales.items()})

        losses_B = loss(model(**inputs, linear_for=linear_for))
        return losses_B.mean(), losses_B

    (_, losses_B), grads = mx.value_and_grad(run)(adapters)
    return losses_B, grads


def assert_same(found, wanted, bound=1e-6):
    """Assert that each array differs by at most `bound` times its largest gradient."""
    assert set(found) == set(wanted)
    for name, grad in wanted.items():
        size = mx.abs(grad).max().item()
        assert size > 0, f"{name} takes no gradient"
        assert mx.abs(found[name] - grad).max().item() <= bound * size, name


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_gradients_of_the_whole_graph(plan):
    model = tiny()
    adapters, scales = trained(model)
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
    true_B, true = whole_graph_gradients(model, adapters, scales, batch(), loss_of())
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert_same(grads, true)
    assert {g.dtype for g in grads.values()} == {mx.float32}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("patterns", [("single_transformer_blocks.1.attn.to_out",), ("transformer_blocks.1.ff.*", "attn.to_q")])
def test_blocks_without_adapters_pass_the_gradient_on(patterns, plan):
    model = tiny()
    adapters, scales = trained(model, patterns)
    _, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
    assert_same(grads, whole_graph_gradients(model, adapters, scales, batch(), loss_of())[1])


@pytest.mark.parametrize("plan", PLANS)
def test_a_plain_closure_as_loss_gives_the_same_gradients(plan):
    model = tiny()
    adapters, scales = trained(model)
    given = loss_of()
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(), lambda prediction: given(prediction), plan)
    true_B, true = loss_and_grads(model, adapters, scales, batch(), given, plan)
    assert mx.array_equal(losses_B, true_B)
    assert_same(grads, true, 0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_packed_weights_give_the_gradients_of_their_unpacked_weights(plan, bits):
    model, dense = tiny(), tiny()
    for block, other in zip(model.blocks, dense.blocks, strict=True):
        block.weights.update({name: quantize.pack_if_possible(weight, bits) for name, weight in block.weights.items()})
        other.weights.update({name: quantize.dense(weight) for name, weight in block.weights.items()})
    adapters, scales = trained(model)
    _, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
    assert_same(grads, whole_graph_gradients(dense, adapters, scales, batch(), loss_of())[1])


@pytest.mark.parametrize("plan", ["whole", "blocks"])
def test_gradients_of_two_micro_batches_add_up_to_those_of_the_batch(plan):
    model = tiny()
    adapters, scales = trained(model)
    both, target = batch(), loss_of().keywords["target"]
    _, whole = loss_and_grads(model, adapters, scales, both, loss_of(), plan)
    summed: dict[str, mx.array] = {}
    for i in range(2):
        one = {name: value[i : i + 1] if name.split("_")[1].startswith("B") else value for name, value in both.items()}
        _, grads = loss_and_grads(model, adapters, scales, one, functools.partial(squared, target=target[i : i + 1]), plan)
        summed = {name: summed.get(name, 0) + grad / 2 for name, grad in grads.items()}
    assert_same(summed, whole, bound=1e-5)  # products of other shapes round differently


@pytest.mark.parametrize("plan", ["whole", "blocks"])
def test_float32_adapters_keep_bfloat16_activations_in_bfloat16(plan):
    model = tiny(mx.bfloat16)
    adapters, scales = trained(model)
    seen: list[mx.Dtype] = []

    class Watched:
        blocks, enter, leave = model.blocks, staticmethod(model.enter), staticmethod(model.leave)

        @staticmethod
        def block(kind):
            def run(weights, h, shared, linear):
                def watched(name, weight, x):
                    y = linear(name, weight, x)
                    seen.extend([x.dtype, y.dtype])
                    return y

                h = model.block(kind)(weights, h, shared, watched)
                seen.append(h.dtype)
                return h

            return run

    losses_B, grads = loss_and_grads(Watched(), adapters, scales, batch(), loss_of(), plan)
    assert set(seen) == {mx.bfloat16}
    assert losses_B.dtype == mx.float32
    assert {g.dtype for g in grads.values()} == {mx.float32}


class Toy:
    """Three blocks of one Linear, so that a C++ compiler has little to do."""

    def __init__(self) -> None:
        weights = mx.random.normal((3, 8, 8), key=mx.random.key(5)) / 3
        self.blocks = [Block("toy", f"toys.{i}", {"fc.weight": weights[i]}) for i in range(3)]

    def enter(self, x_BK):
        return x_BK, {"shift": x_BK.mean()}

    @staticmethod
    def block(kind):
        return lambda weights, h, shared, linear: h + linear("fc", weights["fc.weight"], h + shared["shift"])

    def leave(self, h, shared):
        return h


@pytest.mark.parametrize("plan", ["whole", "blocks"])
def test_a_compiled_block_takes_every_array_of_a_step_as_an_argument(plan, monkeypatch):
    """A captured array would be frozen into the graph: the second step would compute with the first step's."""
    steps = []
    for compiled in (False, True):
        monkeypatch.setattr(backprop, "compiles", lambda compiled=compiled: compiled)
        model = Toy()
        for step in range(2):
            made = [mx.random.normal((3, 2, 8), key=mx.random.key(i)) + step for i in range(2)]
            adapters = {f"toys.{i}.fc.lora_A.weight": made[0][i] for i in range(3)}
            adapters |= {f"toys.{i}.fc.lora_B.weight": made[1][i].T for i in range(3)}
            inputs = {"x_BK": mx.random.normal((2, 8), key=mx.random.key(step))}
            loss = functools.partial(lambda y, target: mx.square(y - target).mean(-1), target=inputs["x_BK"] * 2 + step)
            steps.append(loss_and_grads(model, adapters, {f"toys.{i}.fc": 0.5 for i in range(3)}, inputs, loss, plan))
    for (plain_B, plain), (losses_B, grads) in zip(steps[:2], steps[2:], strict=True):
        assert mx.allclose(losses_B, plain_B, rtol=1e-5)
        assert_same(grads, plain)


def test_a_live_memory_limit_changes_no_gradient():
    model = tiny()
    adapters, scales = trained(model)
    _, free = loss_and_grads(model, adapters, scales, batch(), loss_of(), "blocks")
    with live_memory_limit(1):
        _, limited = loss_and_grads(model, adapters, scales, batch(), loss_of(), "blocks")
    assert_same(limited, free, 0)


class Stream:
    """Twenty blocks of one Linear each whose input is larger than everything else, so that memory can be counted in inputs."""

    def __init__(self) -> None:
        self.x_BK = mx.random.normal((1000, 64), key=mx.random.key(1))
        weights = mx.random.normal((20, 64, 64), key=mx.random.key(2)) / 8
        self.blocks = [Block("stream", f"streams.{i}", {"fc.weight": weights[i]}) for i in range(20)]
        drawn = mx.random.normal((20, 2, 64), key=mx.random.key(3)) / 8
        self.adapters = {f"streams.{i}.fc.lora_A.weight": drawn[i] for i in range(20)}
        self.adapters |= {f"streams.{i}.fc.lora_B.weight": drawn[i].T for i in range(20)}
        mx.eval(self.x_BK, self.adapters, [block.weights for block in self.blocks])

    def enter(self):
        return self.x_BK, {}

    @staticmethod
    def block(kind):
        return lambda weights, h, shared, linear: h + mx.tanh(linear("fc", weights["fc.weight"], mx.tanh(h)))

    def leave(self, h, shared):
        return h

    def peak(self, above: float | None) -> float:
        """The peak memory of a gradient by blocks, counted in block inputs, with a live memory limit of `above` inputs."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with live_memory_limit(None if above is None else before + round(above * self.x_BK.nbytes)):
            scales = dict.fromkeys((f"{block.name}.fc" for block in self.blocks), 0.1)
            mx.eval(loss_and_grads(self, self.adapters, scales, {}, lambda h: mx.square(h).mean(-1), "blocks"))
        return (mx.get_peak_memory() - before) / self.x_BK.nbytes


def test_a_live_memory_limit_holds_the_peak_of_a_deep_chain_near_the_least_possible():
    """Twenty block inputs and one block's work are needed, 24 inputs in all; without a limit it is 32."""
    chain = Stream()
    free, least = chain.peak(None), chain.peak(0)
    assert least < 25
    assert free > least + 5, "without a limit, MLX submits work far ahead"
    assert chain.peak(26) < 27.5


def test_a_dropped_model_is_freed_with_its_compiled_functions():
    gc.collect()
    before = mx.get_active_memory()
    model = tiny()
    adapters, scales = trained(model)
    mx.eval(loss_and_grads(model, adapters, scales, batch(), loss_of(), "blocks"))
    del model, adapters
    gc.collect()
    assert mx.get_active_memory() <= before + 4096


def test_an_unknown_plan_and_an_adapter_without_a_block_are_refused_by_name():
    model = tiny()
    adapters, scales = trained(model)
    with pytest.raises(ValueError, match="plan must be whole, blocks or a number of blocks, got"):
        kept_blocks("half", 5)
    lost = {**adapters, "transformer_blocks.7.attn.to_q.lora_A.weight": mx.zeros((4, 64))}
    with pytest.raises(ValueError, match=r"transformer_blocks\.7\.attn\.to_q"):
        loss_and_grads(model, lost, scales, batch(), loss_of())
    with pytest.raises(ValueError, match="no adapter"):
        loss_and_grads(model, {}, scales, batch(), loss_of())
