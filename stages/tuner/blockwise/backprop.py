"""Gradients of a chain of blocks: block by block, as one graph, or anything between. Knows no architecture.

A framework that differentiates a whole graph keeps every block's activations until the backward pass. Here the chain is
walked instead: forward, keeping only each block's input; then backward, last block first, each block computed again and
differentiated by itself, and evaluated before the next begins. Only the adapters are trained, so this costs one more
forward pass, and memory is that of the weights, one activation per block, and one block's work.

Between the two lies a number: the last n blocks are differentiated as one graph, which keeps their activations and does
not compute them again. "whole" is all of them, "blocks" one.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from stages.tuner.adapters import lora

Tree = Any  # an array, or tuples, lists and dicts of arrays
Arrays = dict[str, mx.array]
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> x @ weight.T, adapted
BlockFunction = Callable[[Mapping[str, Any], Tree, Tree, Linear], Tree]  # (weights, h, shared, linear) -> h
Loss = Callable[[mx.array], mx.array]  # prediction -> losses_B
dispatch: Callable[..., None] = mx.async_eval  # evaluate these, without waiting; MLX leaves it untyped
Plan = str | int  # "whole", "blocks", or how many of the last blocks keep their activations

BUFFER = "MLX_MAX_MB_PER_BUFFER"  # what operations read, MB, before MLX hands them to the device
SOONER_MB = "200"
LATE = ((8, 0), (9, 0), (10, 0), (12, 0))  # the CUDA devices for which MLX's own is more, 400 or 1000; for others 100 or 25


class Block(Protocol):
    """One link: `name` prefixes its adapters, `kind` says which function computes it, `weights` are named within it."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> Mapping[str, Any]: ...


class Chain(Protocol):
    """A model as a sequence of blocks. What all blocks share (modulation, rotary tables) takes no gradient."""

    @property
    def blocks(self) -> Sequence[Block]:
        """In order of the forward pass."""

    @property
    def enter(self) -> Callable[..., tuple[Tree, Tree]]:
        """From the model's inputs, by name, to (h, shared)."""

    def block(self, kind: str) -> BlockFunction:
        """The function of that kind of block, which depends on its arguments alone."""

    @property
    def leave(self) -> Callable[[Tree, Tree], mx.array]:
        """From the last block's output and shared to the prediction."""


def loss_and_grads(
    chain: Chain,
    adapters: Arrays,
    scales: Mapping[str, float],
    inputs: Mapping[str, Any],
    loss: Loss,
    plan: Plan = "whole",
) -> tuple[mx.array, Arrays]:
    """(losses_B, the gradient of their mean in the adapters' own names and dtype), dispatched, not awaited.

    `adapters` maps "<block>.<linear>.lora_A.weight" and the like to fp32 masters, `scales` "<block>.<linear>" to a
    factor. The results are the same for every plan, up to rounding. `loss` maps the prediction to losses_B; what it
    holds must come through `functools.partial(function, name=array, ...)` to be compiled with the last blocks: those
    arrays become arguments of the graph, where a captured array would be frozen into it. A plain closure works too,
    uncompiled.

    Blocks are dispatched ahead of the device; `limited` says how far.
    """
    walk = BlockwiseBackprop(chain, adapters, scales)
    head = len(chain.blocks) - kept_blocks(plan, len(chain.blocks))
    h, shared = chain.enter(**inputs)
    dispatch(h, shared)
    entered = []
    for n in range(head):
        entered.append(h)
        h = walk.forward(n, h, shared)
        dispatch(h)
    losses_B, cotangent, grads = walk.tail(head, h, shared, loss)
    # Nothing is trained before the first: there, what is let go is not computed.
    h, cotangent = (), cotangent if head > walk.first else ()
    dispatch(losses_B, cotangent, grads)
    for n in reversed(range(walk.first, head)):
        cotangent, found = walk.backward(n, entered.pop(), shared, cotangent)
        cotangent = cotangent if n > walk.first else ()
        dispatch(cotangent, found)
        grads |= found
    return losses_B, grads


def kept_blocks(plan: Plan, blocks: int) -> int:
    """How many of the last blocks a plan differentiates as one graph. The last one is free: its turn comes at once."""
    if isinstance(plan, int):
        return min(max(plan, 1), blocks)
    if plan not in ("whole", "blocks"):
        raise ValueError(f"the plan must be whole, blocks or a number of blocks to keep, not {plan!r}")
    return blocks if plan == "whole" else 1


@contextmanager
def limited(live: int | None) -> Iterator[None]:
    """Work is handed to the device ahead as long as live memory stays below so many bytes; MLX's own limit where None.

    Above it, the next operation waits until running work has freed some: the same numbers, later.
    """
    if live is None:
        yield
        return
    before = mx.set_memory_limit(live)
    try:
        yield
    finally:
        mx.set_memory_limit(before)


def gathers_large_command_buffers() -> bool:
    """Whether the device is a CUDA one for which MLX gathers more than SOONER_MB."""
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    info: Mapping[str, Any] = mx.device_info()
    return (info.get("compute_capability_major"), info.get("compute_capability_minor")) in LATE


def limit_command_buffers() -> None:
    """Have MLX hand work to a CUDA device in smaller pieces, unless the user says how large.

    What is handed over at once is all alive until it is done: data/bench.md has what it takes either way.

    MLX reads this once in a process, when the first operation for the device is made, even if it is never computed.
    """
    if gathers_large_command_buffers():
        os.environ.setdefault(BUFFER, SOONER_MB)


class BlockwiseBackprop:
    """One pass over a chain with one set of adapters."""

    def __init__(self, chain: Chain, adapters: Arrays, scales: Mapping[str, float]) -> None:
        self.chain = chain
        self.compiled = _compiled_for(chain)
        self.adapters = [_within(block.name, adapters) for block in chain.blocks]
        self.scales = [_within(block.name, scales) for block in chain.blocks]
        lost = set(adapters) - {f"{b.name}.{key}" for b, own in zip(chain.blocks, self.adapters, strict=True) for key in own}
        if lost or not adapters:
            raise ValueError(f"no block holds the adapter {min(lost)}" if lost else "there is no adapter to train")
        self.first = min(n for n, own in enumerate(self.adapters) if own)

    def forward(self, n: int, h: Tree, shared: Tree) -> Tree:
        """The output of block n."""
        block = self.chain.blocks[n]
        return self.compiled(_forward, block.kind)(self.adapters[n], block.weights, h, shared, self.scales[n])

    def backward(self, n: int, h: Tree, shared: Tree, cotangent: Tree) -> tuple[Tree, Arrays]:
        """The gradients of block n by its input and by its adapters, from its input and the gradient by its output."""
        block = self.chain.blocks[n]
        run = self.compiled(_backward, block.kind)
        back, grads = run(self.adapters[n], block.weights, h, shared, self.scales[n], cotangent)
        return back, {f"{block.name}.{key}": grad for key, grad in grads.items()}

    def tail(self, head: int, h: Tree, shared: Tree, loss: Loss) -> tuple[mx.array, Tree, Arrays]:
        """Losses, the gradient by the input of block `head`, and those by all adapters from there on, as one graph."""
        blocks = self.chain.blocks[head:]
        kinds = tuple(b.kind for b in blocks)
        if isinstance(loss, functools.partial):
            run, given = self.compiled(_tail, kinds, loss.func), loss.keywords
        else:
            run, given = _tail(self.chain, kinds, loss), {}
        losses_B, back, grads = run(self.adapters[head:], [b.weights for b in blocks], h, shared, self.scales[head:], given)
        named = {f"{b.name}.{key}": grad for b, found in zip(blocks, grads, strict=True) for key, grad in found.items()}
        return losses_B, back, named


# Functions of explicit arrays, to be compiled. A captured array would count as a constant, and be frozen into the graph.


def _forward(chain: Chain, kind: str) -> Callable[..., Tree]:
    def forward(adapters: Arrays, weights: Tree, h: Tree, shared: Tree, scales: dict[str, float]) -> Tree:
        return chain.block(kind)(weights, h, shared, lora.linear(adapters, scales))

    return forward


def _backward(chain: Chain, kind: str) -> Callable[..., Any]:
    forward = _forward(chain, kind)

    def backward(
        adapters: Arrays, weights: Tree, h: Tree, shared: Tree, scales: dict[str, float], cotangent: Tree
    ) -> tuple[Tree, Arrays]:
        def run(h: Tree, adapters: Arrays) -> Tree:
            return forward(adapters, weights, h, shared, scales)

        return _vjp(run, h, adapters, cotangent)

    return backward


def _tail(chain: Chain, kinds: tuple[str, ...], loss: Callable[..., mx.array]) -> Callable[..., Any]:
    def tail(
        adapters: list[Arrays], weights: list[Tree], h: Tree, shared: Tree, scales: list[dict[str, float]], given: Arrays
    ) -> tuple[mx.array, Tree, list[Arrays]]:
        def run(adapters: list[Arrays], h: Tree) -> tuple[mx.array, mx.array]:
            for kind, own, weight, scale in zip(kinds, adapters, weights, scales, strict=True):
                h = chain.block(kind)(weight, h, shared, lora.linear(own, scale))
            losses_B = loss(chain.leave(h, shared), **given)
            return losses_B.mean(), losses_B

        (_, losses_B), (grads, back) = mx.value_and_grad(run, argnums=(0, 1))(adapters, h)
        return losses_B, back, grads

    return tail


def _vjp(run: Callable[[Tree, Arrays], Tree], h: Tree, adapters: Arrays, cotangent: Tree) -> tuple[Tree, Arrays]:
    """The gradients of run(h, adapters) by h and by the adapters, from the gradient by its result."""
    leaves = [leaf for _, leaf in tree_flatten(h)]

    def flat(*primals: mx.array) -> list[mx.array]:
        out = run(_like(h, primals), dict(zip(adapters, primals[len(leaves) :], strict=True)))
        return [leaf for _, leaf in tree_flatten(out)]

    _, grads = mx.vjp(flat, [*leaves, *adapters.values()], [leaf for _, leaf in tree_flatten(cotangent)])
    return _like(h, grads), dict(zip(adapters, grads[len(leaves) :], strict=True))


def _like(tree: Tree, leaves: Sequence[mx.array]) -> Tree:
    """The first of `leaves`, arranged as `tree` is."""
    each = iter(leaves)
    return tree_map(lambda _: next(each), tree)


def _within(block: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of one block, by their names within it."""
    prefix = block + "."
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


class _Compiled:
    """The compiled functions of one chain. It must not keep the chain alive: its weights are to go when it goes."""

    def __init__(self, chain: Chain) -> None:
        self.chain: Chain = weakref.proxy(chain)
        self.functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, make: Callable[..., Callable[..., Any]], *which: Any) -> Callable[..., Any]:
        key = (make, *which)
        if key not in self.functions:
            plain = make(self.chain, *which)
            self.functions[key] = mx.compile(plain) if compiles() else plain
        return self.functions[key]


def compiles() -> bool:
    """Whether mx.compile pays: on the CPU backend it calls a C++ compiler, for minutes."""
    return mx.default_device() != mx.cpu


_COMPILED: dict[int, _Compiled] = {}


def _compiled_for(chain: Chain) -> _Compiled:
    if id(chain) not in _COMPILED:
        _COMPILED[id(chain)] = _Compiled(chain)
        weakref.finalize(chain, _COMPILED.pop, id(chain))
    return _COMPILED[id(chain)]
