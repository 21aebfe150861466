"""How much memory training will take, from shapes alone: asked before any weight is loaded, so that a run which cannot fit
ends at once, with the setting that would make it fit. An estimate: tests hold it to what steps took, small and at true size.

The blocks are traced on arrays that are never computed: what passes through their Linears says how much a block keeps for
its gradient. Constants below come from measurements of FLUX.2's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import dora, lokr, lora
from stages.tuner.blockwise.backprop import Chain, Plan, Tree, kept_blocks
from stages.tuner.blockwise.quantize import CHUNK, GROUP

# Bytes that a block keeps for its gradient, per byte into and out of its Linears, by bytes of a value: in half precision some
# of what is kept is float32. From what steps took on a CPU, and on a GPU at true size (data/bench.jsonl).
KEPT = {4: 1.3, 2: 1.65}
VISIT = 2.0  # bytes alive while a block is computed and differentiated, likewise
VISIT_SCORES = 2.5  # the same per byte of a matrix of attention scores, where there is one
UNPACKED = 2  # packed weights that stand unpacked at once while a block is computed
PASS = 1.05  # bytes alive while a block is computed without a gradient, per byte into and out of its Linears and of scores
FACTOR = 1.25  # the measured peak of a step is within this factor of the estimate, either way


@dataclass(frozen=True)
class Estimate:
    """Bytes of one training run on its largest batch."""

    weights: int
    adapter: int
    state: int  # the optimizer's
    stream: int  # one block's input
    traffic: tuple[int, ...]  # of each block: into and out of its Linears
    beside: tuple[int, ...]  # of each block: what its adapters keep for their gradient besides
    value: int = 4  # bytes of one value of these
    update: int = 0  # what the optimizer's step takes beside what lies there
    scores: int = 0  # the largest matrix of attention scores that a block builds; 0 where attention is fused
    kept_scores: int = 0  # what of it stays until the backward pass; 0 where it is built in chunks
    unpacked: int = 0  # the largest packed weight of a block, or chunk of one, when it is unpacked
    measuring: int = 0  # what a measurement on held-out images takes beside what lies there

    def need(self, plan: Plan) -> int:
        """The most that lies there at once: in the backward pass, while the optimizer takes its step, or in a measurement."""
        blocks = len(self.traffic)
        tail = kept_blocks(plan, blocks)
        head = blocks - tail
        own = [KEPT[self.value] * traffic + beside for traffic, beside in zip(self.traffic, self.beside, strict=True)]
        kept = sum(own[head + 1 :]) + self.kept_scores * (tail - 1)  # the last one's is its visit's
        # Inputs are let go on the way back, while gradients gather.
        behind = max(head * self.stream + self.adapter * tail // blocks + kept, self.stream + self.adapter)
        return self.held + int(max(behind + self.visit + self.unpacking, self.update, self.measuring))

    @property
    def visit(self) -> float:
        """What is alive while one block is computed and differentiated, but for its weights."""
        own = [VISIT * traffic + beside for traffic, beside in zip(self.traffic, self.beside, strict=True)]
        return max(own) + VISIT_SCORES * self.scores

    @property
    def unpacking(self) -> int:
        """What stands unpacked of packed weights while one block is computed."""
        return UNPACKED * self.unpacked

    @property
    def passing(self) -> int:
        """What is alive while the batch goes forward, and nothing is learnt from it."""
        return int(self.stream + PASS * (max(self.traffic) + self.scores)) + self.unpacking

    @property
    def held(self) -> int:
        """What lies there between steps."""
        return self.weights + self.state + self.adapter


def estimate(
    chain: Chain, inputs: Mapping[str, Any], weights: int, targets: Sequence[lora.Target], state: int, **more: int
) -> Estimate:
    """What training `targets` takes on `inputs`, the largest batch. The chain's weights may be arrays that were never computed.

    `more`: an Estimate's `update`, the optimizer's business; `scores` and `kept_scores`, attention's; `unpacked`, `measuring`.
    """
    h, shared = chain.enter(**inputs)
    by_kind = {block.kind: block for block in chain.blocks}
    passed = {kind: _passed(chain, block, h, shared) for kind, block in by_kind.items()}
    kept = {target.name: _kept(target) for target in targets}
    adapter = sum(4 * math.prod(shape) for target in targets for shape in target.shapes.values())
    traffic, beside = [], []
    for block in chain.blocks:
        seen = passed[block.kind]
        traffic.append(sum(x.nbytes + y.nbytes for x, y in seen.values()))
        beside.append(sum(y.nbytes // y.shape[-1] * kept.get(f"{block.name}.{name}", 0) for name, (_, y) in seen.items()))
    return Estimate(weights, adapter, state, h.nbytes, tuple(traffic), tuple(beside), h.dtype.size, **more)


def _passed(chain: Chain, block: Any, h: Tree, shared: Tree) -> dict[str, tuple[mx.array, mx.array]]:
    """What goes into and out of a block's Linears, by their names within it."""
    seen = {}

    def linear(name: str, weight: Any, x: mx.array) -> mx.array:
        seen[name] = x, mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
        return seen[name][1]

    chain.block(block.kind)(block.weights, h, shared, linear)
    return seen


def _kept(target: lora.Target) -> int:
    """Values per token that an adapter keeps for its gradient beside what goes into and out of its Linear.

    A low-rank pair keeps what lies between the two; DoRA also the outputs before they are stretched, for its magnitude;
    LoKr what lies between its factors.
    """
    shapes = target.shapes
    if lokr.W1 not in shapes:
        return target.rank + (target.outputs if dora.MAGNITUDE in shapes else 0)
    a, b = shapes[lokr.W1]
    if lokr.W2 in shapes:
        c, d = shapes[lokr.W2]
        return int(min(b * c, a * d))
    return int((a + b) * target.rank)


def weight_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """Bytes of weights of these (shape, bits); `itemsize` is the computing dtype's, in which scales and offsets are kept too."""
    total = 0
    for shape, bits in shapes:
        count = math.prod(shape)
        total += count * bits // 8 + 2 * itemsize * count // GROUP if _packed(shape, bits) else count * itemsize
    return total


def unpacked_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """Bytes of the largest of these (shape, bits) when it is unpacked, or of as much of it as is unpacked at once."""
    return max((min(math.prod(shape) * itemsize, CHUNK) for shape, bits in shapes if _packed(shape, bits)), default=0)


def _packed(shape: tuple[int, ...], bits: int) -> bool:
    return bits < 16 and len(shape) == 2 and shape[-1] % GROUP == 0
