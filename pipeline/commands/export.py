"""Export a trained adapter as a file that other programs load, or merged into the transformer's weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.options import with_project
from pipeline.store.disk import atomic_write

if TYPE_CHECKING:
    from pipeline.project.project import Project
    from stages.models.family import Family

STYLES = {
    "diffusers": "transformer.<diffusers name>: diffusers, and ComfyUI by its name map",
    "comfyui": "diffusion_model.<reference name>, q, k and v fused: ComfyUI and what reads the reference layout; diffusers too",
}
WHICH = {"last": "adapter", "average": "adapter_ema", "best": "adapter_best"}  # name of an adapter -> its file in a run
SECTIONS = {"average": "train.ema", "best": "train.validation"}  # the settings that make a run write it
DTYPES = ("float32", "bfloat16", "float16")
READERS = {  # style -> variant -> which programs load the file; every program loads a plain LoRA
    "diffusers": {
        "dora": "wrote a DoRA in PEFT's names: diffusers loads it exactly; ComfyUI ignores magnitudes, use style comfyui there",
        "lokr": "wrote a LoKr in PEFT's names: diffusers loads it, and ComfyUI by its name map",
    },
    "comfyui": {
        "dora": "wrote a DoRA with dora_scale: ComfyUI loads it, nearly exactly while it divides rows by |W| and not by |W + BA| "
        "(before its change 15458); diffusers ignores dora_scale, use style diffusers there",
        "lokr": "wrote a LoKr in LyCORIS' names: ComfyUI, LyCORIS and diffusers load it",
    },
}

Say = Callable[[str], None]


def _silent(line: str) -> None:
    pass


@click.command("export")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--style", type=click.Choice(list(STYLES)), default="diffusers", show_default=True, help="Whose names the tensors have."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--step", type=int, help="The step of a checkpoint; without it, the end of the run.")
@click.option(
    "--which",
    type=click.Choice(list(WHICH)),
    default="last",
    show_default=True,
    help="The adapter as trained, its average ([train.ema]), or the best by validation loss ([train.validation]).",
)
@click.option("--merged", is_flag=True, help="Write the whole transformer with the adapter merged into its weights.")
@with_project
def command(out: Path | None, style: str, dtype: str, step: int | None, which: str, merged: bool, project: Project) -> None:
    """Write the trained adapter as a file for other programs.

    OUT is a file ending in .safetensors, or a folder; without it, exports/ in the project. With --merged it is a new folder.
    """

    def say(line: str) -> None:
        click.echo(line, err=True)

    if merged and style != "diffusers":
        raise ValueError(f"export: --merged writes diffusers' layout; leave out --style {style}")
    if merged:
        click.echo(f"wrote {merge_run(project, out, dtype=dtype, step=step, which=which, say=say)}")
    else:
        click.echo(f"wrote {export_run(project, out, style, dtype=dtype, step=step, which=which, say=say)}")


def export_run(
    project: Project,
    out: Path | None,
    style: str,
    *,
    dtype: str,
    step: int | None = None,
    which: str = "last",
    say: Say = _silent,
) -> Path:
    """Export the adapter that `project` trained and return the file's path.

    `out` is a file ending in .safetensors or a folder; None: exports/ in the project. `style`: a key of STYLES; `dtype`: one of
    DTYPES. `step`: the checkpoint of that step instead of the result; `which`: "last", "average" or "best". `say` receives notes
    for the user, one line each. ValueError in one line if there is no such adapter or the file cannot be written.
    """
    adapter = adapter_of(project, step, say, which)
    about = {"project": project.name, "adapter": which}
    return export(adapter, project.family, out or project.path / "exports", style, dtype=dtype, metadata=about, say=say)


def merge_run(
    project: Project, out: Path | None, *, dtype: str, step: int | None = None, which: str = "last", say: Say = _silent
) -> Path:
    """Write the project's transformer with its trained adapter merged into the weights, and return the new folder's path.

    `out` must not exist; None: a new folder in exports/ of the project. `step`, `which`, `dtype` and `say` as in `export_run`.
    """
    from pipeline.commands.merged import write_merged
    from stages.models.weights import read_file

    adapter = adapter_of(project, step, say, which)
    step_trained = read_file(adapter)[1].get("step", 0)
    name = Path(file_name(project.name, step_trained, "merged", which)).stem
    base = project.component("transformer", fetch=False)
    return write_merged(base, project.family, adapter, out or project.path / "exports" / name, dtype=dtype)


def adapter_of(project: Project, step: int | None, say: Say, which: str = "last") -> Path:
    """Return the path of a trained adapter: the result of the run, or the checkpoint of `step`.

    `which` is a key of WHICH: the adapter as trained, its average, or the one with the best validation loss. `say` receives a
    note if the project's settings have changed since. ValueError, which lists the checkpoints, if there is no such adapter.
    """
    _check_choice("adapter", which, WHICH)
    if which == "best" and step is not None:
        raise ValueError(f"the best adapter has a step of its own: leave out step {step}, or leave out the choice of the best")
    table = project.folder("train").folder
    last = _last_adapter(project, table / "artifacts", step)
    adapter = last.with_name(WHICH[which] + last.suffix)
    if not adapter.is_file():
        raise ValueError(f"{project.name} has no {which} adapter to export: it was trained without [{SECTIONS[which]}]")
    if table.name != _current_recipe(project):
        say(f"the project has changed since it was trained: this is the run of recipe {table.name}")
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
    """Return the recipe of a run with the present settings; "" if tables or weights that it depends on are missing."""
    try:
        return project.current("train").folder.name
    except ValueError:
        return ""


def file_name(project: str, step: int | str, style: str, which: str = "last") -> str:
    """Name an exported file: "cats-001000.safetensors", or "cats-001000-average-comfyui.safetensors" for other choices."""
    safe = re.sub(r"[^\w.-]+", "-", project).strip("-.") or "adapter"
    kind = "".join(f"-{word}" for word, usual in ((which, "last"), (style, "diffusers")) if word != usual)
    return f"{safe}-{int(step):06d}{kind}.safetensors"


def export(
    adapter: Path,
    family: Family,
    out: Path,
    style: str,
    *,
    dtype: str,
    metadata: dict[str, str],
    say: Say = _silent,
) -> Path:
    """Convert the adapter file `adapter` for other programs and return the path of the new file.

    `family` is the model that it was trained on. `out` is a file ending in .safetensors, or a folder in which the file is named
    after the metadata project, step and adapter. `style`: a key of STYLES; `dtype` of the matrices: one of DTYPES. `metadata` is
    added to that of `adapter`. Scales are multiplied into the arrays, so that the file is right for readers that ignore metadata.
    ValueError if the adapter has values that are not finite, or if `out` is not an export of the same project and style.
    """
    from pipeline.commands.export_header import header
    from stages.models import adapters
    from stages.models.weights import read_file

    _check_choice("style", style, STYLES)
    _check_choice("dtype", dtype, DTYPES)
    arrays, scales = family.architecture.read_adapter(adapter)
    if key := adapters.first_not_finite(arrays):
        raise ValueError(f"{adapter}: {key} holds values that are not finite; the run diverged, export an earlier checkpoint")
    about = {**read_file(adapter)[1], **metadata}
    name = file_name(about.get("project", adapter.stem), about.get("step", 0), style, about.get("adapter", "last"))
    target = out if out.suffix == ".safetensors" else out / name
    converted = family.architecture.adapter_styles[style](arrays, scales)
    variant = adapters.variant(arrays)
    new_metadata = header(about, style, dtype, adapters.ranks(converted), variant)
    _check_replaced(target, new_metadata, say)
    _write(target, converted, dtype, new_metadata)
    if variant in READERS[style]:
        say(READERS[style][variant])
    return target


def _check_choice(what: str, given: str, choices: Any) -> None:
    if given not in choices:
        raise ValueError(f"unknown {what} {given!r}; there are {', '.join(choices)}")


def _check_replaced(target: Path, metadata: dict[str, str], say: Say) -> None:
    """Tell `say` which export is replaced. ValueError if `target` exists and is no export of the same project and style."""
    from stages.models.weights import read_file

    if not target.exists():
        return
    try:
        _, found = read_file(target)
    except ValueError:
        found = {}
    purpose = ("project", "export_style", "family")
    if "export_style" not in found or any(found.get(key) != metadata.get(key) for key in purpose):
        kind = f"{metadata['export_style']} export of this project"
        raise ValueError(f"{target} exists and is no {kind}; move it away or give another name")
    say(f"replaced {target} (it held step {found.get('step', '?')})")


def _write(target: Path, arrays: dict[str, Any], dtype: str, metadata: dict[str, str]) -> None:
    """Write the file whole or not at all. Matrices are cast to `dtype`; single numbers per row stay float32."""
    import mlx.core as mx

    from stages.models.adapters import EXACT, first_not_finite

    dtypes = {key: mx.float32 if key.endswith(EXACT) else getattr(mx, dtype) for key in arrays}
    cast = {key: mx.contiguous(value.astype(dtypes[key])) for key, value in arrays.items()}
    if key := first_not_finite(cast):
        raise ValueError(f"{key} has values too large for {dtype}; export as bfloat16 or float32")
    with atomic_write(target) as temporary:
        temporary.touch()  # reports a folder that cannot be written as the system does; MLX would not
        mx.save_safetensors(str(temporary), cast, metadata)
