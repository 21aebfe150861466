"""Sample sources: the base model, the adapters of the chosen checkpoints, and an adapter file of another program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.text_to_image.train import TRAIN
from stages.hashing import file_sha256
from stages.stage import StageContext
from stages.tuner import checkpoint
from stages.tuner.checkpoint import ADAPTER, EMA, Checkpoint


@dataclass(frozen=True)
class SampleSource:
    """A model that draws previews: the base model, alone or with an adapter. `adapter_id` is the sha256 of the
    adapter's file, or "". `step` is the training step of the adapter, or 0. `checkpoint` is the training checkpoint
    that holds the adapter, or None. `file` is the name of the adapter's file in this checkpoint. `given` is the path of
    the file that the setting [samples] `adapter` names, or None.

    At most one of `checkpoint` and `given` is set. For the base model alone, both are None. A checkpoint may hold two
    adapter files: the adapter itself and the average of its weights over the steps.
    """

    adapter_id: str = ""
    step: int = 0
    checkpoint: Checkpoint | None = None
    file: str = ADAPTER
    given: Path | None = None

    @property
    def label(self) -> str:
        """The heading of a column of previews: "base", "step 500", "step 500, average", or the name of a file. The word
        "average" marks the averaged weights of a checkpoint's adapter.
        """
        if self.given:
            return self.given.stem
        average = ", average" if self.file == EMA else ""
        return f"step {self.step}{average}" if self.checkpoint else "base"

    def adapter_file(self) -> Path | None:
        """Return the path of the adapter's file, or None for the base model. Raises ValueError if the size or sha256 of
        the file differs from the checkpoint's record.
        """
        if self.checkpoint is None:
            return self.given
        file = self.checkpoint.folder / self.file
        if not self.checkpoint.intact(self.file):
            raise ValueError(f"{file} is damaged; choose another checkpoint, or train again from an earlier one")
        return file


def sample_sources(ctx: StageContext) -> list[SampleSource]:
    """Return the models that draw previews, as a list. The base model comes first, if the setting [samples] `base` is
    on. Then come the adapters of the checkpoints that the setting [samples] `checkpoints` chooses, by training step.
    The adapter file that the setting [samples] `adapter` names comes last, if the setting is not empty. `ctx` is the
    stage's context: its tables and settings. Raises ValueError if a chosen checkpoint is missing or damaged, or if the
    named adapter file does not exist.

    Of identical adapter files, only the first is returned. The contents of a checkpoint's files are not checked here,
    but by `SampleSource.adapter_file`. If `checkpoints` is "last", only that method notices a damaged adapter in the
    newest checkpoint with a readable `state.json`.
    """
    saved = {one.step: one for one in checkpoint.find_checkpoints(ctx.files(TRAIN))}
    refuse_damaged(ctx.config.checkpoints, checkpoint.damaged_checkpoints(ctx.files(TRAIN)), max(saved, default=0))
    sources = {"": SampleSource()} if ctx.config.base else {}
    for step in chosen_steps(ctx.config.checkpoints, sorted(saved)):
        files = saved[step].state["files"]
        name = EMA if ctx.config.average and EMA in files else ADAPTER
        digest = files[name]["sha256"]
        sources.setdefault(digest, SampleSource(digest, step, saved[step], name))
    if given := given_adapter(ctx):
        digest = file_sha256(given)
        sources.setdefault(digest, SampleSource(digest, given=given))
    return list(sources.values())


def given_adapter(ctx: StageContext) -> Path | None:
    """Return the path of the file that the setting [samples] `adapter` names, or None if the setting is empty. `ctx` is
    the stage's context, which holds the settings. Raises ValueError if there is no such file.
    """
    if not ctx.config.adapter:
        return None
    file = ctx.root / Path(ctx.config.adapter).expanduser()
    if not file.is_file():
        raise ValueError(f"samples.adapter must be an adapter's file, got {ctx.config.adapter!r}: {file} does not exist")
    return file


def refuse_damaged(chosen: str | tuple[int, ...], damaged: Mapping[int, str], newest: int) -> None:
    """Raise ValueError if a checkpoint that the user chose is damaged. `chosen` is the setting `samples.checkpoints`:
    "last", "all" or a tuple of steps. `damaged` maps the step of each damaged checkpoint to a text about the damage.
    `newest` is the step of the newest checkpoint that can be read, or 0. For "all", every damaged checkpoint is an
    error. For a tuple, a damaged checkpoint of one of these steps is an error. For "last", a damaged checkpoint after
    step `newest` is an error.

    For example, the checkpoint of step 300 is damaged and `newest` is 200. Then "last" means step 300 to the user, and
    step 200 must not be taken in its place. If `newest` is 400, the damage does not matter for "last".
    """
    for step, problem in sorted(damaged.items()):
        if step > newest if chosen == "last" else chosen == "all" or step in chosen:
            raise ValueError(f"the checkpoint of step {step} is damaged: {problem}; run: latentmill verify --repair")


def chosen_steps(chosen: str | tuple[int, ...], steps: list[int]) -> list[int]:
    """Return the steps that the setting `samples.checkpoints` chooses, sorted. `chosen` is the setting: "last", "all" or
    a tuple of steps. `steps` are the steps that have a checkpoint, sorted. Raises ValueError if a chosen step is not
    among them.
    """
    if isinstance(chosen, str):
        return steps if chosen == "all" else steps[-1:]
    absent = [step for step in chosen if step not in steps]
    if absent:
        existing = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"samples.checkpoints must be steps with a checkpoint ({existing}), got {absent[0]}")
    return sorted(chosen)
