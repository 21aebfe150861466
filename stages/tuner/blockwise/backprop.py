"""Gradients of a chain of blocks: block by block, as one graph, or a mixture. Knows no architecture.

Differentiating a whole graph keeps every block's activations until the backward pass. Block by block, the forward pass keeps
only each block's input; the backward pass computes each block again, last block first, differentiates it alone and evaluates
it before the next begins. Only adapters are trained, so this costs one more forward pass, and memory holds the weights, one
activation per block, and the work of one block.

A plan says how many of the last blocks are differentiated as one graph, which keeps their activations and does not compute
them again: "whole" is all blocks, "blocks" is one.
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
    """Compute the losses of a batch and the gradients of their mean. Return (result of `loss`, dict from the names in
    `adapters` to gradients). `chain` is the model. `adapters` maps names such as "<block>.<linear>.lora_A.weight" to
    arrays. `scales` maps "<block>.<linear>" to the factor of the adapter's change. `inputs` are the keyword arguments
    of `chain.enter`. `loss(prediction)` returns one loss per sample, or a dict of values per sample with the key
    "loss". `plan` says how many of the last blocks keep their activations: a number, "whole" for all blocks, or
    "blocks" for only the last block.

    The backward pass computes the activations of the other blocks again, one block at a time. The plan "blocks" is
    named after this. A number below 1 counts as 1, and a number above the number of blocks means all blocks.

    All plans give the same gradients up to rounding. Raises ValueError if `plan` is anything else, if there are no
    adapters, or if an adapter belongs to no block.

    The results may not be computed yet on return. Only a loss that is a `functools.partial(function, name=array, ...)`
    is compiled. Its arrays become arguments of the graph. An array captured by a closure would be frozen into the
    graph.
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
    """Return the losses that training minimises, one per sample. `found` is the result of a loss: the losses alone, or a dict
    with the key "loss".
    """
    return found["loss"] if isinstance(found, dict) else found


def predict(chain: Chain, adapters: Arrays, scales: Mapping[str, float], inputs: Mapping[str, Any]) -> Tree:
    """Return the prediction of `chain` with an adapter, without a gradient. `adapters` maps names such as
    "<block>.<linear>.lora_A.weight" to arrays. `scales` maps "<block>.<linear>" to the factor of the adapter's change.
    `inputs` are the keyword arguments of `chain.enter`. The function does not wait for the device: the prediction may
    still be in computation.
    """
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
    """Return the prediction of the model `chain` without an adapter. `inputs` are the keyword arguments of `chain.enter`. The
    returned array may not be computed yet.
    """
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
    """Return how many of the last blocks keep their activations until the backward pass. `plan` is "whole" (all blocks),
    "blocks" (1 block) or a number. `blocks` is the number of blocks of the model. The result is at least 1 and at most
    `blocks`. Raises ValueError for any other plan.

    The last block costs nothing, because the backward pass begins with it.
    """
    if isinstance(plan, int):
        return min(max(plan, 1), blocks)
    if plan not in ("whole", "blocks"):
        raise ValueError(f"plan must be whole, blocks or a number of blocks, got {plan!r}")
    return blocks if plan == "whole" else 1


class BlockwiseBackprop:
    """A model with adapters that is computed block by block, forward and backward. `adapters` maps names such as
    "<block>.<linear>.lora_A.weight" to arrays. `scales` maps "<block>.<linear>" to the factor that multiplies the adapter's
    change. `first_trained` is the index of the first block with an adapter. Raises ValueError if there is no adapter, or if an
    adapter belongs to no block.
    """

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
        """Return the output of the block with index `n`. `h` is the block's input. `weights` holds the block's weights
        by name. `shared` is a value that all blocks read; `chain.enter` returned it.
        """
        block = self.chain.blocks[n]
        return self.compiled(forward_function, block.kind)(self.adapters[n], weights, h, shared, self.scales[n])

    def backward(self, n: int, weights: Tree, h: Tree, shared: Tree, cotangent: Tree) -> tuple[Tree, Arrays]:
        """Compute the block with index `n` again, and differentiate it. `h` is the block's input. `weights` holds the
        block's weights by name. `shared` is the value that all blocks read. `cotangent` is the gradient of the loss
        with respect to the block's output. Return two values: the gradient with respect to `h`, and a dict of gradients
        by adapter name.
        """
        block = self.chain.blocks[n]
        run = self.compiled(_backward, block.kind)
        by_input, grads = run(self.adapters[n], weights, h, shared, self.scales[n], cotangent)
        return by_input, {f"{block.name}.{key}": grad for key, grad in grads.items()}

    def tail(self, head: int, h: Tree, shared: Tree, loss: Loss) -> tuple[mx.array | Values, Tree, Arrays]:
        """Compute the last blocks and the loss, and differentiate them as one graph. The first of these blocks has the
        index `head`. `h` is the input of this block. `shared` is the value that all blocks read. `loss` maps the
        prediction to one loss per sample, or to a dict of values per sample. Returns three values: the result of `loss`,
        the gradient of the mean loss with respect to `h`, and a dict of gradients by adapter name.
        """
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
    """Return a function that computes any block of one kind with its adapter. `chain` is the model. `kind` is the name
    of the kind of block. The function takes `(adapters, weights, h, shared, scales)` and returns the block's output.
    `adapters` maps names such as "<linear>.lora_A.weight" to arrays. `scales` maps "<linear>" to the factor of the
    adapter's change. `h` is the block's input. `shared` is the value that all blocks read.
    """

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
    """Return two gradients of run(h, adapters). The first is for `h`, in the structure of `h`. The second is for `adapters`, by
    name. `cotangent` is the gradient of the loss with respect to the result of `run`.
    """
    leaves = [leaf for _, leaf in tree_flatten(h)]

    def flat(*primals: mx.array) -> list[mx.array]:
        out = run(_arranged_like(h, primals), dict(zip(adapters, primals[len(leaves) :], strict=True)))
        return [leaf for _, leaf in tree_flatten(out)]

    _, grads = mx.vjp(flat, [*leaves, *adapters.values()], [leaf for _, leaf in tree_flatten(cotangent)])
    return _arranged_like(h, grads), dict(zip(adapters, grads[len(leaves) :], strict=True))


def _arranged_like(tree: Tree, leaves: Sequence[mx.array]) -> Tree:
    """Return a tree with the structure of `tree` and the values of `leaves`, in order. Surplus leaves are ignored."""
    each = iter(leaves)
    return tree_map(lambda _: next(each), tree)


class CompiledFunctions:
    """A cache of the compiled functions of one model. It refers to the model weakly. Dropping the model therefore frees its
    weights.
    """

    def __init__(self, chain: Chain) -> None:
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
    """Return the cache of the compiled functions of `chain`. `chain` is a model as a sequence of blocks. The first call
    for a model creates the model's cache, and later calls for this model return the cache. When the model is freed, the
    cache is removed.
    """
    if id(chain) not in _COMPILED:
        _COMPILED[id(chain)] = CompiledFunctions(chain)
        weakref.finalize(chain, _COMPILED.pop, id(chain))
    return _COMPILED[id(chain)]
