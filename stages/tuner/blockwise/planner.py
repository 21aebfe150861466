"""An estimate of training's peak memory from shapes alone, before any weight is loaded.

A run that cannot fit thus ends at once. It names the setting that would make it fit. Tests compare the estimate with the
measured peaks of steps, small and at full size. Blocks are traced on arrays that are never computed. What passes through the
Linears of a block determines how much it keeps for its gradient. The constants are measured on FLUX.2's blocks.
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
    """An estimate of the memory that training needs for its largest batch. The comments beside the fields say what each
    field means. Sizes are in bytes. `peak(plan)` returns the peak of the whole run, in bytes. `plan` says how many of
    the last blocks keep their activations until the backward pass.
    """

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
        """Return the estimated peak memory of training in bytes. The peak is in the backward pass, the optimizer step
        or validation, whichever needs the most memory. `plan` says how many of the last blocks keep their activations
        until the backward pass: "whole" for all blocks, a number, or "blocks" for only the last block. The value
        "blocks" is short for "block by block": the backward pass computes the other blocks again, one at a time.
        """
        backward = self._kept_activations(plan) + self.block_work + self.unpacked_work + self.stored_work(plan)
        validation = self.validation and self.validation + self.stored_work("blocks")
        return self.held + int(max(backward, self.optimizer_work, validation))

    def stored_work(self, plan: Plan) -> int:
        """Return the most memory, in bytes, that block weights from the disk take at one time. Weights that stay on
        disk are read before their block is computed, and freed afterwards. If no block weights stay on disk, the result
        is 0. `plan` says how many of the last blocks keep their activations until the backward pass: "whole" for all
        blocks, a number, or "blocks" (short for "block by block") for only the last block.

        Blocks that keep their activations also keep their weights in memory until the backward pass. The result is the
        larger of two cases. In the first case, the weights of all these blocks are in memory. The weights of the block
        before them are in memory too, and on a GPU those of the two blocks before them. In the second case, the weights
        of two successive blocks are in memory, and on a GPU those of three.
        """
        ahead, head = blocks_in_flight(), self.blocks - kept_blocks(plan, self.blocks)
        together = [self.stored[n : n + ahead + 1] for n in range(len(self.stored))]
        return max(sum(self.stored[max(head - ahead, 0) :]), *(sum(each) for each in together), 0)

    def _kept_activations(self, plan: Plan) -> float:
        """Return the largest memory for block inputs, kept activations and gradients together during the backward pass,
        in bytes. Memory for computing the current block is not counted. `plan` says how many of the last blocks of the
        model keep their activations: "whole" for all blocks, a number, or "blocks". The value "blocks" is short for
        "block by block" and means only the last block.
        """
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
        """The number of blocks of the model."""
        return len(self.linear_traffic)

    @property
    def block_work(self) -> float:
        """The bytes in use while the largest block is computed and differentiated. Weights are not counted. The block inputs
        that are kept for the backward pass are not counted either.
        """
        moments = ((linear * traffic + own, rate) for linear, rate in self.work_rates for traffic, own in self._per_block())
        return max(work + rate * self.scores for work, rate in moments)

    @property
    def unpacked_work(self) -> int:
        """The bytes of the unpacked copies of packed (quantised) weights while one block is computed. It is 0 if no
        weight is packed.
        """
        return UNPACKED * self.unpacked

    @property
    def forward_peak(self) -> int:
        """The bytes in use while the largest batch is computed without a gradient. Weights, adapter and optimizer state
        are not counted.
        """
        return int(self.block_input + FORWARD_WORK * (max(self.linear_traffic) + self.scores)) + self.unpacked_work

    @property
    def held(self) -> int:
        """The bytes that stay allocated between steps: weights, adapter and optimizer state."""
        return self.weights + self.optimizer_state + self.adapter


def estimate(
    chain: Chain, inputs: Mapping[str, Any], weights: int, targets: Sequence[Target], optimizer_state: int, **parts: Any
) -> Estimate:
    """Return an `Estimate` of the memory for training an adapter on the largest batch. `chain` is the model, a chain of
    blocks. `inputs` are the model's inputs for this batch, as keyword arguments of `chain.enter`. `weights` is the size
    of the frozen weights in bytes. `optimizer_state` is the size of the optimizer's state in bytes. `targets` lists the
    Linears that have an adapter.

    `parts` sets further fields of the `Estimate` in bytes, such as `scores`, the attention scores of a block. A field
    that is not given is 0. The fields in `parts` are `optimizer_work`, `scores`, `saved_scores`, `unpacked`,
    `validation`, `saved_rate`, `work_rates` and `stored`; comments in `Estimate` explain them. Nothing is computed.
    The arrays in `chain` and `inputs` need not be computed either.
    """
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
    """Return the input x and the output y of each Linear in `block`, as a dict from name to (x, y). Names are relative
    to the block. The arrays have the right shapes but are never computed. `h` is the block's input. `shared` is the
    value that all blocks of `chain` read.
    """
    seen = {}

    def linear(name: str, weight: Any, x: mx.array) -> mx.array:
        seen[name] = x, mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
        return seen[name][1]

    chain.block(block.kind)(block.weights, h, shared, linear)
    return seen


def _saved_per_token(target: Target) -> int:
    """Return how many values per token the adapter of `target` keeps for its gradient. `target` is a Linear with its adapter.
    The input and the output of the Linear are not counted.

    A LoRA keeps `rank` values. A DoRA also keeps one value per output. A LoKr keeps the intermediate products with its
    matrices. A Linear that is trained in full keeps nothing more.
    """
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
    """Return the bytes of all weights together. `shapes` yields (shape, bits) for each weight. bits is 8 or 4 for a packed
    (quantised) weight, and 16 for any other. `itemsize` is the bytes of one unpacked value. A scale or offset of a packed
    weight also takes `itemsize` bytes.
    """
    total = 0
    for shape, bits in shapes:
        count = math.prod(shape)
        total += count * bits // 8 + 2 * itemsize * count // GROUP if _is_packed(shape, bits) else count * itemsize
    return total


def stored_bytes(blocks: Iterable[Any], shapes: Mapping[str, tuple[tuple[int, ...], int]], itemsize: int) -> tuple[int, ...]:
    """Return the size of each block's weight matrices in bytes, as a tuple with one number per block. Weights that are
    not matrices are left out. `blocks` are the blocks of the model. `shapes` maps the full name of a weight to (shape,
    bits). The bits are 8 or 4 for a packed (quantised) weight, and 16 for any other. `itemsize` is the bytes of one
    unpacked value.

    The weight matrices can stay on disk until they are needed.
    """
    matrices = ([shapes[f"{block.name}.{name}"] for name in block.weights] for block in blocks)
    return tuple(weight_bytes((each for each in block if len(each[0]) == 2), itemsize) for block in matrices)


def unpacked_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """Return the bytes of the largest packed (quantised) weight in unpacked form. Return 0 if none is packed. The result is
    at most 256 MiB, because large weights are unpacked in chunks. `shapes` yields (shape, bits) for each weight. bits is 8 or
    4 for a packed weight, and 16 for any other. `itemsize` is the bytes of one unpacked value.
    """
    return max((min(math.prod(shape) * itemsize, CHUNK) for shape, bits in shapes if _is_packed(shape, bits)), default=0)


def _is_packed(shape: tuple[int, ...], bits: int) -> bool:
    return bits < 16 and is_packable(shape)
