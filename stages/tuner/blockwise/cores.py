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
    """The CPU cores that this process may use. `streams` has one MLX stream per core. An MLX stream is a queue of
    operations that are computed one after another. Operations of different streams are computed side by side. `parts`
    is the number of streams in use. The method `share` changes `parts`.

    If two Python threads use one entry of `streams`, each of the two threads gets a queue of its own.
    """

    streams: Sequence[mx.ThreadLocalStream]
    parts: int = 1

    def share(self, parts: int) -> Sequence[mx.ThreadLocalStream]:
        """Return the first `parts` of the streams, for computing a batch in `parts` parts side by side. The call also
        sets the number of threads that one matrix product uses: the number of cores divided by `parts`, rounded down,
        at least 1. For example, with 8 cores and 4 parts, each product uses 2 threads.

        If `parts` changes, the call waits for running operations. The rounding of a product depends on its number of
        threads.
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
    """A model that computes the parts of a batch side by side on several CPU cores. `chain` is the undivided model, a
    sequence of blocks. `streams` are MLX streams, queues of operations that run side by side. The samples of each batch
    are divided into one part per stream. A `DividedChain` has the same methods as `chain`, but `h` (the input or output
    of a block) and `shared` (a value that all blocks read) are lists with one value per part. The prediction is that of
    the whole batch.
    """

    def __init__(self, chain: Chain, streams: Sequence[mx.ThreadLocalStream]) -> None:
        self.chain, self.streams, self.blocks = chain, streams, chain.blocks

    def enter(self, **inputs: Any) -> tuple[Tree, Tree]:
        """Start the forward pass of a batch. The call takes the inputs of the model as keyword arguments (`**inputs`).
        The batch is divided into parts, one for each stream in `streams`. Each MLX array has one row per sample, and
        every part gets some of the rows. Any other input is given to every part. Returns `(h, shared)`, two lists with
        one value per part. A value in `h` is the input of the first block. A value in `shared` is read by all blocks.
        """
        parts = len(self.streams)

        def own_samples(n: int, value: Any) -> Any:
            if not isinstance(value, mx.array):
                return value
            return value[value.shape[0] * n // parts : value.shape[0] * (n + 1) // parts]

        found = [self.chain.enter(**tree_map(functools.partial(own_samples, n), inputs)) for n in self._each()]
        return [h for h, _ in found], [shared for _, shared in found]

    def block(self, kind: str) -> BlockFunction:
        """Return a function that computes a block for every part of a batch. The samples of the batch are divided into
        parts, and each part is computed on its own stream (a queue of operations). `kind` is the kind of the block. The
        function is called as `function(weights, h, shared, linear)`. It returns a list with the block's output for each
        part.

        `weights` maps names to the block's weights. `h` and `shared` are lists with one value per part. `h[0]` is the
        block's input for the first part. `shared[0]` is the value that all blocks read for the first part.
        `linear(name, weight, x)` computes a Linear with its adapter.
        """
        function = self.chain.block(kind)

        def run(weights: Mapping[str, Any], h: Tree, shared: Tree, linear: Linear) -> Tree:
            return [function(weights, h[n], shared[n], linear) for n in self._each()]

        return run

    def leave(self, h: Tree, shared: Tree) -> Tree:
        """End the forward pass, and return the prediction of the whole batch. The samples of the batch are divided into
        parts, which are computed side by side on several CPU cores. `h` and `shared` are lists with one value per part.
        `h[0]` is the output of the last block for the first part. `shared[0]` is the value that all blocks read for the
        first part, such as position embeddings. The predictions of the parts are joined along the first axis.
        """
        first, *others = [self.chain.leave(h[n], shared[n]) for n in self._each()]
        return tree_map(lambda *parts: mx.concatenate(parts), first, *others)

    def _each(self) -> Iterator[int]:
        """Yield the index of each part of a batch: 0, 1 and so on. The samples of a batch are divided into one part per
        stream, a queue of operations of MLX. While the caller handles the index `n`, `streams[n]` is MLX's default
        stream. So the operations that the caller makes for part `n` join the queue `streams[n]`.

        The default stream changes when the caller asks for the next index. After the last index, it is again the stream
        that was the default before.
        """
        for n, stream in enumerate(self.streams):
            with mx.stream(stream):
                yield n
