"""`latentmill export`: writes a trained adapter for other programs, as a file or merged into the transformer's weights."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.adapters import STEP, STRENGTH_FOR, adapter_of, dtype_option, file_name, run_label, which_option
from pipeline.options import with_project
from pipeline.store.disk import atomic_folder, atomic_write, delete_abandoned, require_room
from pipeline.terminal import Say, say_aside, silent, tell

if TYPE_CHECKING:
    import mlx.core as mx

    from pipeline.project.project import Project
    from stages.models.family import Adapter, Family
    from stages.tuner.adapters.combine import Part

STYLES = ("diffusers", "comfyui")
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
NETWORKS = {"lora": "networks.lora", "dora": "networks.lora", "lokr": "lycoris.kohya"}  # variant -> kohya's ss_network_module
STEM = "diffusion_pytorch_model"  # of the names of merged weight files, as diffusers expects them
PACKING = ("quantization", "quantization_config")  # in a config.json of packed weights; merged ones are not packed
SHARD = 4 << 30  # the largest size of a merged weight file, bytes; as much is held in memory


@click.command("export")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--style",
    type=click.Choice(list(STYLES)),
    default="diffusers",
    show_default=True,
    help="diffusers: its names of Linears, which ComfyUI maps. comfyui: ComfyUI's prefix before Black Forest Labs' names, with "
    "q, k and v in one Linear for FLUX.2 but not for FLUX 3 (which names ComfyUI reads there is not known), and before "
    "diffusers' names for Z-Image. Of a DoRA, ComfyUI reads only comfyui.",
)
@dtype_option("bfloat16")
@STEP
@which_option("lowest validation loss")
@click.option("--merged", is_flag=True, help="Write the whole transformer with the adapter merged into its weights.")
@click.option(
    "--beneath",
    is_flag=True,
    help="Also what lies beneath the adapter and is drawn ([[train.beneath]]): one file that draws as the previews do.",
)
@STRENGTH_FOR
@with_project
def command(
    out: Path | None,
    style: str,
    dtype: str,
    step: int | None,
    which: str,
    merged: bool,
    beneath: bool,
    strength_for: dict[str, float],
    project: Project,
) -> None:
    """Write the trained adapter as a file for other programs. OUT is a file ending in .safetensors, or a folder.
    Without OUT, the file is written to exports/ in the project. With --merged, OUT is a new folder for the whole
    transformer with the adapter merged in.
    """
    if merged and style != "diffusers":
        raise ValueError(f"--merged writes the diffusers layout; leave out --style {style}")
    more: dict[str, Any] = {"dtype": dtype, "step": step, "which": which, "say": say_aside}
    more |= {"beneath": beneath, "strength_for": strength_for}
    if merged:
        tell(f"wrote {merge_run(project, out, **more)}")
    else:
        written = export_run(project, out, style, **more)
        tell(f"wrote {written}")
        for line in what_to_do(project, written, style):
            tell(line)


def export_run(
    project: Project,
    out: Path | None,
    style: str,
    *,
    dtype: str,
    step: int | None = None,
    which: str = "last",
    say: Say = silent,
    beneath: bool = False,
    strength_for: Mapping[str, float] | None = None,
) -> Path:
    """`out`: a file or folder; None: exports/. For the rest see `adapter_of` and `write_adapter`."""
    adapter = adapter_of(project, step, say, which)
    about = {"project": project.name, "adapter": which, "run": run_label(project), **use_of(project)}
    parts = parts_beneath(project) if beneath else ()
    about |= {"beneath": "joined into the arrays"} if beneath else {}
    about |= {"strength_for": json.dumps(strength_for)} if strength_for else {}
    # Such a file does not replace the plain one.
    words = [*([] if which == "last" else [which]), *(["beneath"] if beneath else []), *(["weighted"] if strength_for else [])]
    about["adapter"] = "-".join(words) or which
    more: dict[str, Any] = {"metadata": about, "beneath": parts, "strength_for": strength_for}
    return write_adapter(adapter, project.family, out or project.path / "exports", style, dtype=dtype, say=say, **more)


def parts_beneath(project: Project) -> list[Part]:
    """The adapters beneath that are drawn. Raises ValueError if there is none."""
    from stages.text_to_image.beneath import drawn_of, read_beneath
    from stages.text_to_image.weights import meta_transformer

    entries = drawn_of(project.config.sections["samples"].beneath)
    if not entries:
        raise ValueError("--beneath: nothing that is drawn lies beneath the adapter; leave it out, or see [[train.beneath]]")
    return read_beneath(entries, project.path, project.family, meta_transformer(None, project.family).linears())


def triggers(project: Project) -> list[str]:
    """Of all subjects: that of [captions], then those of [[images.folder]]."""
    sections = project.config.sections
    folders = getattr(sections.get("images"), "folder", "")
    own = [each.trigger for each in folders if each.trigger] if isinstance(folders, tuple) else []
    return list(dict.fromkeys([*filter(None, [getattr(sections.get("captions"), "trigger", "")]), *own]))


def use_of(project: Project) -> dict[str, str]:
    """For an adapter's header: the trigger words, and the largest training resolution such as "768x768"."""
    sizes = getattr(project.config.sections.get("buckets"), "resolutions", ())
    found = {"trigger": ", ".join(triggers(project)), "resolution": f"{max(sizes)}x{max(sizes)}" if sizes else ""}
    return {key: value for key, value in found.items() if value}


def what_to_do(project: Project, file: Path, style: str) -> Iterator[str]:
    words = triggers(project) or [""]
    prompt, *others = [f"{word}, ..." if word else "..." for word in words]
    also = "".join(f' or "{each}"' for each in others)
    if style == "diffusers":
        yield "with diffusers, after the base model is loaded as `pipe`:"
        yield f"  pipe.load_lora_weights({str(file.parent)!r}, weight_name={file.name!r}); pipe({prompt!r})"
    if project.family.hub:
        yield f'with ComfyUI: copy it into models/loras and put a LoraLoader behind the model; the prompt: "{prompt}"{also}'
    else:
        yield f"ComfyUI does not know {project.family.name}, a small model to try the program with: look at it here"
    uses = {"mflux": f"--lora-paths {shlex.quote(str(file))} --lora-scales 1.0", "Draw Things": "import it as a LoRA"}
    if style == "diffusers" and (readers := project.family.architecture.readers):
        yield "; ".join(f"with {name}: {uses[name]}" for name in readers)
    yield f'or here: latentmill generate "{prompt}" --adapter {shlex.quote(str(file))}'


def merge_run(
    project: Project,
    out: Path | None,
    *,
    dtype: str,
    step: int | None = None,
    which: str = "last",
    say: Say = silent,
    beneath: bool = False,
    strength_for: Mapping[str, float] | None = None,
) -> Path:
    """Write the transformer with an adapter merged in; `out` None: a folder in exports/. Raises ValueError if it exists."""
    from stages.models.weights import read_file

    adapter = adapter_of(project, step, say, which)
    step_trained = read_file(adapter)[1].get("step", 0)
    style, parts = ("merged-beneath", parts_beneath(project)) if beneath else ("merged", [])
    style += "-weighted" if strength_for else ""
    name = Path(file_name(project.name, run_label(project), step_trained, style, which)).stem
    # An export downloads nothing.
    base = project.component("transformer", fetch=False)
    more: dict[str, Any] = {"beneath": parts, "strength_for": strength_for}
    return write_merged(base, project.family, adapter, out or project.path / "exports" / name, dtype=dtype, **more)


# An adapter as a file


def write_adapter(
    adapter: Path,
    family: Family,
    out: Path,
    style: str,
    *,
    dtype: str,
    metadata: dict[str, str],
    say: Say = silent,
    beneath: Sequence[Part] = (),
    strength_for: Mapping[str, float] | None = None,
) -> Path:
    """Convert an adapter file for other programs, into a file or folder; ValueError if a value of it is not finite. `beneath`:
    plain LoRAs that are joined with it. `strength_for`: factors of the adapter by pattern of Linears.
    """
    from stages.models.weights import read_file
    from stages.tuner.adapters.combine import join, weighted

    arrays = weighted(*read(family, adapter), strength_for) if strength_for else read(family, adapter)
    if beneath:
        arrays = join([*beneath, (*arrays, 1.0)])
    about = {**read_file(adapter)[1], **metadata}
    parts = about.get("project", adapter.stem), about.get("run", ""), about.get("step", 0), style, about.get("adapter", "last")
    target = in_folder(out, file_name(*parts))
    # Runs may have had one name one after the other.
    of = "project" if target == out else "run"
    return write_arrays(arrays, family, target, style, dtype=dtype, about=about, of=of, say=say)


def in_folder(out: Path, name: str) -> Path:
    """The file that a user means by `out`: itself, or `name` in this folder. Raises ValueError for another kind of file."""
    if out.suffix == ".safetensors":
        return out
    if out.is_file() or (re.fullmatch(r"\.[a-z]{2,5}", out.suffix.lower()) and not out.is_dir()):
        raise ValueError(f"{out} must end in .safetensors or be a folder; a new folder's name has no suffix like {out.suffix!r}")
    return out / name


def read(family: Family, file: Path) -> Adapter:
    """(arrays, scales) of an adapter. Raises ValueError if a value is not finite."""
    from stages.models.adapters import first_not_finite

    arrays, scales = family.architecture.read_adapter(file)
    if key := first_not_finite(arrays):
        raise ValueError(f"{file}: {key} holds values that are not finite; the run diverged, take an earlier checkpoint")
    return arrays, scales


def write_arrays(
    adapter: Adapter,
    family: Family,
    target: Path,
    style: str,
    *,
    dtype: str,
    about: dict[str, str],
    of: str = "project",
    say: Say = silent,
) -> Path:
    """Write (arrays, scales) in the names of `style`, scales multiplied in; replaces only an earlier export of this kind.

    `of`: "project", or "run" to replace only an export of the same run.
    """
    import mlx.core as mx

    from stages.models import adapters
    from stages.models.weights import read_file

    arrays, scales = adapter
    # Folds the scales in: a reader that ignores metadata gets the right change.
    converted = family.architecture.adapter_styles[style](arrays, scales)
    variant = adapters.variant(arrays)
    metadata = header(about, style, dtype, adapters.ranks(converted), variant)
    if target.exists():
        try:
            _, found = read_file(target)
        except ValueError:
            found = {}
        purpose = ("project", "export_style", "family", *(["recipe"] if of == "run" else []))
        if "export_style" not in found or any(found.get(key) != metadata.get(key) for key in purpose):
            raise ValueError(f"{target} exists and is not a {style} export of this {of}; move it away or choose another name")
        say(f"replaced {target} (it held step {found.get('step', '?')})")
    # DoRA magnitudes and alphas stay float32.
    dtypes = {key: mx.float32 if key.endswith(adapters.EXACT) else getattr(mx, dtype) for key in converted}
    cast = {key: mx.contiguous(value.astype(dtypes[key])) for key, value in converted.items()}
    if key := adapters.first_not_finite(cast):
        raise ValueError(f"{key} has values too large for {dtype}; export as bfloat16 or float32")
    delete_abandoned(target.parent)
    require_room(f"the export {target.name}", [(target.parent, sum(value.nbytes for value in cast.values()))])
    with atomic_write(target) as temporary:
        temporary.touch()  # reports a folder that cannot be written as the system does; MLX would not
        mx.save_safetensors(str(temporary), cast, metadata)
    if variant in READERS[style]:
        say(READERS[style][variant])
    return target


# Its header, with the keys of this program, of PEFT, of kohya and of Stability's modelspec


def header(about: dict[str, str], style: str, dtype: str, ranks: dict[str, int], variant: str) -> dict[str, str]:
    """Field -> text, as safetensors requires. `ranks`: name of a Linear in the file -> rank; `variant`: a key of `NETWORKS`."""
    try:
        software = f"latentmill {version('latentmill')}"
    except PackageNotFoundError:  # run from a checkout that was never installed
        software = "latentmill"
    common = Counter(ranks.values()).most_common(1)[0][0] if ranks else 0
    # Entries that do not hold for the exported file, such as the scales, stay behind.
    kept = {key: value for key, value in about.items() if key not in ("format", "lora_adapter_metadata", "scales")}
    ours = {"export_style": style, "export_dtype": dtype, "scale": "folded into the arrays", "software": software}
    others = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "diffusers",
        "modelspec.title": about.get("project"),
        "modelspec.architecture": f"{about['family']}/{'lokr' if variant == 'lokr' else 'lora'}" if "family" in about else "",
        "modelspec.resolution": about.get("resolution"),
        "modelspec.trigger_phrase": about.get("trigger"),
        "ss_output_name": about.get("project"),
        "ss_base_model_version": about.get("family"),
        "ss_steps": about.get("step"),
        "ss_network_module": NETWORKS[variant],
        "ss_network_args": json.dumps({"algo": "lokr"}) if variant == "lokr" else "",
        "ss_network_dim": common,
        "ss_network_alpha": common,  # the trained alpha is folded into the arrays
    }
    fields = {**kept, **ours, "format": "pt", **{key: value for key, value in others.items() if value}}
    if style == "diffusers" and variant != "lokr":  # diffusers reads the settings of a LoKr from its shapes
        # PEFT's LoraConfig under the prefix "transformer.", as diffusers reads it.
        linears = {name.removeprefix("transformer."): rank for name, rank in ranks.items()}
        pattern = {"^" + re.escape(name): rank for name, rank in linears.items() if rank != common}
        # Alpha equals the rank, so PEFT scales by 1: the trained scale is in the arrays.
        settings = {"r": common, "lora_alpha": common, "rank_pattern": pattern, "alpha_pattern": pattern}
        settings |= {"target_modules": list(linears), **({"use_dora": True} if variant == "dora" else {})}
        fields["lora_adapter_metadata"] = json.dumps({f"transformer.{key}": value for key, value in settings.items()})
    return {key: str(value) for key, value in fields.items()}


# The transformer with the adapter merged in, as a folder in the diffusers layout


def write_merged(
    base: Path,
    family: Family,
    adapter: Path,
    out: Path,
    *,
    dtype: str,
    beneath: Sequence[Part] = (),
    strength_for: Mapping[str, float] | None = None,
) -> Path:
    """Merge in float32, round once to `dtype`, and write the new folder `out`, completely or not at all. `beneath`: what is
    merged before the adapter. `strength_for`: factors of the adapter by pattern of Linears.
    """
    import mlx.core as mx

    from stages.models.adapters import of_linear
    from stages.models.folders import component_config
    from stages.tuner.adapters import lora
    from stages.tuner.adapters.combine import weighted

    if out.exists():
        raise ValueError(f"{out} exists; move it away or choose another name")
    architecture = family.architecture
    sizes = component_config(base, family.transformer)
    config = {"_class_name": architecture.transformer_class} | {key: sizes[key] for key in sizes if key not in PACKING}
    arrays, scales = weighted(*architecture.read_adapter(adapter), strength_for)
    shapes = architecture.transformer_config(base, family).shapes()
    lora.check_fits({name.removesuffix(".weight"): shape for name, shape in shapes.items()}, arrays, scales)
    delete_abandoned(out.parent)
    require_room(f"the merged model {out.name}", [(out.parent, getattr(mx, dtype).size * sum(map(math.prod, shapes.values())))])
    with atomic_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        pending: dict[str, mx.array] = {}
        written: list[dict[str, int]] = []  # for each file, bytes by key

        def write_pending() -> None:
            mx.save_safetensors(str(folder / f"{len(written)}.safetensors"), pending, {"format": "pt"})
            written.append({key: value.nbytes for key, value in pending.items()})
            pending.clear()

        def write(key: str, weight: mx.array) -> mx.array:
            name = key.removesuffix(".weight")
            for own, factors, strength in [*beneath, (arrays, scales, 1.0)]:
                if name in factors:
                    weight = lora.merge(weight.astype(mx.float32), of_linear(dict(own), name), factors[name] * strength)
            value = weight.astype(getattr(mx, dtype))
            if pending and sum(each.nbytes for each in pending.values()) + value.nbytes > SHARD:
                write_pending()
            # One at a time: saving would compute all pending weights at once.
            mx.eval(value)
            pending[key] = value
            return mx.zeros(0)  # frees the weight

        # `arrange` sees one weight at a time, so that the transformer is never in memory as a whole.
        architecture.load_transformer(base, family, arrange=write)
        write_pending()
        count = len(written)
        # A name contains the number of files, which is known only now.
        several = [f"{STEM}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        names = several if count > 1 else [f"{STEM}.safetensors"]
        for n, name in enumerate(names):
            (folder / f"{n}.safetensors").rename(folder / name)
        if count > 1:
            files = {key: name for name, keys in zip(names, written, strict=True) for key in keys}
            index = {"metadata": {"total_size": sum(sum(keys.values()) for keys in written)}, "weight_map": files}
            (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return out
