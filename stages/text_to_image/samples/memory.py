"""The memory that drawing and decoding take, from shapes alone."""

from __future__ import annotations

import mlx.core as mx

from stages.memory import Forecast, Memory, Outlook, Settings, cheapest
from stages.text_to_image.memory import text_rows
from stages.text_to_image.sampler import cheaper, drawing_memory, evaluations, passes
from stages.text_to_image.samples.config import SamplesConfig
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


def forecast(outlook: Outlook) -> Forecast:
    def peak(settings: Settings) -> int:
        return max(memory.footprint for memory in stage_memory(outlook.changed(settings)))

    config: SamplesConfig = outlook.sections["samples"]
    drawing, decoding = stage_memory(outlook)
    largest = max(drawing, decoding, key=lambda memory: memory.footprint)
    most, part = largest.footprint, "drawing" if largest is drawing else "decoding"
    train = outlook.sections["train"]
    every = None if isinstance(train.steps, str) else -(-train.steps // train.checkpoint_every)
    chosen = config.checkpoints
    checkpoints = {"last": 1, "all": every}[chosen] if isinstance(chosen, str) else len(chosen)
    captions, folders = outlook.sections["captions"], outlook.sections["images"].folder
    of_folders = [] if isinstance(folders, str) else [each.trigger for each in folders]
    triggers = {captions.trigger, *of_folders} - {"", None}
    prompts = len(list(captions.previews(sorted(triggers)))[: config.first_prompts or None])
    return Forecast(
        most,
        row_bytes=int(PNG * config.width * config.height),
        rows=None if checkpoints is None else (checkpoints * len(config.strengths) + config.base) * prompts * len(config.seeds),
        file_bytes=drawing.on_disk,
        how=f"{config.width} x {config.height} px, {config.base_bits or 16} bits, most in {part}",
        find_remedy=lambda: cheapest(peak, outlook.budget, cheaper(config, outlook.family)),
        arrays=largest.peak,
        size=(config.width, config.height, evaluations(config, outlook.family), len(config.references)),
    )
