"""What `plan` and `init` say about the settings of a text_to_image project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.doctor import ON_CPU
from pipeline.project.config import ProjectConfig
from pipeline.project.weights import NotFetched, find
from pipeline.terminal import format_seconds
from stages.models.family import twin
from stages.settings import setting_path
from stages.text_to_image.families import FAMILIES
from stages.text_to_image.length import AUTO, explanation, steps_of, warnings

if TYPE_CHECKING:
    from pipeline.project.outlook import Need
    from pipeline.project.project import Project
    from stages.models.family import Family
    from stages.text_to_image.samples.config import SamplesConfig

TRANSFORMER = "transformer"
LARGE = 1e9  # bytes of a transformer that is not to be trained on a CPU


def hints(project: Project, needs: Mapping[str, Need]) -> Iterator[str]:
    yield from about_length(project, needs)
    yield from about_previews(project)
    import mlx.core as mx

    if project.family.component_bytes().get(TRANSFORMER, 0) > LARGE and mx.default_device() == mx.cpu and needs["train"].missing:
        yield ON_CPU


def about_length(project: Project, needs: Mapping[str, Need]) -> Iterator[str]:
    """How long training is with steps = "auto", and whether pictures, steps and rank go together."""
    config, pictures, rows = project.config.sections["train"], needs["images"].wanted, needs["train"].wanted
    if not pictures:
        return
    steps = config.steps
    if steps == AUTO:
        steps = rows // config.batch if rows else steps_of(config.passes, pictures, config.batch)
        yield f'train: steps = "auto" is {steps} steps: {explanation(config.passes, pictures, config.batch)}'
    from stages.tuner.loop import schedule_warnings

    yield from (f"train: {line}" for line in schedule_warnings(replace(config, steps=steps)))
    # The published numbers are of released models.
    if project.family.hub:
        yield from warnings(steps, pictures, config.batch, config.rank)


def about_previews(project: Project) -> Iterator[str]:
    """What the twin saves, or would save."""
    drawing, trained, config = project.family_of("samples"), project.family, project.config.sections["samples"]
    other = twin(FAMILIES, trained)
    if drawing is not trained:
        base = replace(config, family="", steps=None, guidance=None)
        slow, fast = (base, trained), (config, drawing)
        told = f"previews: {drawing.name} takes {passes(*fast)} passes each, {trained.name} would take {passes(*slow)}"
    elif other:
        twins = replace(config, family=other.name, steps=None, guidance=None)
        slow, fast = (config, trained), (twins, other)
        told = f'previews: {passes(*slow)} passes each; {passes(*fast)} with [samples] family = "{other.name}"'
    else:
        return
    if seconds := seconds_of_pass(project):
        times = [format_seconds(seconds * passes(*each)) for each in (fast, slow)]
        told += f"; by the last run about {times[0]} a preview instead of {times[1]}"
    yield told


def passes(config: SamplesConfig, family: Family) -> int:
    from stages.text_to_image import sampler

    return (family.sampling_steps if config.steps is None else config.steps) * sampler.passes(config, family)


def seconds_of_pass(project: Project) -> float:
    """By the newest table of previews, decoding included; 0.0 without one."""
    from pipeline.project.recipe import settings_of

    table = project.folder("samples")
    if not table.exists:
        return 0.0
    config: SamplesConfig = project.config.sections["samples"]
    made = table.manifest()["recipe"]["settings"]
    known = {name: made.get(name) for name in settings_of(config) if name in ("steps", "guidance")}
    drawn = replace(config, family=made.get("family", ""), **known)
    family = FAMILIES.get(drawn.family or project.family.name)
    seconds = [each for each in table.rows(columns=["seconds"])["seconds"].to_pylist() if each]
    return sum(seconds) / len(seconds) / passes(drawn, family) if seconds and family else 0.0


def prepare(options: Mapping[str, str]) -> dict[str, str]:
    """`options` of `init`, and where the weights of the family's twin lie if that is on this machine."""
    record = FAMILIES.get(options["family"])
    other = record and twin(FAMILIES, record)
    if not other:
        return dict(options)
    return {**options, "twin": other.name, **found_twin(other, options["weights"], Path(options["project"]))}


def found_twin(other: Family, weights: str, project: Path) -> dict[str, str]:
    """Where the transformer lies: "" for the hub's cache, or a file in the folder of the base's weights. {}: it is not here."""
    folder = setting_path(weights, project).resolve()  # the project does not exist yet
    for file in (folder / name for name in other.single_files.get(TRANSFORMER, ()) if weights):
        if file.is_file():
            return {"twin_weights": str(file)}
    if other.hub:
        try:
            find(ProjectConfig(), project, other, TRANSFORMER, fetch=False)
        except NotFetched:
            return {}
        return {"twin_weights": ""}
    return {}
