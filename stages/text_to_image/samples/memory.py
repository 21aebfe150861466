"""The memory that drawing and decoding take, from shapes alone."""

from __future__ import annotations

import mlx.core as mx

from schemas.text_to_image import TRAIN
from stages.memory import Forecast, Memory, Outlook, Settings, cheapest
from stages.text_to_image.memory import text_rows
from stages.text_to_image.sampler import cheaper, drawing_memory, evaluations, passes
from stages.text_to_image.samples.config import SamplesConfig
from stages.tuner.checkpoint import PASSING, find_checkpoints
from stages.tuner.step import choose_targets

PNG = 1.5  # bytes per pixel of a preview on disk, about


def stage_memory(outlook: Outlook) -> tuple[Memory, Memory]:
    """Of drawing and of decoding."""
    config: SamplesConfig = outlook.sections["samples"]
    family, weights, size = outlook.family, outlook.weights("transformer"), (config.width, config.height)
    if not config.references and not config.prompt_references:
        family = family.without_references()
    architecture = family.architecture
    linears = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32).linears()
    # The adapter is as large as [train] makes it.
    targets = choose_targets(linears, outlook.sections["train"])
    values = sum(shape[0] * shape[-1] for target in targets for shape in target.shapes.values())
    adapter = values * getattr(mx, config.precision).size
    both, rows = passes(config, family), text_rows(outlook)
    drawing = drawing_memory(family, weights, config, config.precision, size, both, adapter, rows=rows)
    decoder = outlook.weights("autoencoder")
    return drawing, architecture.autoencoder_memory(decoder, family, config.height, config.width, 4, False)


def checkpoints_after(outlook: Outlook) -> int | None:
    """At most so many will be drawn of a run at its last step: those that it has already and those to come. None: not known."""
    config = outlook.sections["train"]
    if isinstance(config.steps, str):
        return None
    last, artifacts = config.steps, outlook.files(TRAIN)
    saved = [one for one in find_checkpoints(artifacts) if one.step <= last] if artifacts else []
    start = next((one.step for one in saved if one.whole(*one.state["files"])), 0)
    grids = [config.checkpoint_every, *([config.validation.every] if config.validation else [])]  # the best measurement is kept
    coming = {step for every in grids for step in range(every, last, every) if step > start} | {last}
    return len(coming | {one.step for one in saved if not one.state.keys() & PASSING})


def forecast(outlook: Outlook) -> Forecast:
    def peak(settings: Settings) -> int:
        return max(memory.footprint for memory in stage_memory(outlook.changed(settings)))

    config: SamplesConfig = outlook.sections["samples"]
    drawing, decoding = stage_memory(outlook)
    largest = max(drawing, decoding, key=lambda memory: memory.footprint)
    most, part = largest.footprint, "drawing" if largest is drawing else "decoding"
    chosen, train, all_of_them = config.checkpoints, outlook.sections["train"], checkpoints_after(outlook)
    checkpoints = {"last": 1, "all": all_of_them}[chosen] if isinstance(chosen, str) else len(chosen)
    captions, folders = outlook.sections["captions"], outlook.sections["images"].folder
    of_folders = [] if isinstance(folders, str) else [each.trigger for each in folders]
    triggers = {captions.trigger, *of_folders} - {"", None}
    prompts = len(list(captions.previews(sorted(triggers)))[: config.first_prompts or None])
    return Forecast(
        most,
        row_bytes=int(PNG * config.width * config.height),
        rows=None
        if checkpoints is None
        else ((checkpoints + bool(config.adapter)) * len(config.strengths) + config.base) * prompts * len(config.seeds),
        at_most=chosen == "all" and train.validation is not None,
        file_bytes=drawing.on_disk,
        how=f"{config.width} x {config.height} px, {config.base_bits or 16} bits, most in {part}",
        find_remedy=lambda: cheapest(peak, outlook.budget, cheaper(config, outlook.family)),
        arrays=largest.peak,
        size=(config.width, config.height, evaluations(config, outlook.family), len(config.references)),
    )
