"""The memory of training, from shapes alone, and the memory plan: how many of the last blocks keep their activations until
the backward pass, which computes the others again. "whole": all blocks. "blocks": one, because the backward pass begins with
the last block anyway.

`choose_plan` decides, before a weight is loaded: the fastest plan that fits, by [train] `memory` and `micro_batch`. Plans
agree up to rounding, so the plan is no part of the recipe. A resumed run keeps the plan of its checkpoint, to end with the
same bits, unless it no longer fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from stages.memory import (
    AHEAD,
    AHEAD_ON_GPU,
    BLOCK_WORK,
    CUDA_TRAINING,
    FORWARD_WORK,
    GB,
    GROWTH_LIMIT,
    LAST,
    POOL_TRAINING,
    SAVED,
    UNPACKED,
    Forecast,
    Memory,
    Remedy,
    Settings,
    cheapest,
    refusal,
)
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import Target
from stages.tuner.blockwise.backprop import Chain, Plan, Tree, kept_blocks
from stages.tuner.blockwise.device import blocks_in_flight, memory_budget
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.optimizers.step import OptimizerStep, Stacks
from stages.tuner.weights import BITS, GROUP, UNPACKED_CHUNK, is_packable

C = TypeVar("C", bound=TrainingConfig)
Shapes = Mapping[str, tuple[tuple[int, ...], int]]  # name of a weight -> (shape, bits): 8 or 4 if packed, else 16


# Who decides


@dataclass(frozen=True)
class MemoryPlan:
    plan: Plan = "whole"
    live_bytes: int | None = None  # bytes in use from which MLX starts no further operation; None: no limit
    max_tokens: int | None = None  # of a micro-batch; None: no limit
    max_samples: int | None = None  # of a micro-batch; None: no limit
    limit: int = 0  # bytes that arrays may take
    grows: bool = True  # whether micro-batches may grow: not after a shortage of memory


def choose_plan(
    estimator: Estimator[Any], start: Checkpoint | None, say: Callable[[str], None], recorded: bool = False
) -> MemoryPlan:
    """The run's plan, told to the user; ValueError names what fits. `recorded`: `start`'s if it fits, despite [train] memory."""
    # With "auto", the plan of `start` is chosen again if it fits, else the fastest that does.
    estimator = estimator.changed({"train": {"memory": "auto"}}) if recorded else estimator
    state, limit = start.state if start else {}, memory_budget(estimator.config.memory_gb)
    begun = state.get("plan")
    found = require_fit(estimator, limit, begun)
    plan, blocks = found.plan, len(found.blocks.traffic)
    if begun not in (None, plan):
        say(f"the run began with plan {begun} and goes on with plan {plan}: the same gradients up to rounding, not to the bit")
    how = plan if isinstance(plan, str) else f"{plan} (the last {plan} of {blocks} blocks are not computed twice)"
    say(f"plan {how}: estimated peak {found.footprint / GB:.2g} GB of {limit / GB:.3g} GB")
    limit -= found.blocks.memory(plan).beside  # from here on, of arrays
    if estimator.micro_batch != "auto":
        return MemoryPlan(plan, found.memory(limit).live, None, estimator.micro_batch, limit)
    # "auto" starts from the checkpoint's size: the micro-batch decides the last bits.
    return MemoryPlan(plan, limit, state.get("max_tokens") or found.samples * estimator.tokens, None, limit)


def after_shortage(estimator: Estimator[Any], memory: MemoryPlan, granted: int, smaller: bool) -> MemoryPlan | None:
    """The plan after an allocation failed when MLX held `granted` bytes: the same, or the next smaller; None if there is none.

    MLX then waits, and frees its cache, before it asks for more than it was granted.
    """
    found, plan, tokens = estimator.best(memory.limit), memory.plan, memory.max_tokens
    if smaller:
        kept = kept_blocks(plan, len(found.blocks.traffic))
        if estimator.config.memory == "auto" and kept > 1:
            plan = (kept + 1) // 2 if kept > 2 else "blocks"
        elif tokens and tokens > estimator.tokens:
            tokens = max(estimator.tokens, tokens // 2)
        else:
            return None
    found = replace(found, plan=plan)
    # Never below the estimated peak: MLX would wait after every operation.
    live = min(memory.live_bytes or granted, found.memory(memory.limit).live or granted, max(found.peak, granted))
    return replace(memory, plan=plan, max_tokens=tokens, live_bytes=live, grows=False)


def shortage(estimator: Estimator[Any], memory: MemoryPlan, granted: int) -> str:
    """The line for a user whose training found no memory with the smallest plan, although the estimate did fit."""
    found = replace(estimator.best(memory.limit), plan=memory.plan)
    limit = min(granted + found.blocks.memory(found.plan).beside, found.footprint - 1)
    return refusal(f"train: plan {found.plan}", found.footprint, limit, find_remedy(estimator, limit), estimator.of)


@dataclass(frozen=True)
class Candidate:
    samples: int  # of a micro-batch
    plan: Plan
    blocks: Blocks  # with so many samples

    @property
    def peak(self) -> int:
        """Of arrays."""
        return self.blocks.memory(self.plan).peak

    @property
    def footprint(self) -> int:
        return self.blocks.memory(self.plan).footprint

    def memory(self, limit: int) -> Memory:
        return self.blocks.memory(self.plan, limit)


class Estimator(Generic[C]):
    """What training with given settings takes. A pipeline's own says how large its batches are."""

    samples: int  # of the largest batch, in this process
    most: int  # of the largest batch, in all processes, held-out ones included
    tokens: int  # of one sample
    of: str  # which batch, for a refusal: "at 512 x 512 px"

    def __init__(
        self,
        config: C,
        model: Chain,
        shapes: Shapes,
        inside: Iterable[str],
        targets: Sequence[Target],
        optimizer: OptimizerStep,
        stream: bool = False,
    ) -> None:
        """`model`: of arrays that are never computed. `inside`: names of the weights of its blocks."""
        self.config, self.model, self.targets, self.dtype = config, model, targets, getattr(mx, config.precision)
        self.frozen = frozen_weights(model, shapes, inside, self.dtype.size, stream)
        arrays = {target.name + end: mx.zeros(shape) for target in targets for end, shape in target.shapes.items()}
        adapter, start = lora.split_start(arrays)
        self.frozen["weights"] += sum(value.nbytes for value in start.values())
        stacks = Stacks.of(adapter)
        # In bytes: the adapter, the optimizer's state, and its work.
        self.adapter = sum(value.nbytes for value in adapter.values())
        self.state = sum(value.nbytes for value in optimizer.method.init(stacks.arrays).values())
        self.update = optimizer.working_bytes(stacks)

    @property
    def micro_batch(self) -> Any:
        return self.config.micro_batch

    def blocks(self, samples: int) -> Blocks:
        """Of the largest batch, with `samples` computed at once."""
        raise NotImplementedError

    def changed(self, settings: Settings) -> Self:
        raise NotImplementedError

    def cheaper(self) -> Iterator[Settings]:
        """Changes that save memory, each on top of those before: first what costs time, then what costs quality."""
        c = self.config
        if c.memory not in ("auto", "blocks"):
            yield {"train": {"memory": "blocks"}}
        if c.micro_batch != "auto" and min(c.micro_batch or self.most, self.most) > 1:
            yield {"train": {"micro_batch": 1}}
        yield from ({"train": {"base_bits": bits}} for bits in BITS if bits < c.base_bits)
        if c.optimizer.kind == "adamw":  # adamw8bit needs another learning rate than any other optimizer
            yield {"train": {"optimizer": {"kind": "adamw8bit"}}}

    def smaller(self) -> Iterator[Settings]:
        """Further changes, to the data, only if no others suffice."""
        return iter(())

    def best(self, limit: int, begun: Plan | None = None) -> Candidate:
        """Samples at once and plan for the largest batch. May need more than `limit` bytes. `begun`: plan of a resumed run."""
        micro_batch, memory = self.micro_batch, self.config.memory
        samples = min(micro_batch, self.samples) if isinstance(micro_batch, int) else self.samples
        # Micro-batches are halved only until the thriftiest plan fits: the plan then spends what is left.
        if micro_batch == "auto":
            while samples > 1 and self.blocks(samples).memory("blocks").footprint > limit:
                samples = (samples + 1) // 2
        found = self.blocks(samples)
        # What [train] fixes is kept, even if it does not fit. A resumed run keeps its plan, to end with the same bits.
        plan: Plan
        if memory != "auto":
            plan = min(memory, len(found.traffic)) if isinstance(memory, int) else memory
        elif begun and found.memory(begun).footprint <= limit:
            plan = begun
        else:
            # Computing blocks twice costs time, so the fastest plan is the one that keeps most.
            count = len(found.traffic)
            kept = next((n for n in range(count, 0, -1) if found.memory(n).footprint <= limit), 1)
            plan = "blocks" if kept == 1 else "whole" if kept == count else kept
        return Candidate(samples, plan, found)


def require_fit(estimator: Estimator[Any], limit: int, begun: Plan | None = None) -> Candidate:
    """`Estimator.best`. Raises ValueError with settings that would fit if it needs more than `limit` bytes."""
    found = estimator.best(limit, begun)
    if found.footprint > limit:
        remedy = find_remedy(estimator, limit)
        raise ValueError(refusal(f"train: plan {found.plan}", found.footprint, limit, remedy, estimator.of))
    return found


def cheapest_settings(estimator: Estimator[Any], limit: int) -> Remedy:
    """The fewest of `Estimator.cheaper` with which training fits; all of them if they do not suffice."""

    def peak(settings: Settings) -> int:
        return estimator.changed(settings).best(limit).footprint

    remedy = cheapest(peak, limit, estimator.cheaper())
    if remedy.peak > limit:
        return remedy
    # Undo what later changes made unnecessary, the costliest first.
    for name in reversed(remedy.settings.get("train", {})):
        without = {other: value for other, value in remedy.settings["train"].items() if other != name}
        fewer = {"train": without} if without else {}
        if (needed := peak(fewer)) <= limit:
            remedy = Remedy(fewer, needed)
    return remedy


def find_remedy(estimator: Estimator[Any], limit: int) -> Remedy:
    remedy = cheapest_settings(estimator, limit)
    if remedy.peak <= limit:
        return remedy
    return cheapest(lambda s: estimator.changed(s).best(limit).footprint, limit, estimator.smaller(), remedy.settings)


def forecast(estimator: Estimator[Any], budget: int, how: str, files: int = 0) -> Forecast:
    """Of a stage that trains. `how`: bits and sizes, for the user. `files`: bytes on disk besides the checkpoints."""
    c = estimator.config
    limit = min(budget, memory_budget(c.memory_gb)) if c.memory_gb else budget
    found, checkpoints = estimator.best(limit), -(-c.steps // c.checkpoint_every)
    files += checkpoints * estimator.adapter + min(checkpoints, c.keep_states) * estimator.state
    rows = c.steps * c.batch_size * c.accumulate
    how = f"plan {found.plan}{how}"
    return Forecast(found.footprint, 0, rows, files, how, found.plan, lambda: find_remedy(estimator, limit), found.peak)


def adjust_max_tokens(max_tokens: int, used: int, held: int, peak: int, limit: int) -> int:
    """Tokens of the next step's micro-batches, from the last step's: bytes held between steps, peak bytes, tokens used."""
    if peak > limit:
        return max(1, used // 2)
    fits_twice = held + 2 * (peak - held) <= GROWTH_LIMIT * limit
    return 2 * used if fits_twice and max_tokens < 2 * used else max_tokens


# The estimate


@dataclass(frozen=True)
class Blocks:
    """What passes through the blocks of a chain and what they hold, traced from shapes. Bytes."""

    weights: int  # frozen weights in memory
    adapter: int
    optimizer_state: int
    block_input: int  # one block's input
    traffic: tuple[int, ...]  # per block: inputs and outputs of its Linears
    kept: tuple[int, ...]  # per block: of its traffic, each array once, if its gradient needs them
    adapter_saved: tuple[int, ...]  # per block: kept by its adapters for their gradient, besides the Linears' inputs and outputs
    itemsize: int = 4  # bytes of one value of an activation
    optimizer_work: int = 0  # in use during the optimizer's step, besides weights, adapter and state
    scores: int = 0  # the largest matrix of attention scores in a block; 0 if attention is fused
    saved_scores: int = 0  # scores kept per block until the backward pass; 0 if they are built in chunks
    unpacked: int = 0  # the largest packed weight of a block in unpacked form, or the largest chunk of it
    validation: int = 0  # in use while held-out images are measured, besides weights, adapter and state
    saved_rate: float | None = None  # kept for the gradient per byte of `kept`; None: `SAVED`
    work_rates: tuple[tuple[float, float], ...] = BLOCK_WORK  # in use while a block is differentiated, see `BLOCK_WORK`
    stored: tuple[int, ...] = ()  # per block: weights that are read from disk when they are needed, besides `weights`

    def memory(self, plan: Plan, limit: int | None = None) -> Memory:
        """Of training with `plan` within `limit` bytes: the most of the backward pass, the optimizer's step and validation."""
        backward = self._kept_activations(plan) + self.block_work + self.unpacked_work + self.stored_work(plan)
        validation = self.validation and self.validation + self.stored_work("blocks")
        pool = CUDA_TRAINING + round(POOL_TRAINING * self.block_work)
        found = Memory(self.held, int(max(backward, self.optimizer_work, validation)), None, sum(self.stored), pool)
        on_cpu = blocks_in_flight() == 1
        # Unpacked weights are not work ahead: they are freed within a block.
        live = found.peak + round((AHEAD if on_cpu else AHEAD_ON_GPU) * self.block_work) - self.unpacked_work
        if limit is None:
            return replace(found, live=live)
        # Operations already started when the limit is reached still take memory.
        most = limit - round(LAST * self.block_work)
        return replace(found, live=most if plan == "whole" and on_cpu else min(most, live))

    @property
    def held(self) -> int:
        return self.weights + self.optimizer_state + self.adapter

    def stored_work(self, plan: Plan) -> int:
        """The most that weights read from disk take at once."""
        ahead, head = blocks_in_flight(), len(self.traffic) - kept_blocks(plan, len(self.traffic))
        together = [self.stored[n : n + ahead + 1] for n in range(len(self.stored))]
        # Blocks that keep their activations keep their weights too: all of them with the blocks in flight before them, or the
        # blocks in flight elsewhere.
        return max(sum(self.stored[max(head - ahead, 0) :]), *(sum(each) for each in together), 0)

    def _kept_activations(self, plan: Plan) -> float:
        """Largest sum of block inputs, kept activations and gradients, without the work of the block being computed."""
        blocks = len(self.traffic)
        tail = kept_blocks(plan, blocks)
        head = blocks - tail
        rate = SAVED[self.itemsize] if self.saved_rate is None else self.saved_rate
        saved = [rate * kept + own for kept, own in zip(self.kept, self.adapter_saved, strict=True)]
        kept = sum(saved[head + 1 :]) + self.saved_scores * (tail - 1)  # block_work includes the block that is computed
        at_tail = head * self.block_input + self.adapter * tail // blocks + kept
        at_first_block = self.block_input + self.adapter  # by then the inputs are freed and all gradients exist
        return max(at_tail, at_first_block)

    @functools.cached_property
    def block_work(self) -> float:
        """In use while the largest block is differentiated, without weights and the kept inputs of blocks."""
        each = list(zip(self.traffic, self.adapter_saved, strict=True))
        return max(linear * traffic + own + rate * self.scores for linear, rate in self.work_rates for traffic, own in each)

    @property
    def unpacked_work(self) -> int:
        return UNPACKED * self.unpacked

    @property
    def forward_work(self) -> int:
        """Without a gradient, besides what `held` counts."""
        return int(self.block_input + FORWARD_WORK * (max(self.traffic) + self.scores)) + self.unpacked_work


def trace(chain: Chain, inputs: Mapping[str, Any], targets: Sequence[Target] = (), **parts: Any) -> Blocks:
    """Traces a batch through the blocks, computing nothing. `parts`: further fields of the result."""
    h, shared = chain.enter(**inputs)
    leaves = [leaf for _, leaf in tree_flatten(h)]
    by_kind = {block.kind: block for block in chain.blocks}
    traced = {kind: _trace_linears(chain, block, h, shared) for kind, block in by_kind.items()}
    saved = {target.name: lora.kind_of(target.shapes).saved(target.shapes) for target in targets}
    shapes = (shape for target in targets for end, shape in target.shapes.items() if end not in lora.START)
    adapter = sum(4 * math.prod(shape) for shape in shapes)
    traffic, adapter_saved = [], []
    kept: list[int] = []
    trained = {target.name for target in targets}
    for block in chain.blocks:
        linears = traced[block.kind]
        traffic.append(sum(x.nbytes + y.nbytes for x, y in linears.values()))
        # Several Linears may share an input. Before the first trained block there is no gradient.
        each = {id(array): array.nbytes for pair in linears.values() for array in pair}
        reached = any(kept) or any(f"{block.name}.{name}" in trained for name in linears)
        kept.append(sum(each.values()) if reached else 0)
        own = (y.nbytes // y.shape[-1] * saved.get(f"{block.name}.{name}", 0) for name, (_, y) in linears.items())
        adapter_saved.append(sum(own))
    given = {"weights": 0, "optimizer_state": 0} | parts
    return Blocks(
        adapter=adapter,
        block_input=sum(leaf.nbytes for leaf in leaves),
        traffic=tuple(traffic),
        kept=tuple(kept),
        adapter_saved=tuple(adapter_saved),
        itemsize=leaves[0].dtype.size,
        **given,
    )


def _trace_linears(chain: Chain, block: Any, h: Tree, shared: Tree) -> dict[str, tuple[mx.array, mx.array]]:
    # (input, output) by name within the block: right shapes and dtypes, values that are never computed.
    seen = {}

    def linear(name: str, weight: Any, x: mx.array) -> mx.array:
        seen[name] = x, mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
        return seen[name][1]

    chain.block(block.kind)(block.weights, h, shared, linear)
    return seen


def frozen_weights(chain: Chain, shapes: Shapes, inside: Iterable[str], itemsize: int, stream: bool = False) -> dict[str, Any]:
    """The fields of `Blocks` that frozen weights decide. `stream`: the matrices of blocks stay on disk."""
    blocks = ([shapes[f"{block.name}.{name}"] for name in block.weights] for block in chain.blocks) if stream else ()
    stored = tuple(weight_bytes((each for each in block if len(each[0]) == 2), itemsize) for block in blocks)
    packed = (math.prod(shape) * itemsize for shape, bits in map(shapes.__getitem__, inside) if _is_packed(shape, bits))
    unpacked = max((min(size, UNPACKED_CHUNK) for size in packed), default=0)
    return {"weights": weight_bytes(shapes.values(), itemsize) - sum(stored), "stored": stored, "unpacked": unpacked}


def weight_bytes(shapes: Iterable[tuple[tuple[int, ...], int]], itemsize: int) -> int:
    """Bytes of all weights from (shape, bits), bits 8 or 4 if packed, else 16. `itemsize`: of one unpacked value."""
    total = 0
    for shape, bits in shapes:
        count = math.prod(shape)
        # A packed weight has a scale and an offset of `itemsize` for each group.
        total += count * bits // 8 + 2 * itemsize * count // GROUP if _is_packed(shape, bits) else count * itemsize
    return total


def _is_packed(shape: tuple[int, ...], bits: int) -> bool:
    return bits < 16 and is_packable(shape)
