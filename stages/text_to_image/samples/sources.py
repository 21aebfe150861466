"""Sample sources: the base model, the adapters of the chosen checkpoints, and an adapter file of another program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.text_to_image.train import TRAIN
from stages.hashing import file_sha256
from stages.run import Run
from stages.text_to_image.samples.config import SamplesConfig
from stages.tuner import checkpoint
from stages.tuner.checkpoint import ADAPTER, EMA, Checkpoint


@dataclass(frozen=True)
class SampleSource:
    """The base model, alone or with one adapter: that of `checkpoint`, or the file `given`."""

    adapter_id: str = ""  # sha256 of the adapter's file; "": the base alone
    step: int = 0  # of training
    checkpoint: Checkpoint | None = None
    file: str = ADAPTER  # in `checkpoint`: the adapter, or its moving average
    given: Path | None = None  # the file of [samples] adapter

    @property
    def label(self) -> str:
        if self.given:
            return self.given.stem
        average = ", average" if self.file == EMA else ""
        return f"step {self.step}{average}" if self.checkpoint else "base"

    def adapter_file(self) -> Path | None:
        """Raises ValueError if size or sha256 of the file differ from the checkpoint's record."""
        if self.checkpoint is None:
            return self.given
        file = self.checkpoint.folder / self.file
        if not self.checkpoint.intact(self.file):
            raise ValueError(f"{file} is damaged; choose another checkpoint, or train again from an earlier one")
        return file


def sample_sources(run: Run[SamplesConfig]) -> list[SampleSource]:
    """The base, the chosen checkpoints by step, and the given adapter; of identical files, only the first. Raises ValueError if a
    chosen one is missing or damaged.
    """
    saved = {one.step: one for one in checkpoint.find_checkpoints(run.inputs.files(TRAIN))}
    refuse_damaged(run.config.checkpoints, checkpoint.damaged_checkpoints(run.inputs.files(TRAIN)), max(saved, default=0))
    sources = {"": SampleSource()} if run.config.base else {}
    for step in chosen_steps(run.config.checkpoints, sorted(saved)):
        files = saved[step].state["files"]
        name = EMA if run.config.average and EMA in files else ADAPTER
        # The contents of the file are checked when it is needed, by `SampleSource.adapter_file`.
        digest = files[name]["sha256"]
        sources.setdefault(digest, SampleSource(digest, step, saved[step], name))
    if given := given_adapter(run):
        digest = file_sha256(given)
        sources.setdefault(digest, SampleSource(digest, given=given))
    return list(sources.values())


def given_adapter(run: Run[SamplesConfig]) -> Path | None:
    if not run.config.adapter:
        return None
    file = run.root / Path(run.config.adapter).expanduser()
    if not file.is_file():
        raise ValueError(f"samples.adapter must be an adapter's file, got {run.config.adapter!r}: {file} does not exist")
    return file


def refuse_damaged(chosen: str | tuple[int, ...], damaged: Mapping[int, str], newest: int) -> None:
    """Raise ValueError if `chosen` covers a damaged checkpoint. `newest`: step of the newest that can be read, or 0."""
    for step, problem in sorted(damaged.items()):
        # If the checkpoint of step 300 is damaged and 200 is the newest that can be read, "last" means 300 to the user: step
        # 200 must not be taken in its place. Damage before `newest` does not matter for "last".
        if step > newest if chosen == "last" else chosen == "all" or step in chosen:
            raise ValueError(f"the checkpoint of step {step} is damaged: {problem}; run: latentmill verify --repair")


def chosen_steps(chosen: str | tuple[int, ...], steps: list[int]) -> list[int]:
    if isinstance(chosen, str):
        return steps if chosen == "all" else steps[-1:]
    absent = [step for step in chosen if step not in steps]
    if absent:
        existing = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"samples.checkpoints must be steps with a checkpoint ({existing}), got {absent[0]}")
    return sorted(chosen)
