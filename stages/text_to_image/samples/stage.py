"""The stage `samples`: preview images by the base and by checkpoints of the adapter, drawn from the same noise."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pyarrow as pa

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.samples import SAMPLES
from schemas.text_to_image.train import TRAIN
from stages.models.weights import reading
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image import converted
from stages.text_to_image.packing import STREAMED
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.decoding import decode, save_png
from stages.text_to_image.samples.drawing import DTYPES, LatentSampler, check_file, load_sampler
from stages.text_to_image.samples.grid import write_grid
from stages.text_to_image.samples.memory_plan import drawing_memory, forecast, passes
from stages.text_to_image.samples.references import encode_references, read_reference, reference_id, references_by_prompt
from stages.text_to_image.samples.sources import SampleSource, given_adapter, sample_sources
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.tuner import checkpoint
from stages.tuner.blockwise.device import configure_scheduler, live_memory_limit

LATENTS = "latents"  # artifacts folder of latents that were drawn but not decoded, so that a stopped run draws nothing twice
ID_DIGITS = 16  # hex digits of an id in a file's name
WANTED = ("adapter_id", "step", "caption_id", "prompt", "seed", "width", "height", "reference_id")

Row = dict[str, Any]
References = Mapping[str, Sequence[mx.array]]  # `reference_id` -> the latents of its reference images


def wanted_samples(run: Run[SamplesConfig]) -> pa.Table:
    """One row per preview that should exist. Raises ValueError if a checkpoint or file of the settings is missing or damaged."""
    config = run.config
    captions = sorted(run.inputs.rows(CAPTIONS).to_pylist(), key=lambda row: row["position"])
    prompts = {row["caption_id"]: row["text"] for row in captions if row["role"] == "preview"}
    shown = {paths: reference_id([run.root / name for name in paths]) for paths in set(_references(run, captions).values())}
    references = {prompt: shown[paths] for prompt, paths in _references(run, captions).items()}
    rows = [
        (source.adapter_id, source.step, caption_id, prompt, seed, config.width, config.height, references[prompt])
        for source in sample_sources(run)
        for caption_id, prompt in list(prompts.items())[: config.first_prompts or None]
        for seed in config.seeds
    ]
    schema = pa.schema([SAMPLES.stored.field(name) for name in WANTED])
    return pa.Table.from_pylist([dict(zip(WANTED, row, strict=True)) for row in rows], schema=schema)


def draw_samples(run: Run[SamplesConfig]) -> Iterator[pa.RecordBatch]:
    configure_scheduler()  # must come before the first MLX array
    pending = run.output.pending.to_pylist()
    undrawn = [row for row in pending if not is_drawn(run, row)]
    progress = StepProgress(run, len(undrawn) * (run.config.steps or run.needs["family"].sampling_steps))
    references = _encoded_references(run, undrawn)
    # All latents of a source are drawn before any is decoded, so that the transformer and the autoencoder are never in memory
    # together.
    for source in sample_sources(run):
        rows = [row for row in pending if row["adapter_id"] == source.adapter_id]
        if not rows or run.report.stop():
            continue
        latents = {file_name(row): latent_path(run, row) for row in rows if row not in undrawn}
        latents |= dict(draw_latents(run, source, [row for row in rows if row in undrawn], progress, references))
        mx.clear_cache()  # give the transformer's memory back before the autoencoder is loaded
        for row in decode_latents(run, source, rows, latents):
            yield from SAMPLES.table([row]).to_batches()


def finish_samples(run: Run[SamplesConfig]) -> Iterator[pa.RecordBatch]:
    """Write the grid. Adds no rows."""
    wanted = wanted_samples(run).to_pylist()
    if not wanted:
        run.report.say("no previews to draw: set [captions] preview_prompts, and set [samples] base = true or run train first")
    stored = {tuple(row[name] for name in WANTED): row["path"] for row in run.output.stored.to_pylist()}
    paths = [stored.get(tuple(row.values())) for row in wanted]
    write_grid(run, sample_sources(run), wanted, paths)
    # A later run could still need the latents of previews that do not exist yet.
    if None not in paths:
        shutil.rmtree(run.output.artifacts / LATENTS, ignore_errors=True)
    return iter(())


@dataclass
class StepProgress:
    run: Run[SamplesConfig]
    total: int
    done: int = 0

    def stop_after(self, step: int) -> bool:
        """Report one more step of all; True if the user asked to stop."""
        self.done += 1
        self.run.report.progress(self.done, self.total, "steps")
        return self.run.report.stop()


def _references(run: Run[SamplesConfig], captions: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    prompts = [row["text"] for row in captions if row["role"] == "preview"]
    trigger = next((str(row["text"]) for row in captions if row["role"] == "trigger"), "")
    return references_by_prompt(prompts, run.config.references, run.config.prompt_references or {}, trigger)


def _encoded_references(run: Run[SamplesConfig], rows: Sequence[Row]) -> References:
    """Latents by `reference_id`."""
    paths = _references(run, run.inputs.rows(CAPTIONS).to_pylist())
    wanted = {row["reference_id"]: paths[row["prompt"]] for row in rows if row["reference_id"]}
    if not wanted:
        return {}
    family, path = run.needs["family"], run.needs["autoencoder"]
    autoencoder = family.architecture.load_autoencoder(path, family, mx.float32)
    found = {}
    for name, files in wanted.items():
        found[name] = encode_references(autoencoder, [read_reference(run.root / file) for file in files])
    # The transformer is loaded next.
    del autoencoder
    mx.clear_cache()
    return found


def draw_latents(
    run: Run[SamplesConfig], source: SampleSource, rows: list[Row], progress: StepProgress, references: References
) -> Iterator[tuple[str, Path]]:
    """Draw and store the latent of each row; yield (file_name, path). Ends early if the user asks to stop."""
    if not rows:
        return
    # The sampler's memory limit must suffice for every preview.
    largest = max(references.values(), key=lambda latents: sum(each.size for each in latents), default=[])
    with reading("the transformer", run.report.note):
        sampler = run.reuse(f"sampler {source.adapter_id}", lambda: sampler_for(run, source, largest))
    for row in rows:
        started = time.perf_counter()
        text_1TJ = read_embedding(run, row["caption_id"])
        beside = references.get(row["reference_id"] or "", ())
        latent_1Chw = sampler.draw(text_1TJ, row["seed"], row["width"], row["height"], progress.stop_after, beside)
        if latent_1Chw is None:
            return
        # The time is kept with the latent, since the row is made only when it is decoded, perhaps by a later run.
        arrays, about = {"latents": latent_1Chw}, {"seconds": repr(time.perf_counter() - started)}
        write = partial(checkpoint.write_arrays, arrays=arrays, metadata=about)
        yield file_name(row), run.output.write(f"{LATENTS}/{file_name(row)}.safetensors", write)
        if run.report.stop():
            return


def sampler_for(run: Run[SamplesConfig], source: SampleSource, references: Sequence[mx.array] = ()) -> LatentSampler:
    """`references`: the largest that it will draw with. Raises ValueError if the adapter is damaged or does not fit."""
    config, family, file = run.config, run.needs["family"], source.adapter_file()
    size, dtype = (config.width, config.height), DTYPES[config.precision]
    values = file.stat().st_size // 4 if file else 0  # stored as float32
    if source.given:
        values = check_file(source.given, run.needs["transformer"], family)
    shown, both = [(each.shape[2], each.shape[3]) for each in references], passes(config, family)
    memory = drawing_memory(family, run.needs["transformer"], config, config.precision, size, both, values * dtype.size, shown)
    return load_sampler(
        f"samples: {source.label}",
        run.needs["transformer"],
        family,
        lambda: read_embedding(run, empty_caption(run)),
        [(file, 1.0)] if file else [],
        precision=config.precision,
        packed=config,
        steps=config.steps,
        guidance=config.guidance,
        live_bytes=memory.live_bytes,
        folder=run.output.artifacts.parent / STREAMED,
        copies=run.root / converted.FOLDER,
    )


def decode_latents(run: Run[SamplesConfig], source: SampleSource, rows: list[Row], latents: dict[str, Path]) -> Iterator[Row]:
    """Decode the latents, by file_name, into PNG files; yield complete rows. Ends early if the user asks to stop."""
    drawn = [row for row in rows if file_name(row) in latents]
    if not drawn or run.report.stop():
        return
    family = run.needs["family"]
    path, size = run.needs["autoencoder"], (run.config.height, run.config.width)
    autoencoder = run.reuse("autoencoder", lambda: family.architecture.load_autoencoder(path, family, mx.float32))
    held, work = family.architecture.autoencoder_bytes(path, family, *size, 4, False)
    for row in drawn:
        if run.report.stop():
            return
        started = time.perf_counter()
        loaded: Any = mx.load(str(latents[file_name(row)]), return_metadata=True)
        arrays, about = loaded
        with live_memory_limit(held + work):
            image = decode(autoencoder, arrays["latents"])
        name = f"images/{file_name(row)}.png"
        facts = {"prompt": row["prompt"], "seed": row["seed"], "step": source.step, "adapter_id": source.adapter_id}
        run.output.write(name, partial(save_png, image=image, metadata={**facts, **run.output.provenance}))
        yield {**row, "path": name, "seconds": float(about["seconds"]) + time.perf_counter() - started}


def file_name(row: Row) -> str:
    """The stem of a preview's files: adapter or "base", caption, seed, size such as "1024x768", and a hash of the
    references if any.
    """
    source, caption = row["adapter_id"][:ID_DIGITS] or "base", row["caption_id"][:ID_DIGITS]
    name = f"{source}-{caption}-{row['seed']}-{row['width']}x{row['height']}"
    shown = row.get("reference_id")
    return f"{name}-{hashlib.sha256(shown.encode()).hexdigest()[:ID_DIGITS]}" if shown else name


def latent_path(run: Run[SamplesConfig], row: Row) -> Path:
    return run.output.artifacts / LATENTS / f"{file_name(row)}.safetensors"


def is_drawn(run: Run[SamplesConfig], row: Row) -> bool:
    path = latent_path(run, row)
    return path.exists() and run.inputs.intact(SAMPLES, path.relative_to(run.output.artifacts).as_posix())


def read_embedding(run: Run[SamplesConfig], caption_id: str) -> mx.array:
    """(1, text tokens, features), bfloat16."""
    reader = embedding_reader(run)
    reader.ahead([caption_id])
    return mx.array(reader.read(caption_id)).view(mx.bfloat16)[None]


def opened_files(run: Run[SamplesConfig]) -> Iterator[Path]:
    """The user's files that the stage reads: references and the given adapter."""
    of_prompts = (run.config.prompt_references or {}).values()
    yield from (run.root / name for names in (run.config.references, *of_prompts) for name in names)
    if given := given_adapter(run):
        yield given


def empty_caption(run: Run[SamplesConfig]) -> str:
    ids: list[str] = [row["caption_id"] for row in run.inputs.rows(CAPTIONS).to_pylist() if row["role"] == "empty"]
    assert ids, "captions always holds the empty caption"
    return ids[0]


STAGE = Stage(
    reads=(TRAIN, CAPTIONS, EMBEDDINGS),
    writes=SAMPLES,
    config=SamplesConfig,
    needs=("family", "transformer", "autoencoder"),
    wants=wanted_samples,
    run=draw_samples,
    finish=finish_samples,
    forecast=forecast,
    opens=opened_files,
    result="grid.png",
)
