"""Write a trained adapter in the form that other programs load: diffusers' names, or ComfyUI's fused ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.options import with_project
from pipeline.store.disk import atomic_write

if TYPE_CHECKING:
    from pipeline.project.project import Project

STYLES = {
    "diffusers": "transformer.<diffusers name>: diffusers, and ComfyUI by its name map",
    "comfyui": "diffusion_model.<reference name>, q, k and v fused: ComfyUI and what reads the reference layout; diffusers too",
}
WHICH = {"last": "adapter", "average": "adapter_ema", "best": "adapter_best"}  # the file of each of a run's adapters
SECTIONS = {"average": "train.ema", "best": "train.validation"}  # what makes a run keep it
DTYPES = ("float32", "bfloat16", "float16")
LOADS = {  # by style: what loads where, for all but a plain LoRA, which loads everywhere
    "diffusers": {
        "dora": "a DoRA in PEFT's names: exact in diffusers; ComfyUI would leave out its magnitudes: use style comfyui there",
        "lokr": "a LoKr in PEFT's names: for diffusers, and for ComfyUI by its name map",
    },
    "comfyui": {
        "dora": "a DoRA with dora_scale: for ComfyUI, near but not exact where it divides rows by |W| and not by |W + BA| "
        "(until its change 15458 is in); diffusers would drop dora_scale: use style diffusers there",
        "lokr": "a LoKr in LyCORIS' names: for ComfyUI and LyCORIS, and for diffusers",
    },
}
NETWORKS = {"lora": "networks.lora", "dora": "networks.lora", "lokr": "lycoris.kohya"}  # kohya's words


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
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Export what the project trained: the run's result, or the checkpoint of `step`. Without `out`, into `exports/`."""
    adapter = adapter_of(project, step, say, which)
    about = {"project": project.name, "adapter": which}
    return export(adapter, out or project.path / "exports", style, dtype=dtype, metadata=about, say=say)


def merge_run(
    project: Project,
    out: Path | None,
    *,
    dtype: str,
    step: int | None = None,
    which: str = "last",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the project's transformer with what was trained merged into it, as the new folder `out`, or one in `exports/`."""
    from pipeline.commands.merged import write_merged
    from stages.models.flux2.adapter_formats import load

    adapter = adapter_of(project, step, say, which)
    said = load(adapter)[1]
    name = Path(file_name(project.name, said.get("step", 0), "merged", which)).stem
    base = project.component("transformer", fetch=False)
    return write_merged(base, project.family, adapter, out or project.path / "exports" / name, dtype=dtype)


def adapter_of(project: Project, step: int | None, say: Callable[[str], None], which: str = "last") -> Path:
    """The run's result, or the checkpoint of `step`; of either the adapter in WHICH.

    ValueError, with the checkpoints there are, if it is not there.
    """
    _one_of("adapter", which, tuple(WHICH))
    if which == "best" and step is not None:
        raise ValueError(f"the best adapter is of a step of its own; leave out step {step}, or export that of the step")
    table = project.folder("train")
    artifacts = table.folder / "artifacts"
    checkpoints = {int(p.parent.name.split("-")[1]): p for p in artifacts.glob("checkpoints/step-*/adapter.safetensors")}
    there = f"its checkpoints are {', '.join(map(str, sorted(checkpoints)))}" if checkpoints else "it has no checkpoint yet"
    plain = artifacts / project.stage("train").result if step is None else checkpoints.get(step)
    if plain is None or not plain.is_file():
        wanted = "finished adapter" if step is None else f"checkpoint of step {step}"
        raise ValueError(f"{project.name} has no {wanted} to export; {there}; run: make train PROJECT={project.path}")
    adapter = plain.with_name(WHICH[which] + plain.suffix)
    if not adapter.is_file():
        raise ValueError(f"{project.name} has no {which} adapter to export: it was trained without [{SECTIONS[which]}]")
    if table.folder.name != _recipe_now(project):
        say(f"the project has changed since it was trained: this is the run of recipe {table.folder.name}")
    return adapter


def _recipe_now(project: Project) -> str:
    """The recipe that a run would have now; empty where tables or weights are missing that it depends on."""
    try:
        return project.current("train").folder.name
    except ValueError:
        return ""


def file_name(project: str, step: int | str, style: str, which: str = "last") -> str:
    """`cats-001000.safetensors`, and `cats-001000-average-comfyui.safetensors` for the average in the fused form."""
    safe = re.sub(r"[^\w.-]+", "-", project).strip("-.") or "adapter"
    kind = "".join(f"-{word}" for word, usual in ((which, "last"), (style, "diffusers")) if word != usual)
    return f"{safe}-{int(step):06d}{kind}.safetensors"


def export(
    adapter: Path,
    out: Path,
    style: str,
    *,
    dtype: str,
    metadata: dict[str, str],
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """The adapter of the train stage as a file for `style`, one of STYLES, with matrices of `dtype`, one of DTYPES.

    `out` is a file ending in .safetensors, or a folder, where the file is named after metadata's `project`, `step` and `adapter`.
    `metadata` is added to what the adapter itself says. The scale alpha / rank is folded into the arrays: the file is right also
    for readers that look at no metadata. A file that is no export of the same project and style is never replaced.
    """
    _one_of("style", style, tuple(STYLES))
    _one_of("dtype", dtype, DTYPES)
    from stages.models.flux2 import adapter_formats as formats

    _, said = formats.load(adapter)
    arrays, scales = formats.read_adapter(adapter)
    _refuse_infinite(adapter, arrays)
    said = {**said, **metadata}
    name = file_name(said.get("project", adapter.stem), said.get("step", 0), style, said.get("adapter", "last"))
    target = out if out.suffix == ".safetensors" else out / name
    converted = (formats.to_diffusers if style == "diffusers" else formats.to_comfyui)(arrays, scales)
    variant, ranks = formats.variant(arrays), _ranks(converted)
    described = {**_ours(said, style, dtype), **_fields(said, ranks, variant)}
    if style == "diffusers" and variant != "lokr":  # diffusers reads a LoKr's settings from its shapes
        settings = _peft({name.removeprefix("transformer."): rank for name, rank in ranks.items()}, variant)
        described["lora_adapter_metadata"] = json.dumps(settings)
    _check_replaced(target, described, say)
    _write(target, converted, dtype, described)
    if variant in LOADS[style]:
        say(LOADS[style][variant])
    return target


def _ranks(converted: dict[str, Any]) -> dict[str, int]:
    """The rank of each linear in the file; a LoKr of two whole factors has none."""
    from stages.models.flux2.adapter_names import W2_B, A

    return {key.removesuffix(end): value.shape[0] for end in (A, W2_B) for key, value in converted.items() if key.endswith(end)}


def _one_of(what: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"unknown {what} {given!r}; there are {', '.join(choices)}")


def _refuse_infinite(adapter: Path, arrays: dict[str, Any]) -> None:
    import mlx.core as mx

    for key, value in arrays.items():
        if not mx.isfinite(value).all().item():
            raise ValueError(f"{adapter}: {key} holds values that are not finite; the run diverged, export an earlier checkpoint")


def _ours(said: dict[str, str], style: str, dtype: str) -> dict[str, str]:
    """What the adapter and the caller say, plus how this file was made. All values are strings, as safetensors wants them."""
    kept = {key: str(value) for key, value in said.items() if key not in ("format", "lora_adapter_metadata", "scales")}
    made = {"export_style": style, "export_dtype": dtype, "scale": "folded into the arrays", "software": _software()}
    return {**kept, **made, "format": "pt"}


def _fields(said: dict[str, str], ranks: dict[str, int], variant: str) -> dict[str, str]:
    """The same in the field's words (kohya's ss_, Stability's modelspec), for programs that show them."""
    common = str(Counter(ranks.values()).most_common(1)[0][0]) if ranks else ""
    fields = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "diffusers",
        "modelspec.title": said.get("project", ""),
        "modelspec.architecture": f"{said['family']}/{'lokr' if variant == 'lokr' else 'lora'}" if "family" in said else "",
        "modelspec.resolution": said.get("resolution", ""),
        "modelspec.trigger_phrase": said.get("trigger", ""),
        "ss_output_name": said.get("project", ""),
        "ss_base_model_version": said.get("family", ""),
        "ss_steps": said.get("step", ""),
        "ss_network_module": NETWORKS[variant],
        "ss_network_args": json.dumps({"algo": "lokr"}) if variant == "lokr" else "",
        "ss_network_dim": common,
        "ss_network_alpha": common,  # as the file stands: the trained alpha is in the arrays
    }
    return {key: str(value) for key, value in fields.items() if value}


def _peft(ranks: dict[str, int], variant: str) -> dict[str, Any]:
    """The configuration that diffusers hands to PEFT's LoraConfig. alpha = rank, for the scale is in B."""
    common = Counter(ranks.values()).most_common(1)[0][0]
    other = {"^" + re.escape(name): rank for name, rank in ranks.items() if rank != common}
    settings = {
        "transformer.r": common,
        "transformer.lora_alpha": common,
        "transformer.rank_pattern": other,
        "transformer.alpha_pattern": dict(other),
        "transformer.target_modules": list(ranks),
    }
    return settings | {"transformer.use_dora": True} if variant == "dora" else settings


def _software() -> str:
    try:
        return f"latentmill {version('latentmill')}"
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "latentmill"


def _check_replaced(target: Path, described: dict[str, str], say: Callable[[str], None]) -> None:
    """An earlier export of the same project and style may be replaced, and it is said; anything else may not."""
    if not target.exists():
        return
    from stages.models.flux2.adapter_formats import load

    try:
        _, found = load(target)
    except ValueError:
        found = {}
    purpose = ("project", "export_style", "family")
    if "export_style" not in found or any(found.get(key) != described.get(key) for key in purpose):
        made = f"{described['export_style']} export of this project"
        raise ValueError(f"{target} exists and is no {made}; move it away or give another name")
    say(f"replaced {target} (it held step {found.get('step', '?')})")


def _write(target: Path, arrays: dict[str, Any], dtype: str, metadata: dict[str, str]) -> None:
    """Whole or not at all. Matrices have the dtype."""
    import mlx.core as mx

    from stages.models.flux2.adapter_names import EXACT

    wanted = {key: mx.float32 if key.endswith(EXACT) else getattr(mx, dtype) for key in arrays}
    cast = {key: mx.contiguous(value.astype(wanted[key])) for key, value in arrays.items()}
    overflown = [key for key, value in cast.items() if not mx.isfinite(value).all().item()]
    if overflown:
        raise ValueError(f"{overflown[0]} has values too large for {dtype}; export as bfloat16 or float32")
    with atomic_write(target) as temporary:
        temporary.touch()  # a folder that cannot be written says so as the system does; MLX would not
        mx.save_safetensors(str(temporary), cast, metadata)
