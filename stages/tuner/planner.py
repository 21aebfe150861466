"""How much memory training will take, from shapes alone: asked before any weight is loaded, so that a run which cannot fit
ends at once, with the setting that would make it fit. An estimate: tests hold it to what steps took, small and at true size.

The blocks are traced on arrays that are never computed: what passes through their Linears says how much a block keeps for
its gradient. Constants below come from measurements of FLUX.2's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from stages.tuner.backprop import Chain, Plan, Tree, kept_blocks
from stages.tuner.quantize import GROUP

KEPT = 1.65  # bytes that a block keeps for its gradient, per byte into and out of its Linears
VISIT = 2.0  # bytes alive while a block is computed and differentiated, likewise
VISIT_SCORES = 2.5  # the same per byte of a matrix of attention scores, where there is one
FACTOR = 1.25  # the measured peak of a step is within this factor of the estimate, either way


@dataclass(frozen=True)
class Estimate:
    """Bytes of one training run on its largest batch."""

    weights: int
    adapter: int
    state: int  # the optimizer's
    stream: int  # one block's input
    traffic: tuple[int, ...]  # of each block: into and out of its Linears
    update: int = 0  # what the optimizer's step takes beside what lies there
    scores: int = 0  # the largest matrix of attention scores that a block builds; 0 where attention is fused
    kept_scores: int = 0  # what of it stays until the backward pass; 0 where it is built in chunks

    def need(self, plan: Plan) -> int:
        """The most that lies there at once: in the backward pass, or while the optimizer takes its step."""
        blocks = len(self.traffic)
        tail = kept_blocks(plan, blocks)
        head = blocks - tail
        kept = sum(KEPT * traffic + self.kept_scores for traffic in self.traffic[head + 1 :])  # the last one's is its visit's
        # Inputs are let go on the way back, while gradients gather.
        behind = max(head * self.stream + self.adapter * tail // blocks + kept, self.stream + self.adapter)
        return self.held + int(max(behind + self.visit, self.update))

    @property
    def visit(self) -> float:
        """What is alive while one block is computed and differentiated."""
        return VISIT * max(self.traffic) + VISIT_SCORES * self.scores

    @property
    def held(self) -> int:
        """What lies there between steps."""
        return self.weights + self.state + self.adapter

    def with_weights(self, weights: int) -> Estimate:
        """The same run on weights of another size."""
        return replace(self, weights=weights)


def estimate(chain: Chain, inputs: Mapping[str, Any], weights: int, adapter: int, state: int, **more: int) -> Estimate:
    """What training takes on `inputs`, the largest batch. The chain's weights may be arrays that were never computed.

    `more`: an Estimate's `update`, the optimizer's business, and `scores` and `kept_scores`, attention's.
    """
    h, shared = chain.enter(**inputs)
    by_kind = {block.kind: block for block in chain.blocks}
    seen = {kind: _traffic(chain, block, h, shared) for kind, block in by_kind.items()}
    return Estimate(weights, adapter, state, h.nbytes, tuple(seen[block.kind] for block in chain.blocks), **more)


def _traffic(chain: Chain, block: Any, h: Tree, shared: Tree) -> int:
    """Bytes into and out of a block's Linears."""
    seen = 0

    def linear(name: str, weight: Any, x: mx.array) -> mx.array:
        nonlocal seen
        y = mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
        seen += x.nbytes + y.nbytes
        return y

    chain.block(block.kind)(block.weights, h, shared, linear)
    return seen


def weight_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """Bytes of weights of these (shape, bits); `itemsize` is the computing dtype's, in which scales and offsets are kept too."""
    total = 0
    for shape, bits in shapes:
        count = 1
        for axis in shape:
            count *= axis
        packed = bits < 16 and len(shape) == 2 and shape[-1] % GROUP == 0
        total += count * bits // 8 + 2 * itemsize * count // GROUP if packed else count * itemsize
    return total
