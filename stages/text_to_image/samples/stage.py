"""The stage `samples`: preview images by the base and by checkpoints of the adapter, drawn from the same noise."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.text_to_image import CAPTIONS, EMBEDDINGS, SAMPLES, TRAIN
from stages.hashing import file_sha256
from stages.run import Run
from stages.settings import nearest
from stages.stage import Stage
from stages.text_to_image.beneath import content_of, drawn_of, files_of
from stages.text_to_image.caption_files import trigger_word
from stages.text_to_image.imaging.decode import BACKGROUND
from stages.text_to_image.sampler import Adapters
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.drawing import LATENTS, Picture, draw_pictures, reference_id, save_png
from stages.text_to_image.samples.grid import write_grid
from stages.text_to_image.samples.memory import forecast
from stages.text_to_image.stored_embeddings import read_embedding
from stages.tuner import checkpoint
from stages.tuner.checkpoint import ADAPTER, EMA, PASSING, Checkpoint

ID_DIGITS = 16  # hex digits of an id in a file's name
WANTED = ("adapter_id", "step", "caption_id", "prompt", "seed", "width", "height", "reference_id")

Row = dict[str, Any]


def wanted_samples(run: Run[SamplesConfig]) -> pa.Table:
    """One row per preview that should exist. Raises ValueError if a checkpoint or file of the settings is missing or damaged."""
    config = run.config
    prompts, references = preview_prompts(run), references_by_prompt(run)
    shown = {files: reference_id(files, config.background or BACKGROUND) for files in set(references.values())}
    rows = [
        (source.adapter_id, source.step, caption_id, prompt, seed, config.width, config.height, shown[references[prompt]])
        for source in sample_sources(run)
        for caption_id, prompt in list(prompts.items())[: config.first_prompts or None]
        for seed in config.seeds
    ]
    schema = pa.schema([SAMPLES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist([dict(zip(WANTED, row, strict=True)) for row in rows], schema=schema)


def content(run: Run[SamplesConfig]) -> dict[str, Any]:
    beneath = content_of(drawn_of(run.config.beneath), run.root)
    return {"beneath": beneath} if beneath else {}


def preview_prompts(run: Run[SamplesConfig]) -> dict[str, str]:
    captions = sorted(run.inputs.rows(CAPTIONS).to_pylist(), key=lambda row: row["position"])
    return {row["caption_id"]: row["text"] for row in captions if row["role"] == "preview"}


def references_by_prompt(run: Run[SamplesConfig]) -> dict[str, tuple[Path, ...]]:
    """Files by preview prompt. Raises ValueError if [samples] prompt_references names no prompt; its keys may have {trigger}."""
    trigger = trigger_word(run.inputs.rows(CAPTIONS))
    found = dict.fromkeys(preview_prompts(run).values(), run.config.references)
    rows = [row for row in run.inputs.rows(CAPTIONS).to_pylist() if row["role"] == "preview"]
    for key, paths in (run.config.prompt_references or {}).items():
        prompt = key.replace("{trigger}", trigger)
        named = [row["text"] for row in rows if row["text"] == prompt or row["template"] == key]
        if not named:
            hint = nearest(prompt, found, '"{}"')
            raise ValueError(f'samples.prompt_references must name prompts of [captions] preview_prompts, got "{key}"{hint}')
        found |= dict.fromkeys(named, tuple(paths))
    return {prompt: tuple(run.root / path for path in paths) for prompt, paths in found.items()}


def draw_samples(run: Run[SamplesConfig]) -> Iterator[pa.RecordBatch]:
    references = references_by_prompt(run)
    pictures: dict[str, list[Picture]] = {}
    for row in run.output.pending.to_pylist():
        shown = references[row["prompt"]] if row["reference_id"] else ()
        picture = Picture(file_name(row), row["caption_id"], row["seed"], shown, row)
        pictures.setdefault(row["adapter_id"], []).append(picture)
    groups = [(source.adapters, pictures.get(source.adapter_id, [])) for source in sample_sources(run)]
    captions = run.inputs.rows(CAPTIONS).to_pylist()
    empty = lambda: next(row["caption_id"] for row in captions if row["role"] == "empty")  # noqa: E731
    for drawn in draw_pictures(run, groups, empty, lambda prompts: partial(read_embedding, run)):
        row, name = drawn.picture.row, f"images/{drawn.picture.name}.png"
        facts = {fact: row[fact] for fact in ("prompt", "seed", "step", "adapter_id")}
        run.output.write(name, partial(save_png, image=drawn.image, metadata={**facts, **run.output.provenance}))
        yield SAMPLES.record_batch([{**row, "path": name, "seconds": drawn.seconds + drawn.decoding}])


def finish_samples(run: Run[SamplesConfig]) -> Iterator[pa.RecordBatch]:
    wanted = wanted_samples(run).to_pylist()
    if not wanted:
        run.report.say("no previews to draw: set [captions] preview_prompts, and set [samples] base = true or run train first")
    if run.output.pending.num_rows and run.config.checkpoints == "all" and (passed := passed_over(run, wanted)):
        steps = " and ".join(map(str, passed))
        run.report.say(f"not drawn: step {steps}, where the run was stopped; [samples] checkpoints = [...] may name it")
    stored = {tuple(row[name] for name in WANTED): row["path"] for row in run.output.stored.to_pylist()}
    paths = [stored.get(tuple(row.values())) for row in wanted]
    write_grid(run, {source.adapter_id: source.label for source in sample_sources(run)}, wanted, paths)
    # A later run could still need the latents of previews that do not exist yet.
    if None not in paths:
        shutil.rmtree(run.output.artifacts / LATENTS, ignore_errors=True)
    return iter(())


def passed_over(run: Run[SamplesConfig], wanted: list[Row]) -> list[int]:
    """Steps with a checkpoint that "all" leaves out, as the run was stopped there and went on."""
    drawn = {row["step"] for row in wanted}
    stopped = {one.step for one in checkpoint.find_checkpoints(run.inputs.files(TRAIN)) if "stopped" in one.state}
    return sorted(step for step in stopped - drawn if step < max(drawn, default=0))


def file_name(row: Row) -> str:
    """The stem of a preview's files: adapter or "base", caption, seed, size, and a hash of the references if any."""
    strength, _, digest = row["adapter_id"].rpartition("*")
    source, caption = f"{strength}{strength and 'x'}{digest[:ID_DIGITS]}" or "base", row["caption_id"][:ID_DIGITS]
    name = f"{source}-{caption}-{row['seed']}-{row['width']}x{row['height']}"
    shown = row.get("reference_id")
    return f"{name}-{hashlib.sha256(shown.encode()).hexdigest()[:ID_DIGITS]}" if shown else name


def opened_files(run: Run[SamplesConfig]) -> Iterator[Path]:
    of_prompts = (run.config.prompt_references or {}).values()
    yield from (run.root / name for names in (run.config.references, *of_prompts) for name in names)
    if given := given_adapter(run):
        yield given
    yield from files_of(drawn_of(run.config.beneath), run.root)


# Sources: what draws


@dataclass(frozen=True)
class SampleSource:
    """The base model, alone or with one adapter: that of `checkpoint`, or the file `given`."""

    adapter_id: str = ""  # sha256 of the adapter's file, strength*sha256 if that is not 1; "": the base alone
    step: int = 0  # of training
    checkpoint: Checkpoint | None = None
    file: str = ADAPTER  # in `checkpoint`: the adapter, or its moving average
    given: Path | None = None  # the file of [samples] adapter
    strength: float = 1.0  # 0: the base alone

    @property
    def label(self) -> str:
        average = ", average" if self.file == EMA else ""
        name = self.given.stem if self.given else f"step {self.step}{average}" if self.checkpoint else "base"
        return name if self.strength in (0, 1) else f"{name} x {self.strength:g}"

    @property
    def adapters(self) -> Adapters:
        setting = "samples.adapter" if self.given else "samples"
        return Adapters(f"{setting}: {self.label}", self.adapter_id, self.files)

    def files(self) -> list[tuple[Path, float]]:
        """Raises ValueError if size or sha256 of the file differ from the checkpoint's record."""
        file = self.checkpoint.folder / self.file if self.checkpoint else self.given
        if self.checkpoint and not self.checkpoint.intact(self.file):
            raise ValueError(f"{file} is damaged; choose another checkpoint, or train again from an earlier one")
        return [(file, self.strength)] if file else []


def sample_sources(run: Run[SamplesConfig]) -> list[SampleSource]:
    """The base, the chosen checkpoints by step, and the given adapter, by strength; of identical files, only the first."""
    sources: dict[str, SampleSource] = {}
    last = pc.max(run.inputs.rows(TRAIN, ["step"])["step"]).as_py() or 0
    for each in chosen_checkpoints(run.config.checkpoints, run.inputs.files(TRAIN), last):
        files = each.state["files"]
        name = EMA if run.config.average and EMA in files else ADAPTER
        # The contents of the file are checked when it is needed, by `SampleSource.files`.
        digest = files[name]["sha256"]
        sources.setdefault(digest, SampleSource(digest, each.step, each, name))
    if given := given_adapter(run):
        digest = file_sha256(given)
        sources.setdefault(digest, SampleSource(digest, given=given))
    drawn = [
        replace(each, strength=strength, adapter_id=each.adapter_id if strength == 1 else f"{strength:g}*{each.adapter_id}")
        for strength in run.config.strengths
        for each in sources.values()
    ]
    base = [SampleSource(strength=0.0)] if run.config.base else []
    return sorted([*base, *drawn], key=lambda each: each.strength)


def given_adapter(run: Run[SamplesConfig]) -> Path | None:
    if not run.config.adapter:
        return None
    file = run.root / Path(run.config.adapter).expanduser()
    if not file.is_file():
        raise ValueError(f"samples.adapter must be an adapter's file, got {run.config.adapter!r}: {file} does not exist")
    return file


def chosen_checkpoints(chosen: str | tuple[int, ...], folder: Path, last: int) -> list[Checkpoint]:
    """By step; one after step `last`, of the same run when it was longer, only by its number. Raises ValueError if a chosen one
    is missing or damaged.
    """
    numbered = () if isinstance(chosen, str) else chosen
    saved = {one.step: one for one in checkpoint.find_checkpoints(folder) if one.step <= last or one.step in numbered}
    for step, problem in sorted(checkpoint.damaged_checkpoints(folder).items()):
        if step > last and step not in numbered:
            continue
        # If the checkpoint of step 300 is damaged and 200 is the newest that can be read, "last" means 300 to the user: step
        # 200 must not be taken in its place. Damage before the newest does not matter for "last".
        if step > max(saved, default=0) if chosen == "last" else chosen == "all" or step in chosen:
            raise ValueError(f"the checkpoint of step {step} is damaged: {problem}; run: latentmill verify --repair")
    steps = sorted(saved)
    if isinstance(chosen, str):
        # Of those that only the clock or a stop wrote, the newest alone: else the previews depend on when one stopped.
        asked = [step for step in steps if step == steps[-1] or not saved[step].state.keys() & PASSING]
        return [saved[step] for step in (asked if chosen == "all" else steps[-1:])]
    if absent := [step for step in chosen if step not in saved]:
        existing = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"samples.checkpoints must be steps with a checkpoint ({existing}), got {absent[0]}")
    return [saved[step] for step in sorted(chosen)]


STAGE = Stage(
    reads=(TRAIN, CAPTIONS, EMBEDDINGS),
    writes=SAMPLES,
    unit="preview",
    config=SamplesConfig,
    needs=("family", "transformer", "autoencoder"),
    drawn_by=("family", "transformer"),
    content=content,
    wants=wanted_samples,
    run=draw_samples,
    finish=finish_samples,
    forecast=forecast,
    opens=opened_files,
    result="grid.png",
)
