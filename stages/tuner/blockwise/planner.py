"""An estimate of training's peak memory from shapes alone, before any weight is loaded.

Blocks are traced on arrays that are never computed: what passes through a block's Linears determines what it keeps. The
constants are measured on FLUX.2's blocks; tests compare the estimate with measured peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import dora, full, lokr
from stages.tuner.adapters.targets import Target
from stages.tuner.blockwise.backprop import Plan, kept_blocks
from stages.tuner.blockwise.chain import Chain, Tree
from stages.tuner.blockwise.device import blocks_in_flight
from stages.tuner.quantize import CHUNK, GROUP, is_packable

# Bytes per byte of a block's Linear inputs and outputs. Measured on a CPU, and on a GPU at full size (data/bench.jsonl).
SAVED = {4: 1.3, 2: 1.5}  # kept for the gradient, by itemsize: in half precision some of it is float32
FORWARD_WORK = 1.05  # in use while a block is computed without a gradient; also per byte of attention scores
# In use at moments while a block is differentiated: pairs (per byte of its Linears, per byte of its attention scores). The moment
# that needs the most counts.
BLOCK_WORK = ((2.0, 2.5),)
UNPACKED = 2  # packed weights that exist unpacked at once while a block is computed
FACTOR = 1.25  # a step's measured peak is within this factor of the estimate, either way


@dataclass(frozen=True)
class Estimate:
    """The memory of training on the largest batch, in bytes."""

    weights: int  # frozen weights
    adapter: int
    optimizer_state: int
    block_input: int  # one block's input
    linear_traffic: tuple[int, ...]  # per block: inputs and outputs of its Linears
    adapter_saved: tuple[int, ...]  # per block: kept by its adapters for their gradient, besides the Linears' inputs and outputs
    itemsize: int = 4  # bytes of one value of an activation
    optimizer_work: int = 0  # in use during the optimizer's step, besides weights, adapter and state
    scores: int = 0  # the largest matrix of attention scores in a block; 0 if attention is fused
    saved_scores: int = 0  # scores kept per block until the backward pass; 0 if they are built in chunks
    unpacked: int = 0  # the largest packed weight of a block in unpacked form, or the largest chunk of it
    validation: int = 0  # in use while held-out images are measured, besides weights, adapter and state
    saved_rate: float | None = None  # kept for the gradient per byte of Linear inputs and outputs; None: `SAVED`
    work_rates: tuple[tuple[float, float], ...] = BLOCK_WORK  # in use while a block is differentiated, see `BLOCK_WORK`
    stored: tuple[int, ...] = ()  # per block: weights that are read from disk when they are needed, besides `weights`

    def peak(self, plan: Plan) -> int:
        """Peak of the backward pass, the optimizer's step or validation, whichever is highest."""
        backward = self._kept_activations(plan) + self.block_work + self.unpacked_work + self.stored_work(plan)
        validation = self.validation and self.validation + self.stored_work("blocks")
        return self.held + int(max(backward, self.optimizer_work, validation))

    def stored_work(self, plan: Plan) -> int:
        """The most that weights read from disk take at once."""
        ahead, head = blocks_in_flight(), self.blocks - kept_blocks(plan, self.blocks)
        together = [self.stored[n : n + ahead + 1] for n in range(len(self.stored))]
        # Blocks that keep their activations keep their weights too: all of them with the blocks in flight before them, or the
        # blocks in flight elsewhere.
        return max(sum(self.stored[max(head - ahead, 0) :]), *(sum(each) for each in together), 0)

    def _kept_activations(self, plan: Plan) -> float:
        """Largest sum of block inputs, kept activations and gradients, without the work of the block being computed."""
        tail = kept_blocks(plan, self.blocks)
        head = self.blocks - tail
        rate = SAVED[self.itemsize] if self.saved_rate is None else self.saved_rate
        saved = [rate * traffic + own for traffic, own in self._per_block()]
        kept = sum(saved[head + 1 :]) + self.saved_scores * (tail - 1)  # block_work includes the block that is computed
        at_tail = head * self.block_input + self.adapter * tail // self.blocks + kept
        at_first_block = self.block_input + self.adapter  # by then the inputs are freed and all gradients exist
        return max(at_tail, at_first_block)

    def _per_block(self) -> Iterable[tuple[int, int]]:
        return zip(self.linear_traffic, self.adapter_saved, strict=True)

    @property
    def blocks(self) -> int:
        return len(self.linear_traffic)

    @property
    def block_work(self) -> float:
        """In use while the largest block is differentiated, without weights and the kept inputs of blocks."""
        moments = ((linear * traffic + own, rate) for linear, rate in self.work_rates for traffic, own in self._per_block())
        return max(work + rate * self.scores for work, rate in moments)

    @property
    def unpacked_work(self) -> int:
        return UNPACKED * self.unpacked

    @property
    def forward_peak(self) -> int:
        """Without a gradient, besides what `held` counts."""
        return int(self.block_input + FORWARD_WORK * (max(self.linear_traffic) + self.scores)) + self.unpacked_work

    @property
    def held(self) -> int:
        return self.weights + self.optimizer_state + self.adapter


def estimate(
    chain: Chain, inputs: Mapping[str, Any], weights: int, targets: Sequence[Target], optimizer_state: int, **parts: Any
) -> Estimate:
    """Traces the largest batch, computing nothing. `parts`: further fields of the Estimate."""
    h, shared = chain.enter(**inputs)
    by_kind = {block.kind: block for block in chain.blocks}
    traced = {kind: _trace_linears(chain, block, h, shared) for kind, block in by_kind.items()}
    saved = {target.name: _saved_per_token(target) for target in targets}
    adapter = sum(4 * math.prod(shape) for target in targets for shape in target.shapes.values())
    traffic, adapter_saved = [], []
    for block in chain.blocks:
        linears = traced[block.kind]
        traffic.append(sum(x.nbytes + y.nbytes for x, y in linears.values()))
        own = (y.nbytes // y.shape[-1] * saved.get(f"{block.name}.{name}", 0) for name, (_, y) in linears.items())
        adapter_saved.append(sum(own))
    return Estimate(weights, adapter, optimizer_state, h.nbytes, tuple(traffic), tuple(adapter_saved), h.dtype.size, **parts)


def _trace_linears(chain: Chain, block: Any, h: Tree, shared: Tree) -> dict[str, tuple[mx.array, mx.array]]:
    # (input, output) by name within the block: right shapes and dtypes, values that are never computed.
    seen = {}

    def linear(name: str, weight: Any, x: mx.array) -> mx.array:
        seen[name] = x, mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
        return seen[name][1]

    chain.block(block.kind)(block.weights, h, shared, linear)
    return seen


def _saved_per_token(target: Target) -> int:
    """Values per token that the adapter keeps for its gradient, besides the Linear's input and output."""
    shapes = target.shapes
    if full.DIFF in shapes:
        return 0
    if lokr.W1 not in shapes:
        return target.rank + (target.outputs if dora.MAGNITUDE in shapes else 0)
    a, b = shapes[lokr.W1]
    if lokr.W2 in shapes:
        c, d = shapes[lokr.W2]
        return int(min(b * c, a * d))
    return int((a + b) * target.rank)


def weight_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """Bytes of all weights from (shape, bits), bits 8 or 4 if packed, else 16. `itemsize`: of one unpacked value."""
    total = 0
    for shape, bits in shapes:
        count = math.prod(shape)
        # A packed weight has a scale and an offset of `itemsize` for each group.
        total += count * bits // 8 + 2 * itemsize * count // GROUP if _is_packed(shape, bits) else count * itemsize
    return total


def stored_bytes(blocks: Iterable[Any], shapes: Mapping[str, tuple[tuple[int, ...], int]], itemsize: int) -> tuple[int, ...]:
    """Per block, the bytes of its matrices, which can stay on disk. `shapes`: name -> (shape, bits)."""
    matrices = ([shapes[f"{block.name}.{name}"] for name in block.weights] for block in blocks)
    return tuple(weight_bytes((each for each in block if len(each[0]) == 2), itemsize) for block in matrices)


def unpacked_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """The largest packed weight in unpacked form, or chunk of it; 0 if none is packed."""
    return max((min(math.prod(shape) * itemsize, CHUNK) for shape, bits in shapes if _is_packed(shape, bits)), default=0)


def _is_packed(shape: tuple[int, ...], bits: int) -> bool:
    return bits < 16 and is_packable(shape)
