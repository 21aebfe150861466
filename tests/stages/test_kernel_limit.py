"""On Metal, no kernel exceeds the limit, for any family, image size and micro-batch. Graphs are traced, and nothing is
computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from stages import kernels
from stages.models import attention, autoencoder
from stages.models.flux2.autoencoder import Autoencoder, AutoencoderConfig
from stages.models.t5.model import T5, T5Config
from stages.models.text import decoder
from stages.retrieval.train.config import TrainConfig as RetrieverTraining
from stages.text_to_image.families import family
from stages.text_to_image.train.profile import profile_settings
from stages.tuner.adapters.targets import target_scales
from stages.tuner.blockwise import backprop
from stages.tuner.blockwise.backprop import model_forward
from stages.tuner.contrastive import maxsim
from stages.tuner.step import choose_targets

T5_BASE: dict[str, Any] = {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 1, "num_heads": 12}
T5_BASE |= {"feed_forward_proj": "gated-gelu", "dimensions": 128}
FAMILIES = ("klein-base-4b", "klein-base-9b", "dev")
Kernel = tuple[float, str, list[tuple[int, ...]]]  # floating-point operations, kind, shapes of the inputs


@contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """Record the matrix products, convolutions and attentions that are built within this context manager. They need not be
    computed.

    MLX's own gradient of a product is two products of the same size. That of an attention is recorded with half of its
    size.
    """
    found: list[Kernel] = []
    multiply, add, convolve, attend = mx.array.__matmul__, mx.addmm, mx.conv2d, mx.fast.scaled_dot_product_attention

    def note(kind: str, output: mx.array, inner: int, *inputs: mx.array) -> mx.array:
        found.append((2.0 * output.size * inner, kind, [x.shape for x in inputs]))
        return output

    def fused(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
        return note("attention", attend(q, k, v, **more), 2 * k.shape[2], q, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.array, "__matmul__", lambda a, b: note("product", multiply(a, b), a.shape[-1], a, b))
        patch.setattr(mx, "addmm", lambda c, a, b, **more: note("product", add(c, a, b, **more), a.shape[-1], a, b))
        patch.setattr(
            mx, "conv2d", lambda x, w, *given, **more: note("convolution", convolve(x, w, *given, **more), w[0].size, x, w)
        )
        patch.setattr(mx.fast, "scaled_dot_product_attention", fused)
        yield found


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on Metal. They are traced, not computed."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "eval", lambda *results: None)
    monkeypatch.setattr(attention, "keeps_scores", lambda dtype, width: True)
    monkeypatch.setattr(backprop, "compiles", lambda: False)
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    for module in (backprop, kernels):
        monkeypatch.setattr(module, "dispatch", lambda *results: None)


def short(name: str) -> Any:
    """With one block of each kind; all widths are true."""
    record = family(name)
    return replace(record, transformer={**record.transformer, "num_layers": 1, "num_single_layers": 1})


def training_kernels(name: str, side: int, samples: int, **settings: Any) -> list[Kernel]:
    """Those of one micro-batch; `side` in pixels."""
    record, config = short(name), replace(profile_settings(), precision="bfloat16", **settings)
    architecture = record.architecture
    sizes = architecture.transformer_config(None, record)
    model = architecture.meta_transformer(sizes, mx.bfloat16)
    targets = choose_targets(model.linears(), config)
    adapter = {target.name + end: mx.zeros(shape) for target in targets for end, shape in target.shapes.items()}
    grid = side // architecture.pixels_per_token, side // architecture.pixels_per_token
    inputs = architecture.zero_inputs(sizes, samples, grid, record.text_tokens)
    with recorded() as found:
        backprop.loss_and_grads(model, adapter, target_scales(targets), inputs, lambda y: mx.square(y).mean((1, 2)), "blocks")
    return found


def check(found: list[Kernel]) -> None:
    assert max(found)[0] <= kernels.LIMIT, max(found)


SETTINGS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rank 256": {"rank": 256},
    "DoRA": {"variant": "dora"},
    "LoKr": {"variant": "lokr"},
    "LoKr of factor 4": {"variant": "lokr", "factor": 4},
    "4 bits": {"base_bits": 4},
}


SIZES = [(512, 1), (512, 64), (768, 4), (1024, 1), (1024, 16), (2048, 1), (2048, 4)]
CASES = [("LoRA", name, *size) for name in FAMILIES for size in SIZES]
CASES += [(kind, "dev", *size) for kind in SETTINGS if kind != "LoRA" for size in [(512, 64), (2048, 4)]]


@pytest.mark.parametrize(("settings", "name", "side", "samples"), CASES)
def test_no_kernel_of_training_exceeds_the_limit(settings: str, name: str, side: int, samples: int, metal: None) -> None:
    found = training_kernels(name, side, samples, **SETTINGS[settings])
    assert len(found) > 50
    check(found)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("side", "samples"), [(1024, 1), (2048, 4)])
def test_no_kernel_exceeds_the_limit_where_metal_has_a_gradient_in_blocks(name, side, samples, metal, monkeypatch) -> None:
    monkeypatch.setattr(attention, "keeps_scores", lambda dtype, width: False)
    found = training_kernels(name, side, samples)
    whole = [shapes[0][2] for _, kind, shapes in found if kind == "attention"]
    assert max(whole) < (side // 16) ** 2, "attention is divided"
    check(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_kernel_of_drawing_or_of_a_text_encoder_exceeds_the_limit(name: str, metal: None) -> None:
    record = short(name)
    sizes = record.architecture.transformer_config(None, record)
    model = record.architecture.meta_transformer(sizes, mx.bfloat16)
    for side in (512, 1024, 2048):
        grid = side // 16, side // 16
        with recorded() as found:
            model_forward(model, None)(**record.architecture.zero_inputs(sizes, 2, grid, record.text_tokens, [grid, grid]))
        check(found)
    text: Any = record.architecture.text_encoder_sizes(None, record)
    encoder = decoder.Decoder(text, {name: mx.zeros(shape, mx.bfloat16) for name, shape in text.shapes(1).items()})
    tokens_BT = mx.zeros((1, record.text_tokens), mx.int32)
    with recorded() as found:
        encoder.encode(tokens_BT, tokens_BT == 0, (1,))
    check(found)


def test_no_kernel_of_the_autoencoder_exceeds_the_limit(metal: None) -> None:
    config = AutoencoderConfig.from_dict(family("klein-base-4b").autoencoder)
    weights = {name: autoencoder.arrange(name, mx.zeros(shape)) for name, shape in config.shapes().items()}
    model = Autoencoder(config, weights)
    for side in (512, 2048, 4096):
        latent = mx.zeros((1, 4 * config.latent_channels, side // 16, side // 16))
        for run, given in ((model.encode, mx.zeros((1, side, side, 3))), (model.decode, latent)):
            with recorded() as found:
                run(given)
            assert {"convolution", "product", "attention"} <= {kind for _, kind, _ in found}
            check(found)


@pytest.mark.parametrize(("texts", "tokens"), [(64, 256), (512, 512), (4096, 128)])
def test_no_kernel_of_a_retriever_exceeds_the_limit(texts: int, tokens: int, metal: None) -> None:
    sizes = T5Config.from_dict(T5_BASE)
    model = T5(sizes, {name: mx.zeros(shape, mx.bfloat16) for name, shape in sizes.shapes().items()})
    targets = choose_targets(model.linears(), RetrieverTraining(rank=16))
    adapter = {target.name + end: mx.zeros(shape) for target in targets for end, shape in target.shapes.items()}
    ids_BL = mx.zeros((texts, tokens), mx.int32)

    def loss(parts: list[mx.array]) -> mx.array:
        return maxsim(parts[0][:64], ids_BL[:64] == 0, parts[0], ids_BL == 0).mean(-1)

    with recorded() as found:
        inputs = {"ids": [ids_BL], "real": [ids_BL == 0]}
        backprop.loss_and_grads(model, adapter, target_scales(targets), inputs, loss, "blocks")
    check(found)
