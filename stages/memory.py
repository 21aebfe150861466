"""What a stage needs before it runs, from shapes alone: memory and disk, and the settings that would need less memory.

Whatever takes memory says so with `Memory`. `cheapest` finds the first settings that fit, and `refusal` is the line for a
user whose settings do not. The measured constants of all estimates stand here; how many blocks keep their activations while a
model is trained is decided in `stages.tuner.memory`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

Config = TypeVar("Config")
Settings = Mapping[str, Any]  # section -> settings to change; a table inside a section is a mapping again

GB = 1e9

# Measured constants. "Per byte" is per byte of the inputs and outputs of a block's Linears; a pair counts (these, the block's
# attention scores). On a CPU, and on a GPU at full size (data/measurements/bench.jsonl).

# CUDA beside the arrays that MLX counts: one H100, driver 580, MLX 0.32.4, klein 4B, 27 November 2026 (data/docs/bench.md).
CUDA_BYTES = 600_000_000  # context and kernels: what remains once all arrays are freed
CUDA_TRAINING = 400_000_000  # more kernels, graphs, and gaps in the pool, of a training step
# Gaps in the pool that arrays are taken from, since MLX at its limit gives back arrays of one size and takes others: per byte of
# work; in training per byte of one block's working memory.
POOL, POOL_TRAINING = 0.45, 1.1
POOL_INEXACT = 450_000_000  # bytes, when images are encoded with MLX's defaults

PROGRAM_BYTES = 1_000_000_000  # at most, besides arrays: Python, libraries, a tokenizer, work memory of the matrix library
FACTOR = 1.25  # a training step's measured peak is within this factor of the estimate, either way

# Training, block by block.
SAVED = {4: 1.3, 2: 1.4}  # per byte of each array, kept for the gradient, by itemsize: in half precision some of it is float32
FORWARD_WORK = 1.05  # per byte, while a block is computed without a gradient; also per byte of attention scores
# Pairs, in use at moments while a block is differentiated: the moment that needs the most counts.
BLOCK_WORK = ((2.0, 2.5),)
# FLUX.2's blocks on a CPU: while Linears are differentiated, and while attention is. MLX starts operations ahead there, and their
# results wait in memory. Waiting for them made steps on two cores 12 to 37 % longer.
FLUX2_ON_CPU: dict[str, Any] = {"work_rates": ((3.35, 1.2), (2.35, 3.7))}
T5_STEPWISE: dict[str, Any] = {"saved_rate": 0.8, "work_rates": ((2.0, 1.0),)}  # attention keeps its probabilities; CPU
LOSS_WORK = 3  # copies of the similarities of all tokens of a contrastive batch while the loss is differentiated
UNPACKED = 2  # packed weights that exist unpacked at once while a block is computed
# Share of one block's working memory that work started ahead may use beyond the estimate: on a CPU; on a GPU, where more did not
# make steps shorter (one H100: 0.276 s at 0.5, 0.279 s below 0).
AHEAD, AHEAD_ON_GPU = 0.5, 0.1
LAST = 0.25  # share of one block's working memory that the operations started last may add
GROWTH_LIMIT = 0.9  # share of the limit that a micro-batch twice as large must stay below

# Drawing on a GPU. Blocks whose working memory may be in use before MLX waits; the work that it has started comes on top. At 1.5
# a step of FLUX 3 at 512 px waited in each block (one H100: 34 ms, 29 ms from 1.7 on).
DRAWN_AHEAD = 1.7
READ = 0.75  # share of the next block read from disk before a block is computed

# Text encoders. Pairs while a text is encoded by T5, for devices that compute exp step by step, and for all others (CPU).
UNFREED = 1  # on a GPU, layers that are done but whose memory is not free yet, beside those in flight
T5_WORK = ((1.05, 5.0), (2.0, 3.0))

# The autoencoder, which computes strips of rows.
COLUMNS = 9.0  # on a CPU, a convolution copies each 3 x 3 neighbourhood of its input
EXTRA = 4.0  # on a CPU, strips beside these copies: the input, its normalised form, the sum with the bias, and one more
INPUTS = 3.0  # on a GPU, copies of the input strip: with the rows beside it, normalised, padded; of the only one: normalised
OUTPUTS = 2.0  # on a GPU, copies of the output strip: the convolution's result, its sum with another activation
EXACT = 5.5  # on CUDA: bytes of scratch of an exact convolution per byte of input and output strip
WINOGRAD = 64 / 36  # on Metal, if not exact: bytes of scratch per byte of input and output; tiles of 8 x 8 stand for 6 x 6


@dataclass(frozen=True)
class Memory:
    """What a computation takes, in bytes."""

    held: int  # all the time: weights, adapter, the optimizer's state
    work: int  # at most in addition
    live: int | None = None  # MLX starts no further operation while so many are in use; None: no limit
    on_disk: int = 0  # weights that stay on disk; `held` and `work` count those of them that are in memory at once
    pool: int | None = None  # on CUDA, gaps in the pool, and what else comes to `CUDA_BYTES`; None: by `POOL`

    @property
    def peak(self) -> int:
        """Of arrays, as MLX counts them."""
        return self.held + self.work

    @property
    def beside(self) -> int:
        """What the backend takes beside arrays. Not measured on Metal; on a CPU the 15 % that no stage may take cover it: 0."""
        import mlx.core as mx

        if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
            return 0
        return CUDA_BYTES + (round(POOL * self.work) if self.pool is None else self.pool)

    @property
    def footprint(self) -> int:
        """As the machine counts it: arrays, as many as MLX is allowed, and what the backend takes beside them."""
        return (self.live or self.peak) + self.beside if self.beside else self.peak


@dataclass(frozen=True)
class Outlook:
    """What the needs of a stage are forecast from."""

    sections: Mapping[str, Any]  # section of project.toml -> its settings
    family: Any  # the record of the model family, or None
    budget: int  # bytes that the stage may take
    weights: Callable[[str], Path | None] = lambda name: None  # of a component; None: not on this machine
    # Of a table, by its schema, and, if named, these columns of it only; None: it is not built.
    rows: Callable[..., pa.Table | None] = lambda schema, columns=(), among=None: None
    # The folder of the artifacts of a table, by its schema, to which the next run of an earlier stage adds; None: not known.
    files: Callable[..., Path | None] = lambda schema: None

    def changed(self, settings: Settings) -> Outlook:
        sections = {name: changed(self.sections[name], own) for name, own in settings.items()}
        return replace(self, sections={**self.sections, **sections})


@dataclass(frozen=True)
class Forecast:
    """What a stage needs, in bytes."""

    peak: int  # memory as the machine counts it (`Memory.footprint`), or of large arrays; 0: little
    row_bytes: int = 0  # on disk, mean of a row's tensors or files
    rows: int | None = None
    file_bytes: int = 0  # on disk, all other files
    how: str = ""  # for the user: how the stage computes
    plan: str | int | None = None  # the memory plan of training: "whole", "blocks", or how many blocks keep their activations
    find_remedy: Callable[[], Remedy | None] = field(default=lambda: None, compare=False)  # if `peak` does not fit
    arrays: int = 0  # of `peak`, as MLX counts; 0: all of it
    # What the time of a row depends on: (width, height) of the largest image; of a drawing, passes and references too.
    size: tuple[int, ...] | None = None
    at_most: bool = False  # there may be fewer rows


@dataclass(frozen=True)
class Remedy:
    """Settings that need less memory, written as in project.toml: `[train] base_bits = 4; [train.optimizer] kind = "lion"`."""

    settings: Settings
    peak: int  # bytes, estimated

    def __str__(self) -> str:
        return "; ".join(part for section, settings in self.settings.items() for part in _as_toml(section, settings))


def _as_toml(section: str, settings: Settings) -> Iterator[str]:
    own = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if not isinstance(value, Mapping)]
    if own:
        yield f"[{section}] {', '.join(own)}"
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _as_toml(f"{section}.{name}", value)


def changed(config: Config, settings: Settings) -> Config:
    given: Any = config
    values = {name: changed(getattr(given, name), v) if isinstance(v, Mapping) else v for name, v in settings.items()}
    found: Config = replace(given, **values)
    return found


def cheapest(peak: Callable[[Settings], int], limit: int, changes: Iterable[Settings], beside: Settings | None = None) -> Remedy:
    """The first of `changes`, each on top of those before, with which `peak` is at most `limit`; all if none suffice."""
    remedy = Remedy(beside or {}, peak(beside or {}))
    for change in changes:
        if remedy.peak <= limit:
            break
        settings = dict(remedy.settings)
        for section, own in change.items():
            settings[section] = {**settings.get(section, {}), **own}
        remedy = Remedy(settings, peak(settings))
    return remedy


def refusal(who: str, peak: int, limit: int, remedy: Remedy | None, of: str = "of memory") -> str:
    would = f"{remedy} would need {remedy.peak / GB:.3g} GB" if remedy and remedy.settings else "no setting would need less"
    if not remedy or remedy.peak > limit:
        also = ", too much as well" if remedy and remedy.settings else ""
        would += f"{also}; choose a smaller family, or a device with more memory"
    return f"{who} needs about {peak / GB:.3g} GB {of}, more than the {limit / GB:.3g} GB that it may take: {would}"
