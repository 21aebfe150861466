"""`project.adapter()` of the Python API: a trained adapter, and images drawn with it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx
    from PIL.Image import Image

    from pipeline.project.project import Project
    from stages.text_to_image.samples.config import SamplesConfig


def adapter(project: Project, which: str = "last", step: int | None = None) -> Adapter:
    """An adapter that the project trained, to draw images with it.

    `which` is "last" (as trained), "average" (the moving average, [train.ema]) or "best" (by validation loss,
    [train.validation]). `step` is a checkpoint; None takes the end of the run. Raises ValueError, with the checkpoints, if
    there is none.
    """
    from pipeline.commands.export import adapter_of
    from stages.models.weights import read_file

    project.refresh()
    path = adapter_of(project, step, lambda line: None, which)
    return Adapter(project, path, int(read_file(path)[1]["step"]))


@dataclass(frozen=True)
class Adapter:
    """A trained adapter that draws images with `generate`."""

    project: Project
    path: Path
    step: int  # at which it was saved

    def generate(
        self,
        prompt: str,
        *,
        seed: int = 0,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        strength: float = 1.0,
        others: Sequence[tuple[Adapter | Path, float]] = (),
        references: Sequence[Path] = (),
    ) -> Image:
        """Draw one image. `prompt` is used unchanged, so it should contain the trigger word.

        None takes `width`, `height` (pixels), `steps` and `guidance` from [samples]; the image then equals the preview of
        that prompt and seed. `strength` is 1 as trained, 0 the base model. `others` are further (adapter or file, strength)
        pairs, whose changes are added. `references` are images to start from, for adapters trained to edit. Raises ValueError
        if a size is not a multiple of 16 or a value is out of bounds.
        """
        config: SamplesConfig = self.project.config.sections["samples"]
        given: dict[str, Any] = {"width": width, "height": height, "steps": steps, "guidance": guidance}
        config = replace(config, seeds=(seed,), **{name: value for name, value in given.items() if value is not None})
        text_1TJ, empty_1TJ = encode(self.project, [prompt, ""])
        beside = encode_files(self.project, references)
        size = (config.width, config.height)
        further = [(each.path if isinstance(each, Adapter) else each, factor) for each, factor in others]
        adapters = [(self.path, strength), *further]
        latent_1Chw = self._draw(text_1TJ, empty_1TJ, seed, size, config.steps, config.guidance, adapters, beside)
        return decode_latent(self.project, latent_1Chw)

    def _draw(
        self,
        text_1TJ: mx.array,
        empty_1TJ: mx.array,
        seed: int,
        size: tuple[int, int],
        steps: int | None,
        guidance: float | None,
        adapters: Sequence[tuple[Path, float]],
        references: Sequence[mx.array],
    ) -> mx.array:
        from stages.text_to_image import converted
        from stages.text_to_image.packing import STREAMED
        from stages.text_to_image.samples.drawing import load_sampler

        sampler = load_sampler(
            f"step {self.step}",
            self.project.component("transformer"),
            self.project.family,
            lambda: empty_1TJ,
            adapters,
            precision=self.project.config.sections["samples"].precision,
            packed=self.project.config.sections["samples"],
            folder=self.project.path / STREAMED,
            copies=self.project.path / converted.FOLDER,
            steps=steps,
            guidance=guidance,
        )
        latent_1Chw = sampler.draw(text_1TJ, seed, *size, references=references)
        assert latent_1Chw is not None
        del sampler
        release()
        return latent_1Chw


def encode(project: Project, texts: Sequence[str]) -> list[mx.array]:
    """A bfloat16 array (1, tokens with padding, features) per text."""
    import mlx.core as mx

    from stages.text_to_image.embeddings.memory_plan import load_encoder

    family = project.family
    family.require("text_encoder")
    weights, tokenizer = (project.component(name) for name in ("text_encoder", "tokenizer"))
    encoder = load_encoder(family, weights, tokenizer, project.config.sections["embeddings"])
    embeddings = [mx.array(each.words).view(mx.bfloat16)[None] for each in encoder.encode(list(texts))]
    # Each model is loaded for one call: text encoder, transformer and autoencoder are never in memory together.
    del encoder
    release()
    return embeddings


def encode_files(project: Project, files: Sequence[Path]) -> list[mx.array]:
    """A float32 latent (1, channels, height / 16, width / 16) per image, reduced to 1024 x 1024 pixels, sides multiples of 16.

    Raises ValueError if a file is no usable image.
    """
    import mlx.core as mx

    from stages.text_to_image.samples.references import encode_references, read_reference

    if not files:
        return []
    images, family = [read_reference(file) for file in files], project.family
    found = encode_references(family.architecture.load_autoencoder(project.component("autoencoder"), family, mx.float32), images)
    release()
    return found


def decode_latent(project: Project, latent_1Chw: mx.array) -> Image:
    """The PIL image of a latent (1, channels, height / 16, width / 16)."""
    import mlx.core as mx

    from stages.text_to_image.samples.decoding import decode

    family = project.family
    autoencoder = family.architecture.load_autoencoder(project.component("autoencoder"), family, mx.float32)
    image = decode(autoencoder, latent_1Chw)
    del autoencoder
    release()
    return image


def release() -> None:
    import mlx.core as mx

    # Models may hold reference cycles, and MLX's cache keeps freed buffers.
    gc.collect()
    mx.clear_cache()
