"""A training task without images: pairs of token ids, an encoder of three blocks, and a contrastive loss over a whole batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np
import pyarrow as pa

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.memory import Settings, changed
from stages.run import Output, Report, Run
from stages.tuner import draws, loop
from stages.tuner.config import ScheduleConfig, TrainingConfig, ValidationConfig
from stages.tuner.control import Control
from stages.tuner.loop import Key, row_key, wanted_rows
from stages.tuner.memory import Blocks, Estimator, trace
from stages.tuner.order import Order
from stages.tuner.step import build_optimizer, choose_targets
from stages.tuner.task import Term
from tests.harness import writer_into

WORDS, WIDTH, LENGTH, BLOCKS, PAIRS = 50, 16, 5, 3, 14
HELD = (12, 13)  # pairs that are only measured
CONFIG = TrainingConfig(
    steps=7,
    batch_size=4,
    accumulate=2,
    rank=2,
    lr=1e-2,
    precision="float32",
    checkpoint_every=3,
    schedule=ScheduleConfig(warmup_steps=2),
    validation=ValidationConfig(every=2),
)
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("pair", pa.int32(), nullable=False),
        *(pa.field(name, pa.float32(), nullable=False) for name in ("loss", "grad_norm", "seconds", "read_seconds")),
        pa.field("lr", pa.float64(), nullable=False),
        pa.field("peak_bytes", pa.int64(), nullable=False),
        pa.field("remark", pa.string(), nullable=True),
    ]
)
A_MINUTE_A_READING = functools.partial(next, itertools.count(0.0, 60.0))  # a clock; a step takes a few readings


@dataclass(frozen=True)
class Block:
    name: str
    weights: dict[str, Any]
    kind: str = "dense"


class Encoder:
    """Token ids to unit vectors: an embedding, dense blocks, the mean."""

    def __init__(self) -> None:
        def random(*shape: int) -> mx.array:
            return mx.array(draws.normal(shape, 0, "encoder", *shape) / np.float32(shape[-1] ** 0.5))

        self.embedding = random(WORDS, WIDTH)
        self.blocks = [Block(f"block.{n}", {"dense.weight": random(WIDTH, WIDTH)}) for n in range(BLOCKS)]
        self.dtype = mx.float32

    def linears(self) -> dict[str, tuple[int, int]]:
        return {f"{block.name}.dense": (WIDTH, WIDTH) for block in self.blocks}

    def enter(self, ids_RN: mx.array) -> tuple[mx.array, dict[str, Any]]:
        return self.embedding[ids_RN], {}

    def block(self, kind: str) -> Callable[..., mx.array]:
        return lambda weights, h, shared, linear: h + mx.tanh(linear("dense", weights["dense.weight"], h))

    def leave(self, h_RND: mx.array, shared: Any) -> mx.array:
        mean_RD = h_RND.mean(axis=1)
        return mean_RD / mx.linalg.norm(mean_RD, axis=-1, keepdims=True)


@dataclass
class Pairs:
    """Pairs of token ids in host memory: int32."""

    samples: list[int]
    query_BN: np.ndarray  # noqa: N815
    document_BN: np.ndarray  # noqa: N815

    @property
    def tokens(self) -> int:
        return 2 * LENGTH

    def select(self, start: int, stop: int) -> Pairs:
        return replace(self, **{name: value[start:stop] for name, value in vars(self).items()})


def contrastive(vectors_RD: mx.array, sharpness: mx.array) -> mx.array:
    """InfoNCE: every query against the documents of all queries of the batch."""
    query_BD, document_BD = mx.split(vectors_RD, 2)
    scores_BB = sharpness * (query_BD @ document_BD.T)
    return mx.logsumexp(scores_BB, axis=1) - mx.diag(scores_BB)


@dataclass(frozen=True)
class Contrast:
    separable: bool = False

    def terms(self, model: Encoder, batch: Pairs) -> Iterator[Term]:
        yield self.validation_term(model, batch)

    def validation_term(self, model: Encoder, batch: Pairs) -> Term:
        ids_RN = mx.array(np.concatenate([batch.query_BN, batch.document_BN]))
        return Term({"ids_RN": ids_RN}, functools.partial(contrastive, sharpness=mx.array(5.0)))


class ToyReader:
    """Reads pairs from memory; remembers what was announced."""

    def __init__(self) -> None:
        self.announced: set[int] = set()

    def prefetch(self, samples: Iterable[int]) -> None:
        self.announced = set(samples)

    def read(self, step: int, samples: list[int]) -> Pairs:
        assert self.announced.issuperset(samples), "a step is announced before it is read"
        return read_pairs(samples)


def read_pairs(samples: list[int]) -> Pairs:
    ids = [[draws.generator(0, side, n).integers(0, WORDS, LENGTH, np.int32) for n in samples] for side in ("query", "document")]
    return Pairs(samples, *(np.stack(each) for each in ids))


class HeldOutPairs:
    count = len(HELD)

    def micro_batches(self) -> Iterator[Pairs]:
        yield read_pairs(list(HELD))


class ToyEstimator(Estimator[TrainingConfig]):
    tokens, of = 2 * LENGTH, "of a toy"

    def __init__(self, config: TrainingConfig) -> None:
        self.samples = self.most = config.batch_size
        model = Encoder()
        super().__init__(config, model, {}, (), choose_targets(model.linears(), config), build_optimizer(config))

    def blocks(self, samples: int) -> Blocks:
        inputs = {"ids_RN": mx.zeros((2 * samples, LENGTH), mx.int32)}
        return trace(self.model, inputs, self.targets, **self.frozen | {"weights": 4000}, optimizer_state=4000)

    def changed(self, settings: Settings) -> ToyEstimator:
        return ToyEstimator(changed(self.config, settings.get("train", {})))


class ToyTask:
    """See `stages.tuner.task.Task`."""

    def __init__(self, config: TrainingConfig, say: Callable[[str], None] = lambda line: None) -> None:
        self.config, self.say = config, say
        self.objective = Contrast()
        self.held_out = HeldOutPairs() if config.validation else None
        self.schema = SCHEMA
        self.metadata = {"made_by": "toy"}
        self.expected_loss = None
        self.order = Order([LENGTH] * (PAIRS - len(HELD)), config.batch_size, config.seed, config.accumulate)

    def sizes(self, step: int) -> list[int]:
        return [len(batch.rows) for batch in self.order.step(step)]

    def draw(self, step: int) -> list[list[int]]:
        return [list(batch.rows) for batch in self.order.step(step)]

    def reader(self) -> ToyReader:
        return ToyReader()

    def row(self, sample: int) -> dict[str, Any]:
        return {"pair": sample}

    def warnings(self) -> Iterator[str]:
        yield "toys are for tests"

    def description(self) -> str:
        return f"{PAIRS - len(HELD)} pairs"

    def estimator(self) -> ToyEstimator:
        return ToyEstimator(self.config)

    def initial_adapter(self) -> None:
        return None

    def load_model(self) -> Encoder:
        return Encoder()


@dataclass
class StoredRun:
    """A run of training in a folder, with the rows that a runner would have stored."""

    folder: Path
    stored: dict[Key, dict[str, Any]] = dataclasses.field(default_factory=dict, kw_only=True)
    said: list[str] = dataclasses.field(default_factory=list, kw_only=True)
    compared: ClassVar[Sequence[str]]  # columns in which equal runs agree
    artifacts: ClassVar[str] = "artifacts"  # in the folder

    def begin(self, stop: Callable[[], bool], **clocks: Any) -> Any:
        """The generator of the run's rows."""
        raise NotImplementedError

    def go(
        self,
        *,
        stop_at: int | None = None,
        kill_at: int | None = None,
        lose: int = 0,
        after: Callable[[int], None] = lambda step: None,
        **clocks: Any,
    ) -> Self:
        """Run to the end, to an interrupt, or to a kill that loses the last rows that were yielded.

        `after(step)` is called once the rows of a step have arrived; `clocks` are the Control's clock and sleep.
        """
        yielded: list[dict[str, Any]] = []
        running = self.begin(lambda: bool(yielded) and stop_at is not None and yielded[-1]["step"] >= stop_at - 1, **clocks)
        for batch in running:
            yielded += batch.to_pylist()
            after(yielded[-1]["step"])
            if kill_at is not None and yielded[-1]["step"] >= kill_at:
                running.close()
                break
        self.stored |= {row_key(row): row for row in yielded[: len(yielded) - lose]}
        return self

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{name: row[name] for name in self.compared} for _, row in sorted(self.stored.items())]

    @property
    def adapter(self) -> bytes:
        return (self.folder / self.artifacts / "adapter.safetensors").read_bytes()


@dataclass
class ToyRun(StoredRun):
    """A run of the toy task, whose folder is that of its artifacts."""

    config: TrainingConfig = CONFIG
    reasons: list[str] = dataclasses.field(default_factory=list)
    compared = ("step", "split", "sample", "pair", "loss", "lr", "grad_norm", "remark")
    artifacts = ""

    def context(self, task: ToyTask, stop: Callable[[], bool] = lambda: False) -> Run[Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([self.stored[key] for key in sorted(self.stored)], schema=SCHEMA)
        wanted = wanted_rows(task, loop.last_step(task, table))
        pending = wanted.filter(pa.array([row_key(row) not in self.stored for row in wanted.to_pylist()], pa.bool_()))
        output = Output(self.folder, table, pending, writer_into(self.folder), {"recipe": "toy"})
        inputs: Any = None
        return Run(self.config, inputs, output, {}, Report(self.said.append, stop=stop, pause=self.reasons.append))

    def begin(self, stop: Callable[[], bool], **clocks: Any) -> Any:
        task = ToyTask(self.config, self.said.append)
        run = self.context(task, stop)
        return loop.train(run, task, Control(run, self.config, **clocks))
