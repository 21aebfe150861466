"""How pictures are drawn: `draw_pictures`, for the stage `samples`, `latentmill generate` and `project.adapter().generate`."""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from schemas.text_to_image import SAMPLES
from stages.models.family import Autoencoder
from stages.models.weights import reading
from stages.run import Run
from stages.text_to_image.beneath import drawn_of, read_beneath
from stages.text_to_image.imaging.decode import BACKGROUND, CEILING_BYTES, ImageError, open_image
from stages.text_to_image.sampler import MULTIPLE, Adapters, LatentSampler, load_sampler, passes
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.weights import CONVERTED, STREAMED, meta_transformer
from stages.tuner import checkpoint
from stages.tuner.blockwise.device import configure_scheduler, live_memory_limit
from stages.untrusted import read_bytes

LATENTS = "latents"  # artifacts folder of latents that were drawn but not decoded, so that a stopped run draws nothing twice
MOST = 1024 * 1024  # pixels of a reference; a larger one is reduced
SHORTEST, LONGEST = 64, 8  # of a reference: the shorter side in pixels, and the largest aspect ratio that diffusers takes

Paths = tuple[Path, ...]


@dataclass(frozen=True)
class Picture:
    name: str  # of its files, unique among those of the table
    prompt: str  # what `draw_pictures` asks for its embedding by
    seed: int
    references: Paths = ()
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the caller's own


@dataclass(frozen=True)
class Drawn:
    picture: Picture
    image: Image.Image
    seconds: float  # of denoising, perhaps in an earlier run
    decoding: float  # seconds


def draw_pictures(
    run: Run[SamplesConfig],
    groups: Sequence[tuple[Adapters, Sequence[Picture]]],
    empty: Callable[[], str],
    read_prompts: Callable[[Sequence[str]], Callable[[str], mx.array]],
) -> Iterator[Drawn]:
    """Ends early if the user asks to stop. Drawn latents are artifacts, which the caller deletes once it has committed the
    pictures: until then, nothing is drawn twice.

    `read_prompts(prompts)` gives a function from a prompt to its embedding, bfloat16 (1, T, J). `empty()`: the empty prompt.
    """
    configure_scheduler()  # must come before the first MLX array
    every = {each.name: each for _, pictures in groups for each in pictures}
    paths = {name: latent_path(run, each) for name, each in every.items()}
    latents = {
        name: path
        for name, path in paths.items()
        if path.exists() and run.inputs.intact(SAMPLES, path.relative_to(run.output.artifacts).as_posix())
    }
    undrawn = [each for name, each in every.items() if name not in latents]
    config, family = run.config, run.needs["family"]
    done, total = 0, len(undrawn) * (config.steps or family.sampling_steps)

    def stop_after() -> bool:
        nonlocal done
        done += 1
        run.report.progress(done, total, "steps")
        return run.report.stop()

    references = _encode_references(run, {each.references for each in undrawn} - {()})
    prompts = list(dict.fromkeys(each.prompt for each in undrawn))
    embedding = read_prompts([*prompts, empty()] if prompts and passes(config, family) > 1 else prompts)
    # All latents of a group are drawn before any is decoded, so that the transformer and the autoencoder are never in memory
    # together.
    for adapters, pictures in groups:
        if not pictures or run.report.stop():
            continue
        if coming := [each for each in pictures if each.name not in latents]:
            largest = max(references.values(), key=lambda latents: sum(each.size for each in latents), default=[])
            loaded = (family if largest else family.without_references()).references

            def load(adapters: Adapters = adapters, largest: Sequence[mx.array] = largest) -> LatentSampler:
                places = run.output.artifacts.parent / STREAMED, run.root / CONVERTED
                negative = lambda: embedding(empty())  # noqa: E731
                path = run.needs["transformer"]
                beneath = read_beneath(drawn_of(config.beneath), run.root, family, meta_transformer(path, family).linears())
                weigh = config.strength_for
                return load_sampler(adapters, path, family, config, negative, largest, *places, run.report.say, beneath, weigh)

            with reading("the transformer", run.report.note):
                sampler = run.reuse(f"sampler {adapters.adapter_id} {loaded}", load)
            for each in coming:
                text_1TJ, beside, started = embedding(each.prompt), references.get(each.references, ()), time.perf_counter()
                latent_1Chw = sampler.draw(text_1TJ, each.seed, config.width, config.height, stop_after, beside)
                if latent_1Chw is None:
                    break
                # Kept with the latent, since the picture is made only when it is decoded, perhaps by a later run.
                about = {"seconds": repr(time.perf_counter() - started)}
                write = partial(checkpoint.write_arrays, arrays={"latents": latent_1Chw}, metadata=about)
                latents[each.name] = run.output.write(f"{LATENTS}/{each.name}.safetensors", write)
                if run.report.stop():
                    break
            del sampler
            mx.clear_cache()  # give the transformer's memory back before the autoencoder is loaded
        yield from _decode(run, {each: latents[each.name] for each in pictures if each.name in latents})


def _decode(run: Run[SamplesConfig], drawn: Mapping[Picture, Path]) -> Iterator[Drawn]:
    if not drawn or run.report.stop():
        return
    family, path, size = run.needs["family"], run.needs["autoencoder"], (run.config.height, run.config.width)
    autoencoder = load_autoencoder(run)
    limit = family.architecture.autoencoder_memory(path, family, *size, 4, False).live
    for picture, latent in drawn.items():
        if run.report.stop():
            return
        started = time.perf_counter()
        loaded: Any = mx.load(str(latent), return_metadata=True)
        arrays, about = loaded
        with live_memory_limit(limit):
            image = decode(autoencoder, arrays["latents"])
        yield Drawn(picture, image, float(about["seconds"]), time.perf_counter() - started)


def load_autoencoder(run: Run[SamplesConfig]) -> Autoencoder:
    family, path = run.needs["family"], run.needs["autoencoder"]
    found: Autoencoder = run.reuse(
        f"autoencoder in {mx.float32}", lambda: family.architecture.load_autoencoder(path, family, mx.float32)
    )
    return found


def latent_path(run: Run[SamplesConfig], picture: Picture) -> Path:
    return run.output.artifacts / LATENTS / f"{picture.name}.safetensors"


def decode(autoencoder: Autoencoder, latent_1Chw: mx.array) -> Image.Image:
    """An 8-bit RGB image. `latent_1Chw`: normalised, (1, channels, height / 16, width / 16)."""
    image_BHWC = mx.clip(mx.round((autoencoder.decode(latent_1Chw) + 1) * 127.5), 0, 255)
    return Image.fromarray(np.array(image_BHWC[0].astype(mx.uint8)))


def save_png(path: Path, image: Image.Image, metadata: Mapping[str, Any]) -> None:
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, str(value))
    image.save(path, format="PNG", pnginfo=info)


# References: images that a picture starts from


def read_reference(file: Path, background: str = BACKGROUND) -> Image.Image:
    """RGB, upright and cut to size. Raises ValueError if it cannot be read, or has a shape that diffusers refuses."""
    try:
        image = open_image(io.BytesIO(read_bytes(file, CEILING_BYTES)), background)
    except ImageError as error:
        raise ValueError(f"the reference {file} cannot be used: {error.detail}") from None
    short, long = sorted(image.size)
    if short < SHORTEST or long > LONGEST * short:
        raise ValueError(
            f"the reference {file} must have sides of at least {SHORTEST} pixels and an aspect ratio of at most {LONGEST}, "
            f"got {image.width} x {image.height}"
        )
    return cut_reference(image)


def cut_reference(image: Image.Image) -> Image.Image:
    """As diffusers does: reduced to an area of at most `MOST`, then cut evenly to sides that are multiples of 16 pixels."""
    if image.width * image.height > MOST:
        scale = math.sqrt(MOST / (image.width * image.height))
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)
    width, height = (side // MULTIPLE * MULTIPLE for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def reference_id(files: Iterable[Path], background: str = BACKGROUND) -> str | None:
    """sha256 of each file, and of a background that is not white, joined by "+"; None without files. ValueError for an unreadable
    file.
    """
    laid_on = b"" if background == BACKGROUND else background.encode()
    try:
        return "+".join(hashlib.sha256(read_bytes(file, CEILING_BYTES) + laid_on).hexdigest() for file in files) or None
    except ValueError as error:
        raise ValueError(f"the reference {error}") from None


def _encode_references(run: Run[SamplesConfig], wanted: Iterable[Paths]) -> dict[Paths, list[mx.array]]:
    """One float32 latent (1, channels, height / 16, width / 16) per file."""
    background = run.config.background or BACKGROUND
    images = {files: [read_reference(file, background) for file in files] for files in wanted}
    if not images:
        return {}
    run.needs["family"].require_references()
    autoencoder = load_autoencoder(run)
    found = {files: [encode_image(autoencoder, image) for image in own] for files, own in images.items()}
    # The transformer is loaded next.
    del autoencoder
    mx.clear_cache()
    return found


def encode_image(autoencoder: Autoencoder, image: Image.Image) -> mx.array:
    """float32 (1, channels, height / 16, width / 16)."""
    latent_1Chw = autoencoder.encode(mx.array(np.asarray(image))[None].astype(mx.float32) / 127.5 - 1.0).astype(mx.float32)
    # MLX is lazy: without this, the work of all encodings would wait and run together.
    mx.eval(latent_1Chw)
    return latent_1Chw
