"""`latentmill export`: writes a trained adapter for other programs, as a file or merged into the transformer's weights."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.adapter_file import DTYPES, STYLES, Say, check_choice, file_name, silent, write_adapter
from pipeline.options import with_project

if TYPE_CHECKING:
    from pipeline.project.project import Project

WHICH = {"last": "adapter", "average": "adapter_ema", "best": "adapter_best"}  # name of an adapter -> its file in a run
SECTIONS = {"average": "train.ema", "best": "train.validation"}  # the settings that make a run write it


@click.command("export")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--style",
    type=click.Choice(list(STYLES)),
    default="diffusers",
    show_default=True,
    help="The program whose tensor names are used.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="The type of the matrices.")
@click.option("--step", type=int, help="Export the checkpoint of this step.  [default: the end of the run]")
@click.option(
    "--which",
    type=click.Choice(list(WHICH)),
    default="last",
    show_default=True,
    help="last: as trained; average: the moving average ([train.ema]); best: lowest validation loss ([train.validation]).",
)
@click.option("--merged", is_flag=True, help="Write the whole transformer with the adapter merged into its weights.")
@with_project
def command(out: Path | None, style: str, dtype: str, step: int | None, which: str, merged: bool, project: Project) -> None:
    """Write the trained adapter as a file for other programs. OUT is a file ending in .safetensors, or a folder.
    Without OUT, the file is written to exports/ in the project. With --merged, OUT is a new folder for the whole
    transformer with the adapter merged in.
    """

    def say(line: str) -> None:
        click.echo(line, err=True)

    if merged and style != "diffusers":
        raise ValueError(f"--merged writes the diffusers layout; leave out --style {style}")
    if merged:
        click.echo(f"wrote {merge_run(project, out, dtype=dtype, step=step, which=which, say=say)}")
    else:
        written = export_run(project, out, style, dtype=dtype, step=step, which=which, say=say)
        click.echo(f"wrote {written}")
        for line in what_to_do(project, written, style):
            click.echo(line)


def export_run(
    project: Project,
    out: Path | None,
    style: str,
    *,
    dtype: str,
    step: int | None = None,
    which: str = "last",
    say: Say = silent,
) -> Path:
    """`out`: a file or folder; None: exports/. For the rest see `adapter_of` and `write_adapter`."""
    adapter = adapter_of(project, step, say, which)
    about = {"project": project.name, "adapter": which, **use_of(project)}
    return write_adapter(adapter, project.family, out or project.path / "exports", style, dtype=dtype, metadata=about, say=say)


def use_of(project: Project) -> dict[str, str]:
    """For an adapter's header: the trigger word, and the largest training resolution such as "768x768"."""
    sections = project.config.sections
    trigger = getattr(sections.get("captions"), "trigger", "")
    sizes = getattr(sections.get("buckets"), "resolutions", ())
    found = {"trigger": trigger, "resolution": f"{max(sizes)}x{max(sizes)}" if sizes else ""}
    return {key: value for key, value in found.items() if value}


def what_to_do(project: Project, file: Path, style: str) -> Iterator[str]:
    use = use_of(project)
    prompt = f"{use['trigger']}, ..." if "trigger" in use else "..."
    if style == "diffusers":
        yield "with diffusers, after the base model is loaded as `pipe`:"
        yield f"  pipe.load_lora_weights({str(file.parent)!r}, weight_name={file.name!r}); pipe({prompt!r})"
    yield f"with ComfyUI: copy it into models/loras and put a LoraLoader behind the model; the prompt: {prompt}"
    if style == "diffusers":
        yield f"with mflux: --lora-paths {shlex.quote(str(file))} --lora-scales 1.0; with Draw Things: import it as a LoRA"
    yield f'or here: latentmill generate "{prompt}" --adapter {shlex.quote(str(file))}'


def merge_run(
    project: Project, out: Path | None, *, dtype: str, step: int | None = None, which: str = "last", say: Say = silent
) -> Path:
    """Write the transformer with an adapter merged in; `out` None: a folder in exports/. Raises ValueError if it exists."""
    from pipeline.commands.merged import write_merged
    from stages.models.weights import read_file

    adapter = adapter_of(project, step, say, which)
    step_trained = read_file(adapter)[1].get("step", 0)
    name = Path(file_name(project.name, step_trained, "merged", which)).stem
    # An export downloads nothing.
    base = project.component("transformer", fetch=False)
    return write_merged(base, project.family, adapter, out or project.path / "exports" / name, dtype=dtype)


def adapter_of(project: Project, step: int | None, say: Say, which: str = "last") -> Path:
    """The adapter file of a run at `step`, None for its end. `which` is a key of `WHICH`; with "best", `step` must be None.

    Raises ValueError, with the checkpoints that exist, if there is none. Calls `say` if the settings changed since training.
    """
    from stages.tuner.checkpoint import adapter_damage

    check_choice("adapter", which, WHICH)
    if which == "best" and step is not None:
        raise ValueError(
            f"the best adapter has a step of its own: leave out step {step}, or choose the last or the average adapter"
        )
    table = project.folder("train").folder
    last = _last_adapter(project, table / "artifacts", step)
    adapter = last.with_name(WHICH[which] + last.suffix)
    if not adapter.is_file():
        raise ValueError(f"{project.name} has no {which} adapter to export: it was trained without [{SECTIONS[which]}]")
    if damage := adapter_damage(adapter):
        raise ValueError(f"{adapter} {damage}; run: latentmill verify --repair, or export another step")
    if table.name != _current_recipe(project):
        say(f"note: the project has changed since training; this adapter is from the run with recipe {table.name}")
    return adapter


def _last_adapter(project: Project, artifacts: Path, step: int | None) -> Path:
    checkpoints = {int(p.parent.name.split("-")[1]): p for p in artifacts.glob("checkpoints/step-*/adapter.safetensors")}
    found = artifacts / project.stage("train").result if step is None else checkpoints.get(step)
    if found and found.is_file():
        return found
    there = f"its checkpoints are {', '.join(map(str, sorted(checkpoints)))}" if checkpoints else "it has no checkpoint yet"
    wanted = "finished adapter" if step is None else f"checkpoint of step {step}"
    raise ValueError(f"{project.name} has no {wanted} to export; {there}; run: make train PROJECT={project.path}")


def _current_recipe(project: Project) -> str:
    try:
        return project.current("train").folder.name
    except ValueError:
        return ""
