"""`latentmill publish`: a folder for the Hugging Face hub, with the LoRA, a model card and the previews. It uploads nothing."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from pipeline.commands.adapters import STEP, adapter_of, dtype_option, file_name, run_label, which_option
from pipeline.commands.text_to_image.export import export_run, triggers
from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.store.disk import atomic_folder, delete_abandoned
from pipeline.terminal import Say, say_aside, silent, tell

CARD, GRID, SETTINGS, WEIGHTS = "README.md", "previews.png", "settings.json", "pytorch_lora_weights.safetensors"
PRIVATE = ("train.initial", "train.beneath")  # settings that name files of this machine
SECTIONS = ("buckets", "train")
NOT_STATED = "not stated"
PROMPTS = 4  # previews that the card names as examples


@click.command("publish")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@which_option("lowest validation loss")
@STEP
@dtype_option("bfloat16")
@click.option("--licence", help="Licence of the LoRA.  [default: that of the base model]")
@click.option("--data-licence", default="", help="Who owns the training images, and under which licence they may be used.")
@with_project
def command(
    out: Path | None, which: str, step: int | None, dtype: str, licence: str | None, data_licence: str, project: Project
) -> None:
    """Prepare a folder for the Hugging Face hub. It gets the LoRA in diffusers' format and a model card with previews and
    settings. OUT is a new folder; without OUT, it is made in exports/ of the project. Nothing is uploaded.
    """
    folder = publish(project, out, which=which, step=step, dtype=dtype, licence=licence, data_licence=data_licence, say=say_aside)
    tell(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    words = shlex.join([f"NAME/{project.name}", str(folder)])
    tell(f"read {folder / CARD}; nothing was uploaded. To do it: hf upload {words}")


def publish(
    project: Project,
    out: Path | None = None,
    *,
    which: str = "last",
    step: int | None = None,
    dtype: str = "bfloat16",
    licence: str | None = None,
    data_licence: str = "",
    say: Say = silent,
) -> Path:
    """Write a folder for the hub, completely or not at all: the LoRA, a model card, the settings, and the grid of previews."""
    from pipeline.project.runs import flatten, present_settings
    from stages.models.weights import read_file

    steps = read_file(adapter_of(project, step, silent, which))[1].get("step", 0)
    name = Path(file_name(project.name, run_label(project), steps, "hub", which)).stem
    target = out or project.path / "exports" / name
    if target.exists():
        raise ValueError(f"{target} exists; move it away or choose another name")
    if not data_licence:
        say("the card says that the licence of the training images is not stated: --data-licence TEXT states it")
    delete_abandoned(target.parent)
    with atomic_folder(target) as folder:
        file = export_run(project, folder / WEIGHTS, "diffusers", dtype=dtype, step=step, which=which, say=say)
        facts = read_file(file)[1]
        # What decides the training, without names of files and folders of this machine.
        shown = flatten({name: each for name, each in present_settings(project, "train").items() if name in SECTIONS})
        settings = {key: value for key, value in shown.items() if value not in (None, "") and key not in PRIVATE}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        grid = project.folder("samples").folder / "artifacts" / str(project.stage("samples").result)
        if grid.is_file():
            shutil.copyfile(grid, folder / GRID)
        else:
            say("there are no previews yet, so the card shows none: latentmill samples draws them")
        lines = card(project, facts, settings, licence or project.family.licence, data_licence, grid.is_file())
        (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def card(
    project: Project, facts: Mapping[str, str], settings: Mapping[str, Any], licence: str, data_licence: str, grid: bool
) -> Iterator[str]:
    import pyarrow.compute as pc
    from huggingface_hub import ModelCardData

    family, words = project.family, triggers(project)
    samples = project.folder("samples")
    prompts = list(dict.fromkeys(samples.rows()["prompt"].to_pylist()))[:PROMPTS] if samples.exists else []
    images = project.folder("train").committed().filter(pc.field("split") == "train")["image_id"].unique()
    # Identifiers that the hub knows; any other licence must be called "other" and named apart.
    known = licence.lower() in ("apache-2.0", "mit", "cc0-1.0") or licence.lower().startswith("cc-by")
    about = ModelCardData(
        license=licence.lower() if known else "other",
        license_name=None if known else licence,
        base_model=family.hub or None,
        base_model_relation="adapter" if family.hub else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["text-to-image", "lora", "diffusers", family.architecture.tag],
        instance_prompt=", ".join(words) or None,
        widget=[{"text": prompt, "output": {"url": GRID}} for prompt in prompts if grid] or None,
    )
    yield f"---\n{about.to_yaml()}\n---\n"
    yield f"# {project.name}\n"
    yield f"A LoRA for {family.title}, trained for {facts.get('step', '?')} steps on {len(images)} images.\n"
    if "beneath" in facts:
        yield f"It was trained over other adapters, which are not part of it: {facts['beneath']}.\n"
    if words:
        named = " or ".join(f"`{word}`" for word in words)
        yield f"**Trigger{'s' if words[1:] else ''}:** write {named} into the prompt.\n"
    if grid:
        yield f"![previews: the base model beside the LoRA, by prompt and step]({GRID})\n"
    yield "## Use\n"
    yield "```python"
    yield "import torch"
    modular = family.architecture.modular
    yield f"from diffusers import {'ModularPipeline' if modular else 'DiffusionPipeline'}\n"
    base = family.hub or family.bundled or "FOLDER OF THE BASE"
    if modular:
        yield f"pipe = ModularPipeline.from_pretrained({base!r})"
        yield "pipe.load_components(torch_dtype=torch.bfloat16)"
    else:
        yield f"pipe = DiffusionPipeline.from_pretrained({base!r}, torch_dtype=torch.bfloat16)"
    yield f"pipe.load_lora_weights(FOLDER, weight_name={WEIGHTS!r})"
    prompt = (prompts or words or [""])[0]
    yield f"image = pipe(prompt={prompt!r}, output='images')[0]" if modular else f"image = pipe({prompt!r}).images[0]"
    yield "```\n"
    mflux = f" mflux: `--lora-paths {WEIGHTS}`." if "mflux" in family.architecture.readers else ""
    if family.hub:
        yield f"ComfyUI: copy `{WEIGHTS}` into `models/loras`.{mflux}\n"
    yield "## Licences\n"
    yield f"- this LoRA: {licence}"
    yield f"- base model: {family.licence}"
    yield f"- training images: {data_licence or NOT_STATED}\n"
    yield "## Training\n"
    yield f"Made with {facts.get('software', 'latentmill')}. Settings ({SETTINGS} has them too):\n"
    yield "| setting | value |"
    yield "| --- | --- |"
    for key, value in settings.items():
        cell = json.dumps(value, ensure_ascii=False).replace("|", "\\|")
        yield f"| `{key}` | `{cell}` |"
