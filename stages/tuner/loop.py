"""The training loop: the order of steps, measurements and checkpoints. A task (task.py) supplies model, data and loss.

The samples of a step depend on (seed, step) alone, and a checkpoint holds all other state. So a run that is stopped,
killed or made longer ends with the same bits as an uninterrupted run. With several ranks (ranks.py), rank 0 decides and
writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pyarrow as pa

from stages.run import Run
from stages.tuner import checkpoint
from stages.tuner.adapters.targets import adapter_metadata
from stages.tuner.blockwise.device import configure_scheduler
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.control import Control
from stages.tuner.health import check_health, checks_update
from stages.tuner.loader import Loader
from stages.tuner.log import Summary, announce, warn
from stages.tuner.loss_check import LossCheck
from stages.tuner.memory import MemoryPlan, adjust_max_tokens, choose_plan
from stages.tuner.parallel import announce_ranks, check_ranks, measure_together, merge_results, same_state, step_samples
from stages.tuner.ranks import Ranks, connect
from stages.tuner.resume import Start, find_start
from stages.tuner.rows import record_batches, rows_table, sample_rows
from stages.tuner.step import StepResult, TrainingStep, choose_targets, starting_adapter
from stages.tuner.task import MicroBatch, Row, Task
from stages.tuner.validation import TRAIN, VALIDATION, Validation


def train(run: Run[Any], task: Task[Any, Any], control: Control) -> Iterator[pa.RecordBatch]:
    """Train from the newest usable checkpoint to the last step, publish the adapter, and yield the rows of the run's
    table.

    A request that ends the run early writes a checkpoint first. Raises ValueError if the run cannot continue.
    """
    ranks = connect()
    check_ranks(run, task.config, ranks)
    # The checkpoints lie with rank 0; the others get its decision.
    start = ranks.first(next_start(run, task) if ranks.leads else None)
    return TrainingRun(run, task, control, start, ranks).go() if start else iter(())


def next_start(run: Run[Any], task: Task[Any, Any]) -> Start | None:
    """Where the run goes on; None: every row is stored and the result is published."""
    validation = validation_of(task)
    validation.add_table(run.output.stored)
    last = validation.last_step
    for step, problem in sorted(checkpoint.damaged_checkpoints(run.output.artifacts).items()):
        run.report.say(f"the checkpoint of step {step} is damaged: {problem}; latentmill verify --repair makes it again")
    if not run.output.pending.num_rows and checkpoint.is_published(run.output.artifacts, last, validation.best_step):
        return None
    start = find_start(run, last)
    # Later folders would be taken for damaged checkpoints once the run passes them.
    checkpoint.delete_incomplete(run.output.artifacts, start.step)
    return start


def last_step(task: Task[Any, Any], stored: pa.Table) -> int:
    """The last step of a run: [train] `steps`, or an earlier one at which early stopping ended it."""
    validation = validation_of(task)
    validation.add_table(stored)
    return validation.last_step


def validation_of(task: Task[Any, Any]) -> Validation:
    held_out = task.held_out
    return Validation(task.config.validation if held_out else None, held_out.count if held_out else 0, task.config.steps)


def load_training(task: Task[Any, Any], start: Checkpoint | None, memory: MemoryPlan | None = None) -> TrainingStep:
    """Model, adapter and optimizer at `start`. Raises ValueError if the adapter [train] `initial` does not fit."""
    initial = None if start else task.initial_adapter()
    model = task.load_model()
    targets = choose_targets(model.linears(), task.config)
    adapter = start.arrays(checkpoint.ADAPTER) if start else starting_adapter(model, targets, task.config, initial)
    state = start.arrays(checkpoint.OPTIMIZER) if start else None
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
        self.unsaved: list[Row] = []  # rows that no checkpoint holds yet
        self.timed = False  # the last checkpoint was written only because of its time
        self.earlier_peak = 0  # bytes: the peak before MLX's own count was last reset

    @property
    def finished(self) -> bool:
        """True if the run resumes from its last step: only a measurement or publishing can be left."""
        return self.start.checkpoint is not None and self.start.step >= self.validation.last_step

    def go(self) -> Iterator[pa.RecordBatch]:
        yield from record_batches(self.task.schema, self.start.recovered)
        if not self.finished or self.unmeasured:
            self.prepare()
            if self.ranks.agreed(self.control.stop_requested()):
                return
            yield from record_batches(self.task.schema, self.first_measurement())
            if self.ranks.agreed(self.control.ending):
                return
        if self.finished:
            assert self.start.checkpoint
            self.publish(self.start.checkpoint)
            return
        schedule = self.task.config.learning_rate()
        began = time.perf_counter()
        for step, batches, waited in Loader(self.task, self.steps, self.ranks):
            lr = schedule.at(step)
            result = self.compute(batches, lr, ratio=checks_update(step) and lr > 0)
            result = merge_results(result, self.task, step, self.ranks)
            seconds = time.perf_counter() - began
            shared = {"step": step, "lr": lr, "grad_norm": result.grad_norm, "peak_bytes": self.peak}
            samples = step_samples(self.task, step, batches, self.ranks)
            rows = self.step_rows(samples, result, shared | {"seconds": seconds, "read_seconds": waited})
            self.skipped = 0 if result.finite else self.skipped + 1
            check_health(self.run.report.say, self.task.config, self.training, step, self.skipped, result)
            self.loss_check.after(step, rows)
            rows += self.measure(shared)
            began = time.perf_counter()
            self.control.after_step()
            # One exchange for all three: every rank must take the same branch, or they wait for each other forever.
            saves, pauses, ends = self.ranks.first((self.saves_after(step), self.control.pausing, self.control.ending))
            # Saved before the rows are yielded: stored rows imply a checkpoint that holds their result.
            if saves:
                self.save(step)
            yield from record_batches(self.task.schema, rows)
            self.run.report.note(self.summary.after(rows, self.validation))
            self.run.report.progress(step, self.validation.last_step, "step")
            self.control.wait_while_paused()
            if (self.ranks.agreed(self.control.ending) if pauses else ends) or step >= self.validation.last_step:
                return

    def prepare(self) -> None:
        warn(self.run.report.say, self.task)
        configure_scheduler()  # must come before the first MLX array
        plan = choose_plan(self.task.estimator(), self.start.checkpoint, self.run.report.say)
        # Ranks other than 0 start fresh, and `same_state` gives them the adapter and the optimizer's state.
        self.training = load_training(self.task, self.start.checkpoint if self.ranks.leads else None, plan)
        self.training.ranks = self.ranks
        same_state(self.training, self.ranks)
        announce_ranks(self.run.report.say, self.ranks, self.start.checkpoint)
        announce(self.run, self.task, self.training, self.steps)

    @property
    def steps(self) -> range:
        return range(self.start.step + 1, self.task.config.steps + 1)

    def compute(self, batches: Sequence[MicroBatch], lr: float, ratio: bool) -> StepResult:
        """One optimizer step. With micro_batch = "auto", its peak memory sets the micro-batch of the next one."""
        training = self.training
        memory = training.memory
        if memory.max_tokens is None:
            return training.step(batches, lr, ratio)
        # The peak of this step alone is wanted, so MLX's count is reset; the run's peak is kept here.
        self.earlier_peak = self.peak
        mx.reset_peak_memory()
        result = training.step(batches, lr, ratio)
        before, used = memory.max_tokens, result.largest_tokens
        after = adjust_max_tokens(before, used, mx.get_active_memory(), mx.get_peak_memory(), memory.limit)
        if after != before:
            self.run.report.say(f"the micro-batch is now {after} tokens, {'fewer' if after < before else 'more'} than before")
        training.memory = replace(memory, max_tokens=after)
        return result

    @property
    def peak(self) -> int:
        return max(self.earlier_peak, mx.get_peak_memory())

    def step_rows(self, samples: Sequence[Any], result: StepResult, shared: Row) -> list[Row]:
        rows = sample_rows(self.task, samples, {"loss": result.losses, **result.terms}, shared | {"split": TRAIN})
        self.unsaved += rows
        return rows

    def first_measurement(self) -> list[Row]:
        """Rows of the measurement at step 0, or of the interrupted one of a resumed run."""
        if not self.start.checkpoint:
            return self.measure({"step": 0, "lr": 0.0, "grad_norm": 0.0, "peak_bytes": self.peak})
        if not self.unmeasured:
            return []
        trained = next(row for row in self.past if (row["step"], row["split"]) == (self.start.step, TRAIN))
        return self.measure({name: trained[name] for name in ("step", "lr", "grad_norm", "peak_bytes")})

    def measure(self, shared: Row) -> list[Row]:
        """Rows of the held-out samples; none if no measurement is due or a stop interrupts it."""
        held_out, step = self.task.held_out, shared["step"]
        if held_out is None or not self.validation.is_due(step):
            return []
        rows: list[Row] = []
        began = time.perf_counter()
        for batch, measured in measure_together(held_out, self.training, self.ranks, self.interrupted):
            clocks = {"seconds": time.perf_counter() - began, "read_seconds": 0.0, "split": VALIDATION}
            rows += sample_rows(self.task, batch.samples, measured, shared | clocks, first=len(rows))
            began = time.perf_counter()
        if self.unmeasured:
            return []
        self.validation.add(rows)
        self.unsaved += rows
        best = ", the best so far" if step == self.validation.best_step else ""
        self.run.report.say(f"step {step}: validation loss {self.validation.means[step]:.4f}{best}")
        return rows

    def interrupted(self) -> bool:
        self.unmeasured = self.ranks.agreed(self.control.stop_requested())
        return self.unmeasured

    def saves_after(self, step: int) -> bool:
        """Sets `timed`; deletes the file `checkpoint`."""
        # Asked in any case, because it deletes the file `checkpoint`.
        asked = self.control.wants_checkpoint()
        due = step % self.task.config.checkpoint_every == 0 or step >= self.validation.last_step
        wanted = asked or due or step == self.validation.best_step
        self.timed = not wanted and self.control.overdue()
        return wanted or self.timed

    def save(self, step: int) -> None:
        # Undoes the drift between chips of different kinds, and gives all ranks the state that a resumed run would have.
        same_state(self.training, self.ranks)
        if not self.ranks.leads:
            self.unsaved = []
            return
        training, write = self.training, self.run.output.write
        metadata = {**self.run.output.provenance, **self.task.metadata, **adapter_metadata(training.targets)}
        facts = {"skipped": self.skipped, "plan": training.memory.plan, "max_tokens": training.memory.max_tokens}
        facts |= {"timed": True} if self.timed else {}
        facts |= {"ranks": self.ranks.size} if self.ranks.size > 1 else {}
        rows = rows_table(self.task.schema, self.unsaved)
        saved = checkpoint.save(write, step, training.adapter, training.state, rows, metadata, facts, training.average)
        self.unsaved = []
        self.control.saved()
        if self.timed:
            checkpoint.prune_timed(self.run.output.artifacts, step)
        checkpoint.prune(self.run.output.artifacts, step, self.task.config.keep_states)
        # An interrupted measurement is repeated first: it may change which checkpoint is the best.
        if step >= self.validation.last_step and not self.unmeasured:
            self.publish(saved)

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
