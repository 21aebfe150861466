"""Trained adapters of a project: which one a command line names, and the file names of what is made from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.project.project import Project
from pipeline.terminal import Say, silent
from stages.bundled import shell_path

F = TypeVar("F", bound=Callable[..., Any])

WHICH = {"last": "adapter", "average": "adapter_ema", "best": "adapter_best"}  # name of an adapter -> its file in a run
SECTIONS = {"average": "train.ema", "best": "train.validation"}  # the settings that make a run write it
DTYPES = ("float32", "bfloat16", "float16")
STRONGEST = 10.0

STEP = click.option("--step", type=int, help="The checkpoint of this step.  [default: the end of the run]")


def which_option(best: str) -> Callable[[F], F]:
    help_ = f"last: as trained; average: the moving average ([train.ema]); best: marked by you, else {best} ([train.validation])."
    return click.option("--which", type=click.Choice(list(WHICH)), default="last", show_default=True, help=help_)


STRENGTH_FOR = click.option(
    "--strength-for",
    "strength_for",
    multiple=True,
    metavar="PATTERN=FACTOR",
    callback=lambda context, param, values: parse_strengths(values),
    help="Another strength for the Linears of a pattern, such as 'single_transformer_blocks.*=0.5'; 0 leaves them out; may be "
    "repeated. `latentmill adapter FILE` shows the blocks.",
)


def parse_strengths(texts: Sequence[str]) -> dict[str, float]:
    """("transformer_blocks.*=0.5",) gives {"transformer_blocks.*": 0.5}. Raises ValueError."""
    found = {}
    for text in texts:
        pattern, _, factor = text.rpartition("=")
        try:
            found[pattern] = float(factor)
        except ValueError:
            found[pattern] = math.nan
        if not pattern or not abs(found[pattern]) <= STRONGEST:
            raise ValueError(f"--strength-for must be PATTERN=FACTOR with a factor from -10 to 10, got {text!r}")
    return found


def dtype_option(default: str, of: str = "matrices") -> Callable[[F], F]:
    return click.option("--dtype", type=click.Choice(DTYPES), default=default, show_default=True, help=f"The type of the {of}.")


def find_adapter(project: Project, text: str, step: int | None = None, say: Say = silent) -> Path:
    """A file, or a word of `WHICH` for the chosen run, or "best@RUN" for another (name or start of recipe), as `adapter_of`."""
    from pipeline.project import runs

    path = Path(text).expanduser()
    if path.is_file():
        return path
    which, at, run = text.partition("@")
    if which not in WHICH:
        raise ValueError(
            f"--adapter must be {', '.join(WHICH)}, one of these with @RUN, none or a file, got {text!r}: there is no such file"
        )
    if at:
        # A project of its own, because `choose` changes which run it uses.
        project = Project(project.path, fetch=project.fetch)
        runs.choose(project, run)
    return adapter_of(project, step, say, which)


def adapter_of(project: Project, step: int | None, say: Say = silent, which: str = "last") -> Path:
    """The adapter file of the chosen run at `step`, None for its end; a `which` of "best" has a step of its own."""
    from pipeline.project.runs import read_record
    from stages.tuner.checkpoint import adapter_damage, find_checkpoints

    if which not in WHICH:
        raise ValueError(f"adapter must be one of {', '.join(WHICH)}, got {which!r}")
    if which == "best" and step is not None:
        raise ValueError(
            f"the best adapter has a step of its own: leave out step {step}, or choose the last or the average adapter"
        )
    table = project.folder("train").folder
    checkpoints = {saved.step: saved.folder for saved in find_checkpoints(table / "artifacts")}
    result = str(project.stage("train").result)
    if which == "best" and (marked := (read_record(project.folder("train")) or {}).get("marked")) is not None:
        which, step = "last", marked
    last = table / "artifacts" / result if step is None else checkpoints.get(step, table) / result
    if not last.is_file():
        there = f"its checkpoints are {', '.join(map(str, sorted(checkpoints)))}" if checkpoints else "it has no checkpoint yet"
        wanted = "finished adapter" if step is None else f"checkpoint of step {step}"
        remedy = f"run: make train PROJECT={shell_path(project.path)}"
        if checkpoints:
            remedy = "choose one of them" if step is not None else f"choose one by --step, or {remedy}"
        raise ValueError(f"{project.name} has no {wanted}; {there}; {remedy}")
    adapter = last.with_name(WHICH[which] + last.suffix)
    if not adapter.is_file():
        raise ValueError(f"{project.name} has no {which} adapter to export: it was trained without [{SECTIONS[which]}]")
    if damage := adapter_damage(adapter):
        raise ValueError(f"{adapter} {damage}; run: latentmill verify --repair, or export another step")
    if not project.fixed:
        for line in notes(project, table, step is None and which == "last", checkpoints):
            say(f"note: {line}")
    return adapter


def notes(project: Project, table: Path, last: bool, checkpoints: Iterable[int]) -> Iterator[str]:
    """What the next run would give in place of this one's adapter. `last`: it is that of the end of the run in `table`."""
    from pipeline.project.outlook import ANEW, next_run
    from stages.tuner.checkpoint import published_step

    make, this = f"make train PROJECT={shell_path(project.path)}", f"this adapter is from the run {run_label(project)}"
    need = next_run(project, "train")
    if need is None or not need.table:
        yield f"{this}; what {make} does is known once the stages before it have run"
    elif need.note == ANEW:
        yield f"settings, data or weights have changed since: {this}, {make} begins a new run of {need.to_do}"
    elif need.table != table.name:
        yield f"{this}; {make} goes on with the run {need.earlier or need.table}"
    elif last:
        ends = published_step(table / "artifacts") or 0
        asked = getattr(project.config.sections["train"], "steps", None)
        if not isinstance(asked, int):
            return
        if newest := max((each for each in checkpoints if ends < each <= asked), default=0):
            yield f"this is the adapter of step {ends}; the run was stopped at step {newest}: --step {newest} takes that one"
        elif ends > asked or (ends < asked and need.missing):  # else it has ended early
            after = f", after {need.to_do}" if need.missing else ""
            yield f"this is the adapter of step {ends}; {asked} steps are asked for: {make} gives that one{after}"


def pair_strengths(adapters: Sequence[str], strengths: Sequence[float]) -> list[tuple[str, float]]:
    """(adapter, strength) pairs. Raises ValueError if the numbers differ or a strength is not from -10 to 10."""
    names = list(adapters) or ["last"]
    if strengths and len(strengths) != len(names):
        raise ValueError(
            f"--strength must be given once for each --adapter, in their order: {len(names)} adapters, {len(strengths)} strengths"
        )
    for strength in strengths:
        if not -STRONGEST <= strength <= STRONGEST:
            raise ValueError(f"--strength must be from -10 to 10, got {strength}")
    return list(zip(names, strengths or [1.0] * len(names), strict=True))


def file_stem(project: str) -> str:
    return re.sub(r"[^\w.-]+", "-", project).strip("-.") or "adapter"


def run_label(project: Project) -> str:
    """Name of the run whose adapter is taken, else its recipe."""
    from pipeline.project.runs import read_record

    table = project.folder("train")
    return str((read_record(table) or {}).get("name") or table.folder.name)


def file_name(project: str, run: str, step: int | str, style: str, which: str = "last") -> str:
    """Such as "cats-slow-001000-average-comfyui.safetensors"; "last" and "diffusers" are left out, and no run."""
    kind = "".join(f"-{word}" for word, usual in ((which, "last"), (style, "diffusers")) if word != usual)
    return f"{'-'.join([file_stem(project), *filter(None, [run])])}-{int(step):06d}{kind}.safetensors"
