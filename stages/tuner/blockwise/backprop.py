"""Gradients of a chain of blocks: block by block, as one graph, or a mixture. Knows no architecture.

Block by block, the forward pass keeps only each block's input. The backward pass computes each block again, last block first,
differentiates it alone and evaluates it before the next begins: one more forward pass, as only adapters are trained.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from stages.tuner.adapters import lora
from stages.tuner.blockwise.chain import Arrays, Chain, Tree
from stages.tuner.blockwise.cores import on_cores
from stages.tuner.blockwise.device import compiles, dispatch
from stages.tuner.blockwise.visit import Visit
from stages.tuner.stored import read_all

Values = dict[str, mx.array]  # one value per sample each: "loss", and any others that are only reported
Loss = Callable[[Any], mx.array | Values]  # prediction -> one loss per sample, alone or with other values
Plan = str | int  # "whole", "blocks", or how many of the last blocks keep their activations


def loss_and_grads(
    chain: Chain,
    adapters: Arrays,
    scales: Mapping[str, float],
    inputs: Mapping[str, Any],
    loss: Loss,
    plan: Plan = "whole",
) -> tuple[mx.array | Values, Arrays]:
    """The result of `loss` and the gradients of its mean by the names in `adapters`, both lazy. All plans agree up to rounding.

    Only a loss that is a `functools.partial(function, name=array, ...)` is compiled; its arrays become arguments of the graph.
    Raises ValueError for an unknown plan, and unless every adapter belongs to a block.
    """
    chain = on_cores(chain, inputs)
    backprop = BlockwiseBackprop(chain, adapters, scales)
    head = len(chain.blocks) - kept_blocks(plan, len(chain.blocks))
    h, shared = chain.enter(**inputs)
    dispatch(h, shared)
    block_inputs = []
    visit = Visit(chain.blocks, range(head))
    for n in visit:
        block_inputs.append(h)
        h = backprop.forward(n, visit.weights, h, shared)
        visit.dispatch(h)
    losses_B, cotangent, grads = backprop.tail(head, h, shared, loss)
    # Blocks before the first adapter need no gradient: a dropped cotangent is never computed.
    h, cotangent = (), cotangent if head > backprop.first_trained else ()
    visit.dispatch(losses_B, cotangent, grads)
    visit = Visit(chain.blocks, reversed(range(backprop.first_trained, head)), after=(losses_B, cotangent, grads))
    for n in visit:
        cotangent, block_grads = backprop.backward(n, visit.weights, block_inputs.pop(), shared, cotangent)
        cotangent = cotangent if n > backprop.first_trained else ()
        visit.dispatch(cotangent, block_grads)
        grads |= block_grads
    return losses_B, grads


def main_losses(found: mx.array | Values) -> mx.array:
    return found["loss"] if isinstance(found, dict) else found


def predict(chain: Chain, adapters: Arrays, scales: Mapping[str, float], inputs: Mapping[str, Any]) -> Tree:
    chain = on_cores(chain, inputs)
    blocks = BlockwiseBackprop(chain, adapters, scales)
    h, shared = chain.enter(**inputs)
    visit = Visit(chain.blocks, range(len(chain.blocks)))
    for n in visit:
        h = blocks.forward(n, visit.weights, h, shared)
        visit.dispatch(h)
    prediction = chain.leave(h, shared)
    dispatch(prediction)
    return prediction


def predict_base(chain: Chain, inputs: Mapping[str, Any]) -> Tree:
    chain = on_cores(chain, inputs)
    h, shared = chain.enter(**inputs)
    visit = Visit(chain.blocks, range(len(chain.blocks)))
    for n in visit:
        h = chain.block(chain.blocks[n].kind)(visit.weights, h, shared, lora.adapted_linear({}, {}))
        visit.dispatch(h)
    prediction = chain.leave(h, shared)
    dispatch(prediction)  # else its graph would become part of the gradient's
    return prediction


def kept_blocks(plan: Plan, blocks: int) -> int:
    """How many of the last blocks keep their activations: at least 1, at most all. Raises ValueError for an unknown plan."""
    # The last block costs nothing: the backward pass begins with it.
    if isinstance(plan, int):
        return min(max(plan, 1), blocks)
    if plan not in ("whole", "blocks"):
        raise ValueError(f"plan must be whole, blocks or a number of blocks, got {plan!r}")
    return blocks if plan == "whole" else 1


class BlockwiseBackprop:
    """The blocks of a model with their adapters, forward and backward. Raises ValueError as `loss_and_grads` does."""

    def __init__(self, chain: Chain, adapters: Arrays, scales: Mapping[str, float]) -> None:
        self.chain = chain
        self.compiled = compiled_functions(chain)
        names = [block.name for block in chain.blocks]
        self.adapters, unknown = lora.split_by_block(names, adapters)
        self.scales, _ = lora.split_by_block(names, scales)
        if not adapters:
            raise ValueError("there is no adapter to train")
        if unknown:
            raise ValueError(f"no block of the model holds the adapter {min(unknown)}")
        self.first_trained = min(n for n, own in enumerate(self.adapters) if own)

    def forward(self, n: int, weights: Tree, h: Tree, shared: Tree) -> Tree:
        block = self.chain.blocks[n]
        return self.compiled(forward_function, block.kind)(self.adapters[n], weights, h, shared, self.scales[n])

    def backward(self, n: int, weights: Tree, h: Tree, shared: Tree, cotangent: Tree) -> tuple[Tree, Arrays]:
        """Computes a block again and differentiates it: gradients by its input, and by name of its adapter's arrays."""
        block = self.chain.blocks[n]
        run = self.compiled(_backward, block.kind)
        by_input, grads = run(self.adapters[n], weights, h, shared, self.scales[n], cotangent)
        return by_input, {f"{block.name}.{key}": grad for key, grad in grads.items()}

    def tail(self, head: int, h: Tree, shared: Tree, loss: Loss) -> tuple[mx.array | Values, Tree, Arrays]:
        """The blocks from `head` on and the loss as one graph: result of `loss`, gradient of its mean by `h`, and by name."""
        blocks = self.chain.blocks[head:]
        kinds = tuple(b.kind for b in blocks)
        if isinstance(loss, functools.partial):
            run, given = self.compiled(_tail, kinds, loss.func), loss.keywords
        else:
            run, given = _tail(self.chain, kinds, loss), {}
        weights = [read_all(b.weights) for b in blocks]
        losses_B, by_input, grads = run(self.adapters[head:], weights, h, shared, self.scales[head:], given)
        named = {f"{b.name}.{key}": grad for b, own in zip(blocks, grads, strict=True) for key, grad in own.items()}
        return losses_B, by_input, named


# Functions of explicit arrays, to be compiled. A captured array would count as a constant and be frozen into the graph.


def forward_function(chain: Chain, kind: str) -> Callable[..., Tree]:
    def forward(adapters: Arrays, weights: Tree, h: Tree, shared: Tree, scales: dict[str, float]) -> Tree:
        return chain.block(kind)(weights, h, shared, lora.adapted_linear(adapters, scales))

    return forward


def _backward(chain: Chain, kind: str) -> Callable[..., Any]:
    forward = forward_function(chain, kind)

    def backward(
        adapters: Arrays, weights: Tree, h: Tree, shared: Tree, scales: dict[str, float], cotangent: Tree
    ) -> tuple[Tree, Arrays]:
        def run(h: Tree, adapters: Arrays) -> Tree:
            return forward(adapters, weights, h, shared, scales)

        return _vjp(run, h, adapters, cotangent)

    return backward


def _tail(chain: Chain, kinds: tuple[str, ...], loss: Callable[..., mx.array | Values]) -> Callable[..., Any]:
    def tail(
        adapters: list[Arrays], weights: list[Tree], h: Tree, shared: Tree, scales: list[dict[str, float]], given: Arrays
    ) -> tuple[mx.array | Values, Tree, list[Arrays]]:
        def run(adapters: list[Arrays], h: Tree) -> tuple[mx.array, mx.array | Values]:
            for kind, own, weight, scale in zip(kinds, adapters, weights, scales, strict=True):
                h = chain.block(kind)(weight, h, shared, lora.adapted_linear(own, scale))
            losses_B = loss(chain.leave(h, shared), **given)
            return main_losses(losses_B).mean(), losses_B

        (_, losses_B), (grads, by_input) = mx.value_and_grad(run, argnums=(0, 1))(adapters, h)
        return losses_B, by_input, grads

    return tail


def _vjp(run: Callable[[Tree, Arrays], Tree], h: Tree, adapters: Arrays, cotangent: Tree) -> tuple[Tree, Arrays]:
    """Gradients of run(h, adapters) by `h`, in its structure, and by name."""
    # mx.vjp takes and returns flat lists of arrays only.
    leaves = [leaf for _, leaf in tree_flatten(h)]

    def flat(*primals: mx.array) -> list[mx.array]:
        out = run(_arranged_like(h, primals), dict(zip(adapters, primals[len(leaves) :], strict=True)))
        return [leaf for _, leaf in tree_flatten(out)]

    _, grads = mx.vjp(flat, [*leaves, *adapters.values()], [leaf for _, leaf in tree_flatten(cotangent)])
    return _arranged_like(h, grads), dict(zip(adapters, grads[len(leaves) :], strict=True))


def _arranged_like(tree: Tree, leaves: Sequence[mx.array]) -> Tree:
    each = iter(leaves)
    return tree_map(lambda _: next(each), tree)


class CompiledFunctions:
    def __init__(self, chain: Chain) -> None:
        # Weak: the functions must not keep the weights of a model that was dropped.
        self.chain: Chain = weakref.proxy(chain)
        self.functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, make: Callable[..., Callable[..., Any]], *which: Any) -> Callable[..., Any]:
        key = (make, *which)
        if key not in self.functions:
            plain = make(self.chain, *which)
            self.functions[key] = mx.compile(plain) if compiles() else plain
        return self.functions[key]


_COMPILED: dict[int, CompiledFunctions] = {}


def compiled_functions(chain: Chain) -> CompiledFunctions:
    """The model's cache, removed when the model is freed."""
    if id(chain) not in _COMPILED:
        _COMPILED[id(chain)] = CompiledFunctions(chain)
        weakref.finalize(chain, _COMPILED.pop, id(chain))
    return _COMPILED[id(chain)]
