"""A model as a chain of blocks, and its predictions and gradients: block by block, as one graph, or a mixture.

Block by block, the forward pass keeps only each block's input. The backward pass computes each block again, last block first,
differentiates it alone and evaluates it before the next begins: one more forward pass, as only adapters are trained. Knows no
architecture.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from stages.kernels import compiles, dispatch, forward_only
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import Linear, Scale
from stages.tuner.blockwise.device import cores, live_memory_limit
from stages.tuner.weights import Arrays, StoredWeight, read_all

Tree = Any  # an array, or tuples, lists and dicts of arrays
BlockFunction = Callable[[Mapping[str, Any], Tree, Tree, Linear], Tree]  # (weights, h, shared, linear) -> h
Values = dict[str, mx.array]  # one value per sample each: "loss", and any others that are only reported
Loss = Callable[[Any], mx.array | Values]  # prediction -> one loss per sample, alone or with other values
Plan = str | int  # "whole", "blocks", or how many of the last blocks keep their activations


class Block(Protocol):
    @property
    def kind(self) -> str: ...  # names the function that computes the block

    @property
    def name(self) -> str: ...  # prefix of the names of its adapter's arrays

    @property
    def weights(self) -> Mapping[str, Any]: ...  # by name within the block


class Chain(Protocol):
    """A model whose blocks map `h` to the next `h` and all read `shared` (position tables), which takes no gradient."""

    @property
    def blocks(self) -> Sequence[Block]:
        """In the order of the forward pass."""

    @property
    def enter(self) -> Callable[..., tuple[Tree, Tree]]:
        """Maps the model's inputs to (h, shared). An `mx.array` has one row per sample; any other input is the same for all."""

    def block(self, kind: str) -> BlockFunction:
        """The function of this kind of block. It computes its Linears through `linear` and depends only on its arguments."""

    @property
    def leave(self) -> Callable[[Tree, Tree], Tree]:
        """Maps (h, shared) after the last block to the prediction, whose arrays have one row per sample."""


def loss_and_grads(
    chain: Chain,
    adapters: Arrays,
    scales: Mapping[str, Scale],
    inputs: Mapping[str, Any],
    loss: Loss,
    plan: Plan = "whole",
) -> tuple[mx.array | Values, Arrays]:
    """The result of `loss` and the gradients of its mean by the names in `adapters`, both lazy. All plans agree up to rounding.

    Only a loss `functools.partial(f, name=array, ...)` is compiled, its arrays as arguments. Every adapter must have a block.
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


def predict(chain: Chain, adapters: Arrays, scales: Mapping[str, Scale], inputs: Mapping[str, Any]) -> Tree:
    chain = on_cores(chain, inputs)
    return _forward(chain, inputs, BlockwiseBackprop(chain, adapters, scales).forward)


def predict_base(chain: Chain, inputs: Mapping[str, Any]) -> Tree:
    chain, linear = on_cores(chain, inputs), lora.AdaptedLinear({}, {})
    return _forward(chain, inputs, lambda n, weights, h, shared: chain.block(chain.blocks[n].kind)(weights, h, shared, linear))


def _forward(chain: Chain, inputs: Mapping[str, Any], run: Callable[[int, Tree, Tree, Tree], Tree]) -> Tree:
    """`run`: (number of the block, weights, h, shared) -> h."""
    h, shared = chain.enter(**inputs)
    dispatch(h, shared)
    visit = Visit(chain.blocks, range(len(chain.blocks)))
    for n in visit:
        # Each block is handed to the device before the next is built.
        h = run(n, visit.weights, h, shared)
        visit.dispatch(h)
    prediction = chain.leave(h, shared)
    dispatch(prediction)  # else its graph would become part of a gradient's
    return prediction


class BlockwiseForward:
    """Predictions without a gradient, with or without an adapter. Takes the inputs of `chain.enter`."""

    def __init__(
        self, chain: Chain, adapters: Arrays | None = None, scales: Mapping[str, float] | None = None, dtype: Any = None
    ) -> None:
        self.chain = chain
        # Only matrices are cast: a vector scales outputs and needs float32.
        arrays = {name: a.astype(dtype) if dtype is not None and a.ndim == 2 else a for name, a in (adapters or {}).items()}
        mx.eval(arrays)
        names = [block.name for block in chain.blocks]
        self.adapters, _ = lora.split_by_block(names, arrays)
        self.scales, _ = lora.split_by_block(names, scales or {})
        self.live_bytes: int | None = None  # MLX starts no operation while so much is in use; None: no limit

    def __call__(self, **inputs: Any) -> mx.array:
        with live_memory_limit(self.live_bytes):
            chain = on_cores(self.chain, inputs)
            compiled = compiled_functions(chain)

            def run(n: int, weights: Tree, h: Tree, shared: Tree) -> Tree:
                # One compiled function per kind of block.
                function = compiled(_undifferentiated, chain.blocks[n].kind)
                return function(self.adapters[n], weights, h, shared, self.scales[n])

            prediction: mx.array = _forward(chain, inputs, run)
            mx.eval(prediction)
        return prediction


def model_forward(model: Any, adapter: tuple[Arrays, dict[str, float]] | None, strength: float = 1.0) -> BlockwiseForward:
    """The forward pass with an adapter of (arrays, scales), times `strength`. Raises ValueError if it does not fit the model."""
    arrays, scales = adapter or ({}, {})
    lora.check_fits(model.linears(), arrays, scales)
    return BlockwiseForward(model, arrays, {name: scale * strength for name, scale in scales.items()}, model.dtype)


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

    def __init__(self, chain: Chain, adapters: Arrays, scales: Mapping[str, Scale]) -> None:
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
    def forward(adapters: Arrays, weights: Tree, h: Tree, shared: Tree, scales: dict[str, Scale]) -> Tree:
        return chain.block(kind)(weights, h, shared, lora.AdaptedLinear(adapters, scales))

    return forward


def _undifferentiated(chain: Chain, kind: str) -> Callable[..., Tree]:
    return forward_only()(forward_function(chain, kind))


def _backward(chain: Chain, kind: str) -> Callable[..., Any]:
    forward = forward_function(chain, kind)

    def backward(
        adapters: Arrays, weights: Tree, h: Tree, shared: Tree, scales: dict[str, Scale], cotangent: Tree
    ) -> tuple[Tree, Arrays]:
        trained, frozen = lora.split_start(adapters)

        def run(h: Tree, trained: Arrays) -> Tree:
            return forward(trained | frozen, weights, h, shared, scales)

        return _vjp(run, h, trained, cotangent)

    return backward


def _tail(chain: Chain, kinds: tuple[str, ...], loss: Callable[..., mx.array | Values]) -> Callable[..., Any]:
    def tail(
        adapters: list[Arrays], weights: list[Tree], h: Tree, shared: Tree, scales: list[dict[str, Scale]], given: Arrays
    ) -> tuple[mx.array | Values, Tree, list[Arrays]]:
        split = [lora.split_start(own) for own in adapters]

        def run(trained: list[Arrays], h: Tree) -> tuple[mx.array, mx.array | Values]:
            for kind, own, (_, frozen), weight, scale in zip(kinds, trained, split, weights, scales, strict=True):
                h = chain.block(kind)(weight, h, shared, lora.AdaptedLinear(own | frozen, scale))
            losses_B = loss(chain.leave(h, shared), **given)
            return main_losses(losses_B).mean(), losses_B

        (_, losses_B), (grads, by_input) = mx.value_and_grad(run, argnums=(0, 1))([trained for trained, _ in split], h)
        return losses_B, by_input, grads

    return tail


def _vjp(run: Callable[[Tree, Arrays], Tree], h: Tree, adapters: Arrays, cotangent: Tree) -> tuple[Tree, Arrays]:
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


# Weights on disk are read one block ahead


class Visit:
    """`for n in visit`: `visit.weights` has block n's weights, which must not be kept; `visit.dispatch(output)` starts it."""

    def __init__(self, blocks: Sequence[Any], order: Iterable[int], after: tuple[Any, ...] = ()) -> None:
        self.blocks, self.order = blocks, list(order)
        self.stored = any(isinstance(weight, StoredWeight) for n in self.order for weight in blocks[n].weights.values())
        self.at = 0
        self.weights: Mapping[str, Any] = {}
        self.ahead: Mapping[str, Any] = {}
        # Computed before a second block is read from disk, as they may need the weights of other blocks: at most two blocks
        # have theirs in memory.
        self.running = after

    def __iter__(self) -> Iterator[int]:
        for at, n in enumerate(self.order):
            self.at = at
            self.weights, self.ahead = self.ahead or read_all(self.blocks[n].weights), {}
            yield n
        self.weights = {}

    def dispatch(self, *results: Any) -> None:
        """Starts computing arrays made from the present block's weights, and reading the next block."""
        dispatch(*results)
        if not self.stored:
            return
        # The previous block's results are computed, so its weights are freed before the next block's are read.
        mx.eval(*self.running)
        self.running = results
        if self.at + 1 < len(self.order):
            self.ahead = read_all(self.blocks[self.order[self.at + 1]].weights)
            dispatch(self.ahead)


# The samples of a batch on several CPU cores, each core a part of them


def on_cores(chain: Chain, inputs: Mapping[str, Any]) -> Chain:
    """`chain` divided by samples, or `chain` itself on a GPU, with one sample or one core. Equal up to rounding."""
    samples = [leaf.shape[0] for _, leaf in tree_flatten(dict(inputs)) if isinstance(leaf, mx.array)]
    if mx.default_device() != mx.cpu or not samples:
        return chain
    # On a CPU, MLX computes the operations of one stream one after another, most of them on one core; only products use the
    # threads of the BLAS library. So each part of a batch gets a stream, and products fewer threads.
    parts = min(len(cores().streams), *samples)
    streams = cores().share(parts)
    return DividedChain(chain, streams) if parts > 1 else chain


class DividedChain:
    """A chain whose `h` and `shared` are lists, one value per part of the batch. The prediction is of the whole batch."""

    def __init__(self, chain: Chain, streams: Sequence[mx.ThreadLocalStream]) -> None:
        self.chain, self.streams, self.blocks = chain, streams, chain.blocks

    def enter(self, **inputs: Any) -> tuple[Tree, Tree]:
        found = [self.chain.enter(**tree_map(functools.partial(self._samples, n), inputs)) for n in self._each()]
        return [h for h, _ in found], [shared for _, shared in found]

    def block(self, kind: str) -> BlockFunction:
        function = self.chain.block(kind)

        def run(weights: Mapping[str, Any], h: Tree, shared: Tree, linear: Linear) -> Tree:
            assert isinstance(linear, lora.AdaptedLinear)
            own = [linear.of_samples(functools.partial(self._samples, n)) for n in range(len(self.streams))]
            return [function(weights, h[n], shared[n], own[n]) for n in self._each()]

        return run

    def leave(self, h: Tree, shared: Tree) -> Tree:
        first, *others = [self.chain.leave(h[n], shared[n]) for n in self._each()]
        return tree_map(lambda *parts: mx.concatenate(parts), first, *others)

    def _samples(self, n: int, value: Any) -> Any:
        parts = len(self.streams)
        return value[value.shape[0] * n // parts : value.shape[0] * (n + 1) // parts] if isinstance(value, mx.array) else value

    def _each(self) -> Iterator[int]:
        # What the caller builds for part n joins the queue of its stream.
        for n, stream in enumerate(self.streams):
            with mx.stream(stream):
                yield n
