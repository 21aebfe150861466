"""Computes the samples of a batch on several CPU cores, each core a part of them. Knows no architecture.

On a CPU, MLX computes the operations of one stream one after another, most of them on one core. Only products use the threads
of the BLAS library. So a batch is divided, each part gets a stream of its own, and the BLAS library uses fewer threads. On a
GPU, nothing is divided.
"""

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
    """The CPU cores that this process may use. `streams` has one MLX stream per core. A stream is a queue of operations with a
    thread of its own. Each Python thread that uses a stream gets its own queue. `parts` is the number of streams in use.
    """

    streams: Sequence[mx.ThreadLocalStream]
    parts: int = 1

    def share(self, parts: int) -> Sequence[mx.ThreadLocalStream]:
        """Return `parts` streams, and give the products of each of them an equal share of the cores.

        If the share changes, the call waits for running operations. The rounding of a product depends on its number of threads.
        """
        if parts != self.parts:
            mx.synchronize(mx.cpu)
            for stream in self.streams:
                mx.synchronize(stream)
            blas.set_threads(max(1, len(self.streams) // parts))
            self.parts = parts
        return self.streams[:parts]


@functools.cache
def cores() -> Cores:
    """Return the CPU cores that this process may use. Their number is the environment variable `OMP_NUM_THREADS`, or that of
    the machine. It is read at the first call.
    """
    return Cores([mx.new_thread_local_stream(mx.cpu) for _ in range(blas.threads())])


def on_cores(chain: Chain, inputs: Mapping[str, Any]) -> Chain:
    """Return a model that computes a batch on several CPU cores. Its results are those of `chain` up to rounding. `inputs` are
    the keyword arguments of `chain.enter` for this batch. Return `chain` itself on a GPU, if the batch has one sample, or if
    the process may use one core.
    """
    samples = [leaf.shape[0] for _, leaf in tree_flatten(dict(inputs)) if isinstance(leaf, mx.array)]
    if mx.default_device() != mx.cpu or not samples:
        return chain
    parts = min(len(cores().streams), *samples)
    streams = cores().share(parts)
    return DividedChain(chain, streams) if parts > 1 else chain


class DividedChain:
    """A model that divides the samples of each batch into as many parts as there are `streams`, and computes each part on its
    stream. It has the methods of `chain`. Its inner values `h` and `shared` are lists with one value per part. The prediction
    is that of the whole batch.
    """

    def __init__(self, chain: Chain, streams: Sequence[mx.ThreadLocalStream]) -> None:
        self.chain, self.streams, self.blocks = chain, streams, chain.blocks

    def enter(self, **inputs: Any) -> tuple[Tree, Tree]:
        """Start the forward pass of a batch. Returns `(h, shared)`, two lists with one value per part. `inputs` are the keyword
        arguments of `chain.enter`. MLX arrays are divided along their first axis. Every part gets all other values.
        """
        parts = len(self.streams)

        def own_samples(n: int, value: Any) -> Any:
            if not isinstance(value, mx.array):
                return value
            return value[value.shape[0] * n // parts : value.shape[0] * (n + 1) // parts]

        found = [self.chain.enter(**tree_map(functools.partial(own_samples, n), inputs)) for n in self._each()]
        return [h for h, _ in found], [shared for _, shared in found]

    def block(self, kind: str) -> BlockFunction:
        """Return the function that computes blocks of this `kind`. It is called as `function(weights, h, shared, linear)`, like
        that of the divided model, and returns a list with the output of each part.
        """
        function = self.chain.block(kind)

        def run(weights: Mapping[str, Any], h: Tree, shared: Tree, linear: Linear) -> Tree:
            return [function(weights, h[n], shared[n], linear) for n in self._each()]

        return run

    def leave(self, h: Tree, shared: Tree) -> Tree:
        """End the forward pass, and return the prediction of the whole batch. `h` and `shared` are lists with one value per
        part. `h` is the output of the last block.
        """
        first, *others = [self.chain.leave(h[n], shared[n]) for n in self._each()]
        return tree_map(lambda *parts: mx.concatenate(parts), first, *others)

    def _each(self) -> Iterator[int]:
        """Yield the index of each part. Until the next index is asked for, operations belong to the stream of this part."""
        for n, stream in enumerate(self.streams):
            with mx.stream(stream):
                yield n
