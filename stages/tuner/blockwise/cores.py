"""The samples of a batch on several CPU cores, each core a part of them. Knows no architecture."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from stages import blas
from stages.tuner.blockwise.chain import BlockFunction, Chain, Linear, Tree


@dataclass
class Cores:
    streams: Sequence[mx.ThreadLocalStream]  # one per core; each Python thread has a queue of its own behind an entry
    parts: int = 1  # streams in use

    def share(self, parts: int) -> Sequence[mx.ThreadLocalStream]:
        """The first `parts` streams. A product of one part then uses 1 / `parts` of the cores, rounded down, at least one."""
        if parts != self.parts:
            # Products still running must keep their number of threads: their rounding depends on it.
            mx.synchronize(mx.cpu)
            for stream in self.streams:
                mx.synchronize(stream)
            blas.set_threads(max(1, len(self.streams) // parts))
            self.parts = parts
        return self.streams[:parts]


@functools.cache
def cores() -> Cores:
    """The cores that this process may use: OMP_NUM_THREADS or those of the machine, read once."""
    return Cores([mx.new_thread_local_stream(mx.cpu) for _ in range(blas.threads())])


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
        parts = len(self.streams)

        def own_samples(n: int, value: Any) -> Any:
            if not isinstance(value, mx.array):
                return value
            return value[value.shape[0] * n // parts : value.shape[0] * (n + 1) // parts]

        found = [self.chain.enter(**tree_map(functools.partial(own_samples, n), inputs)) for n in self._each()]
        return [h for h, _ in found], [shared for _, shared in found]

    def block(self, kind: str) -> BlockFunction:
        function = self.chain.block(kind)

        def run(weights: Mapping[str, Any], h: Tree, shared: Tree, linear: Linear) -> Tree:
            return [function(weights, h[n], shared[n], linear) for n in self._each()]

        return run

    def leave(self, h: Tree, shared: Tree) -> Tree:
        first, *others = [self.chain.leave(h[n], shared[n]) for n in self._each()]
        return tree_map(lambda *parts: mx.concatenate(parts), first, *others)

    def _each(self) -> Iterator[int]:
        # What the caller builds for part n joins the queue of its stream.
        for n, stream in enumerate(self.streams):
            with mx.stream(stream):
                yield n
