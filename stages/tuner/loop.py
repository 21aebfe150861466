"""The training loop, from the start of a run to its result. A task (task.py) supplies model, data and loss.

When a step ends, in this order:

    1. health.py looks at loss, gradient and adapter; a run that cannot go on ends here, and nothing of the step is written
    2. held-out samples are measured, if that is due
    3. control.py looks for Ctrl-C, the files stop, checkpoint and pause, and the limits on steps and minutes
    4. a checkpoint is written, if one is due (checkpoint_every, the last step, the best measurement yet, the age of the last
       checkpoint) or 3 asks for one: adapter, optimizer, average, rows since the last checkpoint, and last state.json; then
       older ones are thinned out, and after the last step the adapters are copied to the top: the result
    5. the rows are yielded to the runner, whose Writer.append commits them by size or after [project] commit_seconds, and whose
       tracker sends committed ones: stored rows imply that a due checkpoint holds their result; then loss and progress are shown
    6. the run waits while it is paused

A stop changes 4 and 6: the checkpoint of this step is written, and the run ends after its rows. It is also looked for before
the first step and between the micro-batches of a measurement, which the next command repeats.

The samples of a step depend on (seed, step) alone, and a checkpoint holds all other state. So a run that is stopped,
killed or made longer ends with the same bits as an uninterrupted run. With several ranks (ranks.py), rank 0 decides and
writes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.run import Run
from stages.shortage import free_memory, held_bytes, is_shortage
from stages.tuner import checkpoint
from stages.tuner.adapters.targets import adapter_metadata
from stages.tuner.blockwise.device import configure_scheduler
from stages.tuner.checkpoint import OPTIMIZER, ROWS, Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.control import Control
from stages.tuner.health import LossCheck, check_health, checks_update
from stages.tuner.memory import MemoryPlan, after_shortage, choose_plan, shortage
from stages.tuner.ranks import Ranks, connect, merged
from stages.tuner.step import StepResult, TrainingStep, choose_targets, resumed, starting_adapter
from stages.tuner.task import M, Row, S, Task
from stages.tuner.validation import TRAIN, VALIDATION, Validation, measured_steps

T = TypeVar("T")
Key = tuple[int, str, int]  # step, split, sample

SMOOTHED = 50  # steps whose mean is the smoothed loss


def train(run: Run[Any], task: Task[Any, Any], control: Control) -> Iterator[pa.RecordBatch]:
    """Train from the newest usable checkpoint to the last step, publish the adapter, yield the table's rows.

    A request that ends the run early writes a checkpoint first. Raises ValueError if the run cannot continue.
    """
    # In this order: MLX's variables are read, and the ranks connected, before the first MLX array.
    ranks = connect()
    configure_scheduler()
    check_ranks(run, task.config, ranks)
    # The checkpoints lie with rank 0; the others get its decision.
    start = next_start(run, task) if ranks.leads else None
    if ranks.size > 1:
        start = Start.of(ranks.first(start.plain() if start else None))
    return TrainingRun(run, task, control, start, ranks).go() if start else iter(())


def check_ranks(run: Run[Any], config: TrainingConfig, ranks: Ranks) -> None:
    """Raises ValueError, in every rank, if the ranks differ in recipe or cannot divide the batch."""
    config.check_ranks(ranks.size)
    recipes = ranks.each(run.output.provenance.get("recipe", ""))
    other = next((rank for rank, recipe in enumerate(recipes) if recipe != recipes[0]), None)
    if other is not None:
        raise ValueError(
            f"train: rank {other} has other settings, tables or weights than rank 0 (recipes {recipes[other]} and {recipes[0]}); "
            "give every host the same project"
        )


# Where a run goes on


@dataclass(frozen=True)
class Start:
    checkpoint: Checkpoint | None  # None: step 0
    recovered: list[Row]  # rows up to its step that the table lacks, read from checkpoints

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    def plain(self) -> dict[str, Any]:
        saved = self.checkpoint
        return {"recovered": self.recovered, "checkpoint": saved and [saved.step, str(saved.folder), saved.state]}

    @classmethod
    def of(cls, plain: dict[str, Any] | None) -> Start | None:
        if plain is None:
            return None
        saved = plain["checkpoint"]
        return cls(saved and Checkpoint(saved[0], Path(saved[1]), saved[2]), plain["recovered"])


def next_start(run: Run[Any], task: Task[Any, Any]) -> Start | None:
    """Where the run goes on; None: every row is stored and the result is published."""
    artifacts, validation = run.output.artifacts, validation_of(task, run.output.stored)
    for step, problem in sorted(checkpoint.damaged_checkpoints(artifacts).items()):
        run.report.say(f"the checkpoint of step {step} is damaged: {problem}; latentmill verify --repair makes it again")
    last = validation.last_step
    if not run.output.pending.num_rows and checkpoint.is_published(artifacts, last, validation.best_step):
        return None
    start = find_start(run, last, run.report.say)
    # Later folders would be taken for damaged checkpoints once the run passes them.
    checkpoint.delete_incomplete(artifacts, start.step)
    return start


def validation_of(task: Task[Any, Any], stored: pa.Table | None = None) -> Validation:
    held_out = task.held_out
    found = Validation(task.config.validation if held_out else None, held_out.count if held_out else 0, task.config.steps)
    if stored is not None:
        found.add(stored.select(["step", "split", "loss"]).to_pylist())
    return found


def last_step(task: Task[Any, Any], stored: pa.Table) -> int:
    return validation_of(task, stored).last_step


def row_key(row: Row) -> Key:
    return row["step"], row["split"], row["sample"]


def _keys_up_to(step: int, rows: pa.Table) -> set[Key]:
    return {row_key(row) for row in rows.filter(pc.less_equal(rows["step"], step)).to_pylist()}


def computed_rows(run: Run[Any], wanted: pa.Table) -> pa.Table:
    """Of the wanted rows, those that the next run trains or measures; the others are in the table or in a checkpoint."""
    last = pc.max(wanted["step"]).as_py() or 0
    if not run.output.pending.num_rows and checkpoint.published_step(run.output.artifacts) == last:
        return wanted.slice(0, 0)
    start = find_start(run, last, lambda line: None, Checkpoint.whole)
    recovered = {row_key(row) for row in start.recovered}
    lost = _keys_up_to(start.step, run.output.pending) - recovered
    computed = pc.greater(wanted["step"], start.step)
    if lost:  # of the measurement at its step
        repeated = pc.and_(pc.equal(wanted["step"], start.step), pc.equal(wanted["split"], VALIDATION))
        computed = pc.or_(computed, repeated)
    return wanted.filter(computed)


def find_start(run: Run[Any], last: int, say: Callable[[str], None], intact: Callable[..., bool] = Checkpoint.intact) -> Start:
    """The newest intact checkpoint before which no row is lost (in neither the table nor an intact checkpoint); else step 0."""
    checkpoints = [saved for saved in checkpoint.find_checkpoints(run.output.artifacts) if saved.step <= last]
    pending = _keys_up_to(checkpoints[0].step, run.output.pending) if checkpoints else set()
    held: dict[Key, Row] = {}
    # The rows of the checkpoints are needed only after a kill between a checkpoint and the commit of its rows.
    if pending:
        held = {row_key(row): row for saved in checkpoints if intact(saved, ROWS) for row in saved.rows().to_pylist()}
    for saved in checkpoints:
        past = sorted(key for key in pending if key[0] <= saved.step)
        if _usable(saved, last, [key for key in past if key not in held], intact):
            if saved is not checkpoints[0]:
                newest = checkpoints[0]
                if not (newest.folder / OPTIMIZER).exists():
                    why = "has no state any more to go on from (train.keep_states)"
                else:
                    why = "is damaged" if not intact(newest, *newest.state["files"]) else "lacks rows that are lost"
                say(f"the checkpoint of step {newest.step} {why}; the run goes on from step {saved.step}")
            return Start(saved, [held[key] for key in past if key in held])
    if run.output.stored.num_rows:
        say(f"no checkpoint up to step {last} is left to go on from; the run begins again at step 1, with the same result")
    return Start(None, [])


def _usable(saved: Checkpoint, last: int, lost: list[Key], intact: Callable[..., bool]) -> bool:
    # Rows of the measurement at this step may be lost: it is repeated.
    if any((step, split) != (saved.step, VALIDATION) for step, split, _ in lost):
        return False
    needed = set(saved.state["files"])
    # Nothing is left to compute, so no optimizer state is needed. A repeated measurement loads the whole training, and does.
    if saved.step == last and not lost:
        needed.discard(OPTIMIZER)
    return intact(saved, *needed)


def load_training(task: Task[Any, Any], start: Checkpoint | None, memory: MemoryPlan | None = None) -> TrainingStep:
    """Model, adapter and optimizer at `start`. Raises ValueError if the adapter [train] `initial` does not fit."""
    initial = None if start else task.initial_adapter()
    model = task.load_model()
    targets = choose_targets(model.linears(), task.config)
    if start:
        adapter, state = resumed(start.arrays(checkpoint.ADAPTER), start.arrays(OPTIMIZER))
    else:
        adapter, state = starting_adapter(model, targets, task.config, initial), None
    return TrainingStep(model, task.objective, targets, task.config, adapter, state, memory)


class TrainingRun:
    def __init__(self, run: Run[Any], task: Task[Any, Any], control: Control, start: Start, ranks: Ranks | None = None) -> None:
        self.run, self.task, self.control, self.start, self.ranks = run, task, control, start, ranks or Ranks()
        # A run that begins again ignores the stored rows: they are made again with the same values.
        past = [row for row in run.output.stored.to_pylist() if row["step"] <= start.step and start.checkpoint] + start.recovered
        self.past = self.ranks.first(past)
        self.validation = validation_of(task)
        self.validation.add(self.past)
        # The measurement after the start's step may have been interrupted; then it is repeated.
        self.unmeasured = bool(start.checkpoint) and self.validation.discard_incomplete(start.step)
        self.summary = Summary(task.config, self.past)
        self.loss_check = LossCheck(run.report.say, task.expected_loss, self.past)
        self.skipped: int = start.checkpoint.state["skipped"] if start.checkpoint else 0  # steps in a row that were not finite
        self.unsaved: list[Row] = list(start.recovered)  # rows that no lasting checkpoint holds yet
        self.timed = False  # the last checkpoint was written only because of its time
        self.stopped = False  # the last checkpoint was written only because the run ended or paused

    @property
    def finished(self) -> bool:
        """True if the run resumes from its last step: only a measurement or publishing can be left."""
        return self.start.checkpoint is not None and self.start.step >= self.validation.last_step

    def go(self) -> Iterator[pa.RecordBatch]:
        task, control, report = self.task, self.control, self.run.report
        yield from record_batches(task.schema, self.start.recovered)
        if not self.finished or self.unmeasured:
            self.prepare()
            if self.ranks.agreed(control.stop_requested()):
                return
            yield from record_batches(task.schema, self.first_measurement())
            if self.ranks.agreed(control.ending):
                return
        if self.finished:
            assert self.start.checkpoint
            self.publish(self.start.checkpoint)
            return
        training = self.training
        schedule = task.config.learning_rate()
        began = time.perf_counter()
        for step, batches, waited in Loader(task, self.steps, self.ranks):
            lr = schedule.at(step)
            compute = partial(training.step, batches, lr, checks_update(step) and lr > 0)
            result = self.despite_shortage(compute, step - 1, f"step {step}")
            if change := training.adjust_micro_batch(result.largest_tokens):
                report.say(change)
            samples = [sample for batch in batches for sample in batch.samples]
            if self.ranks.size > 1 and task.objective.separable:
                # This rank has read and computed only its share.
                samples, result = [sample for batch in task.draw(step) for sample in batch], self.merged(step, result)
            shared = {"step": step, "lr": lr, "grad_norm": result.grad_norm, "peak_bytes": training.peak}
            clocks = {"seconds": time.perf_counter() - began, "read_seconds": waited, "split": TRAIN}
            rows = sample_rows(task, samples, {"loss": result.losses, **result.terms}, shared | clocks)
            self.unsaved += rows
            self.skipped = 0 if result.finite else self.skipped + 1
            check_health(report.say, task.config, training, step, self.skipped, result)
            self.loss_check.after(step, rows)
            rows += self.measure(shared)
            began = time.perf_counter()
            control.after_step()
            # One exchange for all three: every rank must take the same branch, or they wait for each other forever.
            saves, pauses, ends = self.ranks.first((self.saves_after(step), control.pausing, control.ending))
            if saves:
                self.save(step)
            yield from record_batches(task.schema, rows)
            report.note(self.summary.after(rows, self.validation))
            report.progress(step, self.validation.last_step, "step")
            control.wait_while_paused()
            if (self.ranks.agreed(control.ending) if pauses else ends) or step >= self.validation.last_step:
                return

    def prepare(self) -> None:
        say, ranks, task, begun = self.run.report.say, self.ranks, self.task, self.start.checkpoint
        for line in warnings(task):
            say(line)
        plan = choose_plan(task.estimator(), begun, say)
        # Ranks other than 0 start fresh, and `share_state` gives them the adapter and the optimizer's state.
        self.training = load_training(task, begun if ranks.leads else None, plan)
        self.training.ranks = ranks
        self.training.share_state()
        before = begun.state.get("ranks", 1) if begun else ranks.size
        if before != ranks.size:
            say(f"the run began with {before} ranks and goes on with {ranks.size}: the same samples and gradients up to rounding")
        elif ranks.size > 1:
            say(f"{ranks.size} ranks train together, each on its share of every batch")
        values = sum(value.size for value in self.training.masters.arrays.values())
        each = sorted({target.rank for target in self.training.targets})
        adapter = f"{task.config.variant} of rank {' to '.join(map(str, sorted({each[0], each[-1]})))}"
        steps = self.steps
        stretch = f"steps {steps.start} to {steps[-1]}{self.resumed()}" if steps else "one measurement is left to do"
        say(f"files named stop, checkpoint or pause in {self.run.output.artifacts} control this run")
        say(f"{adapter} on {len(self.training.targets)} Linears: {values / 1e6:.2g} M values; {stretch}")
        say(task.description())

    def resumed(self) -> str:
        """Why the run does not go on after the last step that is stored."""
        start, known = self.start.step, max(self.run.output.stored["step"].to_pylist(), default=0)
        if self.start.checkpoint and self.start.recovered:
            return f": the checkpoint of step {start} holds also what the table lacks"
        known = min(known, self.task.config.steps)  # the run may have been longer
        if known > start:
            again = f"step {known} is" if known == start + 1 else f"steps {start + 1} to {known} are"
            return f": {again} computed again, from the checkpoint of step {start}, with the same result" if start else ""
        return ""

    @property
    def steps(self) -> range:
        return range(self.start.step + 1, self.task.config.steps + 1)

    def merged(self, step: int, result: StepResult) -> StepResult:
        """The losses and terms of all samples of a step, in order."""
        found = self.ranks.each({"loss": result.losses, **result.terms})
        owners = self.ranks.owners(self.task.sizes(step))
        nothing = [[None] * len(each["loss"]) for each in found]
        values: dict[str, list[Any]] = {
            name: merged([each.get(name, nothing[rank]) for rank, each in enumerate(found)], owners)
            for name in dict.fromkeys(name for each in found for name in each)
        }
        return replace(result, losses=values.pop("loss"), terms=values)

    def first_measurement(self) -> list[Row]:
        """Rows of the measurement at step 0, or of the interrupted one of a resumed run."""
        if not self.start.checkpoint:
            return self.measure({"step": 0, "lr": 0.0, "grad_norm": 0.0, "peak_bytes": self.training.peak})
        if not self.unmeasured:
            return []
        trained = next(row for row in self.past if (row["step"], row["split"]) == (self.start.step, TRAIN))
        return self.measure({name: trained[name] for name in ("step", "lr", "grad_norm", "peak_bytes")})

    def measure(self, shared: Row) -> list[Row]:
        """Rows of the held-out samples; none if no measurement is due or a stop interrupts it."""
        held_out, step, ranks = self.task.held_out, shared["step"], self.ranks
        if held_out is None or not self.validation.is_due(step):
            return []
        rows: list[Row] = []
        began, batches = time.perf_counter(), held_out.micro_batches()
        # In rounds of one micro-batch per rank: all ranks stop together, after the same round.
        while coming := list(islice(batches, ranks.size)):
            self.unmeasured = ranks.agreed(self.control.stop_requested())
            if self.unmeasured:
                return []
            # The last round may leave ranks without a batch.
            own: dict[str, list[Any]] = {}
            if ranks.rank < len(coming):
                compute = partial(self.training.measure, coming[ranks.rank])
                own = self.despite_shortage(compute, step, f"the measurement after step {step}")
            for batch, measured in zip(coming, ranks.each(own)[: len(coming)], strict=True):
                clocks = {"seconds": time.perf_counter() - began, "read_seconds": 0.0, "split": VALIDATION}
                rows += sample_rows(self.task, batch.samples, measured, shared | clocks, first=len(rows))
                began = time.perf_counter()
        self.validation.add(rows)
        self.unsaved += rows
        best = ", the best so far" if step == self.validation.best_step else ""
        self.run.report.say(f"step {step}: validation loss {self.validation.means[step]:.4f}{best}")
        return rows

    def despite_shortage(self, compute: Callable[[], T], last: int, what: str) -> T:
        """`compute()`. If an allocation fails: once more with MLX's cache freed, then with each smaller plan of the settings.

        Raises ValueError if all fail, after the checkpoint of `last`, the last finished step.
        """
        tries = 0
        while True:
            try:
                return compute()
            except RuntimeError as error:
                # A rank that repeats a step would wait forever for the others.
                if self.ranks.size > 1 or not is_shortage(error):
                    raise
                granted, reason = held_bytes(), " ".join(str(error).split())
            free_memory()
            tries += 1
            before, estimator = self.training.memory, self.task.estimator()
            after = after_shortage(estimator, before, granted, smaller=tries > 1)
            if after is None:
                self.save_finished(last)
                told = f"{shortage(estimator, before, granted)} ({what}: {reason})"
                raise ValueError(f"{told}. Finished steps are kept: the same command goes on.")
            self.training.memory = after
            how = "once more, with MLX's cache freed"
            if after.plan != before.plan:
                how = f"with plan {after.plan} in place of {before.plan}: the same gradients up to rounding, not to the bit"
            elif after.max_tokens != before.max_tokens:
                how = f"with micro-batches of {after.max_tokens} tokens in place of {before.max_tokens}: the same up to rounding"
            self.run.report.say(f"{what}: not enough memory ({reason}); it is computed {how}")

    def save_finished(self, last: int) -> None:
        """The checkpoint of step `last`, unless there is one or nothing was trained."""
        newest = next(iter(checkpoint.find_checkpoints(self.run.output.artifacts)), None)
        if last <= (newest.step if newest else 0):
            return
        self.timed, self.unmeasured = False, True  # a measurement may have failed: nothing is published
        try:
            self.save(last)
        except RuntimeError as error:
            if not is_shortage(error):
                raise

    def saves_after(self, step: int) -> bool:
        """Sets `stopped` and `timed`; deletes the file `checkpoint`."""
        # Asked in any case, because it deletes the file `checkpoint`.
        asked = self.control.wants_checkpoint()
        due = step % self.task.config.checkpoint_every == 0 or step >= self.validation.last_step
        wanted = asked or due or step == self.validation.best_step
        self.stopped = not wanted and (self.control.ending or self.control.pausing)
        self.timed = not wanted and not self.stopped and self.control.overdue()
        return wanted or self.stopped or self.timed

    def save(self, step: int) -> None:
        # Undoes the drift between chips of different kinds, and gives all ranks the state that a resumed run would have.
        self.training.share_state()
        if self.ranks.leads:
            facts: dict[str, Any] = {"timed": True} if self.timed else {"stopped": True} if self.stopped else {}
            facts |= {"ranks": self.ranks.size} if self.ranks.size > 1 else {}
            rows = rows_table(self.task.schema, self.unsaved)
            saved = save_checkpoint(self.run, self.task, self.training, step, self.skipped, rows, facts)
            self.control.saved()
            if self.timed:
                checkpoint.prune_timed(self.run.output.artifacts, step)
            checkpoint.prune(self.run.output.artifacts, step, self.task.config.keep_states)
            # An interrupted measurement is repeated first: it may change which checkpoint is the best.
            if step >= self.validation.last_step and not self.unmeasured:
                self.publish(saved)
        # A timed checkpoint will be deleted, perhaps before its rows are stored: the next one holds them too.
        if not self.timed:
            self.unsaved = []

    def publish(self, final: Checkpoint) -> None:
        if not self.ranks.leads:
            return
        if self.task.config.validation and final.step < self.task.config.steps:
            patience = self.task.config.validation.patience
            self.run.report.say(
                f"ended after step {final.step}: {patience} measurements in a row were no better ([train.validation] patience)"
            )
        saved = checkpoint.find_checkpoints(self.run.output.artifacts)
        best = next((found for found in saved if found.step == self.validation.best_step), None)
        checkpoint.publish(self.run.output.write, final, best)


def save_checkpoint(
    run: Run[Any],
    task: Task[Any, Any],
    training: TrainingStep,
    step: int,
    skipped: int,
    rows: pa.Table,
    facts: Mapping[str, Any],  # further entries of state.json
    metadata: Mapping[str, str] | None = None,  # of the adapter files; None: that of this run
    write: checkpoint.WriteArtifact | None = None,
) -> Checkpoint:
    own = {**run.output.provenance, **task.metadata, **adapter_metadata(training.targets)}
    state = {"skipped": skipped, "plan": training.memory.plan, "max_tokens": training.memory.max_tokens, **facts}
    adapter, average = training.adapter, training.average
    return checkpoint.save(write or run.output.write, step, adapter, training.resumable, rows, metadata or own, state, average)


class Loader(Generic[S, M]):
    """Iterates over (step, micro-batches in host memory, seconds waited for them); a thread reads the next step meanwhile."""

    def __init__(self, task: Task[S, M], steps: range, ranks: Ranks | None = None) -> None:
        self.task, self.steps = task, steps
        # A loss that compares the samples of a batch needs them all: then every rank reads the whole batch.
        self.ranks = ranks if ranks and ranks.size > 1 and task.objective.separable else None
        self.reader = task.reader()

    def __iter__(self) -> Iterator[tuple[int, list[M], float]]:
        if not self.steps:
            return
        self.prefetch(self.steps.start)
        with ThreadPoolExecutor(1, "loader") as pool:
            coming = pool.submit(self.read, self.steps.start)
            for step in self.steps:
                began = time.perf_counter()
                batches = coming.result()
                waited = time.perf_counter() - began
                if step + 1 in self.steps:
                    coming = pool.submit(self.read, step + 1)
                yield step, batches, waited

    def read(self, step: int) -> list[M]:
        batches = [self.reader.read(step, samples) for samples in self.draw(step)]
        if step + 1 in self.steps:
            self.prefetch(step + 1)
        return batches

    def prefetch(self, step: int) -> None:
        self.reader.prefetch([sample for samples in self.draw(step) for sample in samples])

    def draw(self, step: int) -> list[list[S]]:
        # One list per micro-batch to read.
        batches = self.task.draw(step)
        return self.ranks.share(batches, self.task.sizes(step)) if self.ranks else batches


# The rows of a run: one for each sample of a training step, and one for each held-out sample of a measurement


def wanted_rows(task: Task[Any, Any], last: int) -> pa.Table:
    """The keys (step, split, sample) of all rows of a run that ends at step `last`."""
    sizes = [sum(task.sizes(step)) for step in range(1, last + 1)]
    trained = _keys(TRAIN, range(1, last + 1), sizes)
    if task.config.validation is None or task.held_out is None:
        return trained
    steps = measured_steps(task.config.validation.every, last)
    return pa.concat_tables([trained, _keys(VALIDATION, steps, [task.held_out.count] * len(steps))])


def _keys(split: str, steps: Sequence[int], sizes: Sequence[int]) -> pa.Table:
    counts = np.array(sizes, np.int64)
    step = np.repeat(np.array(steps, np.int32), counts)
    sample = np.arange(len(step)) - np.repeat(counts.cumsum() - counts, counts)
    return pa.table({"step": step, "split": pa.repeat(split, len(step)), "sample": sample.astype(np.int32)})


def sample_rows(
    task: Task[Any, Any], samples: Sequence[Any], values: Mapping[str, Sequence[Any]], shared: Row, first: int = 0
) -> list[Row]:
    """`values`: column -> one value per sample; `shared`: column -> value of all; `sample` counts from `first`."""
    nothing: Row = dict.fromkeys(field.name for field in task.schema if field.nullable)
    return [
        nothing | {"sample": first + n} | task.row(sample) | {name: each[n] for name, each in values.items()} | shared
        for n, sample in enumerate(samples)
    ]


def rows_table(schema: pa.Schema, rows: list[Row]) -> pa.Table:
    names = set(schema.names)
    for row in rows:
        assert set(row) == names, f"columns {sorted(set(row) ^ names)} are missing or unknown"
    return pa.Table.from_pylist(rows, schema=schema)


def record_batches(schema: pa.Schema, rows: list[Row]) -> list[pa.RecordBatch]:
    return rows_table(schema, rows).combine_chunks().to_batches() if rows else []


# Lines for the user


class Summary:
    def __init__(self, config: TrainingConfig, past: Iterable[Row]) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=SMOOTHED)  # the mean loss of each of the last steps
        steps: dict[int, list[float]] = {}
        for row in past:
            if row["split"] == TRAIN:
                steps.setdefault(row["step"], []).append(row["loss"])
        self.losses.extend(_mean(losses) for _, losses in sorted(steps.items()))

    def after(self, rows: Sequence[Row], validation: Validation) -> str:
        """One line, such as "loss 0.6120, held out 0.6400, lr 0.0003, checkpoint in 12 steps, 1.9 GB". Call it once per step."""
        trained = [row for row in rows if row["split"] == TRAIN]
        step, lr, peak = (trained[0][name] for name in ("step", "lr", "peak_bytes"))
        self.losses.append(_mean([row["loss"] for row in trained]))
        parts = [f"loss {_mean([loss for loss in self.losses if math.isfinite(loss)]):.4f}"]
        means = validation.means
        if means:
            best = validation.best_step
            lowest = f" (best {means[best]:.4f} at {best})" if best is not None and best != max(means) else ""
            parts.append(f"held out {means[max(means)]:.4f}{lowest}")
        every = self.config.checkpoint_every
        left = min(every - step % every, validation.last_step - step)
        parts.append(f"lr {lr:.2g}")
        if left > 0:
            parts.append(f"checkpoint in {left} step{'s' if left > 1 else ''}")
        return ", ".join([*parts, f"{peak / 1e9:.3g} GB"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def warnings(task: Task[Any, Any]) -> Iterator[str]:
    yield from task.warnings()
    if task.config.precision == "bfloat16" and mx.default_device() == mx.cpu:
        yield 'bfloat16 is slow on a CPU; [train] precision = "float32" is faster'
    yield from schedule_warnings(task.config)


def schedule_warnings(config: TrainingConfig) -> Iterator[str]:
    s, end = config.schedule, config.schedule.warmup_steps + config.schedule.decay_steps
    if config.steps <= s.warmup_steps:
        yield (
            f"all {config.steps} steps are warm-up, below the full rate: lower [train.schedule] warmup_steps ({s.warmup_steps})"
        )
    elif s.shape != "constant" and end < config.steps and not s.floor:
        yield f"from step {end} on the rate is 0 and nothing is trained: raise [train.schedule] decay_steps ({s.decay_steps})"
    elif s.shape != "constant" and end > config.steps:
        yield f"the rate reaches its floor at step {end}, after the last: lower [train.schedule] decay_steps ({s.decay_steps})"
