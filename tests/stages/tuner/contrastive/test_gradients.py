"""The gradient of a whole training step on a T5 encoder against PyTorch's: LoRA on all seven Linears, the head in full."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.t5.model import HEAD
from stages.tuner.adapters import full, lora
from stages.tuner.adapters.initial import fresh_adapter
from stages.tuner.adapters.targets import select_targets, target_scales
from stages.tuner.blockwise.backprop import loss_and_grads
from stages.tuner.optimizers.adamw import AdamW
from tests.stages.models.t5.test_encoder import ours, reference, texts
from tests.stages.tuner.contrastive.test_gradcache import contrast

RANK, ALPHA, SCALE = 4, 8.0, 2.0


def torch_gradients(
    model: Any, head: np.ndarray, arrays: dict[str, mx.array], batch: list[Any]
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients in PyTorch: the adapter's arrays are added to the weights of transformers' own modules."""
    import torch
    from torch.func import functional_call

    own = {name: torch.tensor(np.array(value), requires_grad=True) for name, value in arrays.items()}
    base, weights = model.state_dict(), {}
    for name in {name.removesuffix(lora.A) for name in own if name.endswith(lora.A)}:
        weights[f"{name}.weight"] = base[f"{name}.weight"] + SCALE * own[name + lora.B] @ own[name + lora.A]
    projection = torch.tensor(head) + own["head.linear" + full.DIFF]
    vectors = []
    for ids, real in batch:
        kwargs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(real).long()}
        states = functional_call(model, weights, (), kwargs).last_hidden_state
        vectors.append(torch.nn.functional.normalize(states @ projection.T, dim=-1))
    (q, d), (q_real, d_real) = vectors, (torch.tensor(real) for _, real in batch)
    best = torch.einsum("bqe,nke->bqnk", q, d).masked_fill(~d_real, -torch.inf).amax(-1)
    scores = (best * q_real[:, :, None]).sum(1) / q_real.sum(1, keepdim=True)
    loss = torch.nn.functional.cross_entropy(scores / 0.5, torch.arange(len(scores)))
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in own.items()}


@pytest.mark.parametrize("form", ["gated", "relu"])
def test_the_loss_and_every_gradient_are_those_of_pytorch_and_so_is_one_step_of_adamw(form: str) -> None:
    import torch

    model, head = reference(form)
    encoder = ours(model, head)
    assert HEAD not in model.state_dict()
    targets = select_targets(encoder.linears(), ("*",), RANK, ALPHA, whole=("head.linear",))
    per_block = 7 if form == "gated" else 6
    assert len(targets) == 3 * per_block + 1
    rng = np.random.default_rng(3)
    arrays = {
        name: mx.array(rng.normal(size=a.shape) / 30, mx.float32) if name.endswith(lora.ZERO_AT_START) else a
        for name, a in fresh_adapter(targets, seed=0).items()
    }
    batch = [texts(99, 6, 9, seed=1), texts(99, 6, 30, seed=2)]
    inputs = {"ids": [mx.array(ids) for ids, _ in batch], "real": [mx.array(real) for _, real in batch]}
    loss = functools.partial(contrast, query_real=inputs["real"][0], document_real=inputs["real"][1])
    found, grads = loss_and_grads(encoder, arrays, target_scales(targets), inputs, loss)
    wanted_loss, wanted = torch_gradients(model, head, arrays, batch)
    assert found["loss"].mean().item() == pytest.approx(wanted_loss, rel=1e-5)
    assert set(grads) == set(wanted)
    for name, value in wanted.items():
        assert np.abs(value).max() > 0, f"no gradient reaches {name}"
        assert np.linalg.norm(np.array(grads[name]) - value) <= 1e-4 * np.linalg.norm(value), name
    parameters = {name: torch.tensor(np.array(value)) for name, value in arrays.items()}
    for name, value in parameters.items():
        value.grad = torch.tensor(wanted[name])
    torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.01).step()
    method = AdamW(weight_decay=0.01)
    after, _ = method.update(arrays, grads, method.init(arrays), 1e-3)
    for name, value in parameters.items():
        small = np.abs(wanted[name]) < 1e-5  # AdamW's first step is the sign of the gradient, which rounding may turn there
        assert np.abs(np.array(after[name]) - value.numpy())[~small].max() <= 1e-6, name
