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
    """Return an adapter that `project` trained, to draw images with it. `which` is "last" (as trained), "average" (the moving
    average of the weights, [train.ema]) or "best" (by validation loss, [train.validation]). `step` is the training step of a
    checkpoint; None takes the end of the run. Raises ValueError if there is no such adapter. The message lists the
    checkpoints.
    """
    from pipeline.commands.export import adapter_of
    from stages.models.weights import read_file

    project.refresh()
    path = adapter_of(project, step, lambda line: None, which)
    return Adapter(project, path, int(read_file(path)[1]["step"]))


@dataclass(frozen=True)
class Adapter:
    """A trained adapter that draws images with `generate`. `path` is the adapter's file. `step` is the training step at which
    it was saved. `project` is the project that trained it.
    """

    project: Project
    path: Path
    step: int

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
        """Draw one image and return it as a PIL image. `prompt` should contain the trigger word. `seed` chooses the
        noise. `width` and `height` are in pixels. `steps` counts denoising steps. `guidance` says how strongly the
        prompt is followed. For `width`, `height`, `steps` and `guidance`, None means the value in [samples] of
        project.toml. `strength` scales the adapter: 1 is as trained, 0 is the base model. `others` has pairs (adapter
        or its file, strength) of further adapters. `references` are image files that the model sees while it draws.

        References are for adapters that were trained to edit images. `prompt` is used unchanged. The changes of all
        adapters are added. Raises ValueError if `width` or `height` is not a multiple of 16, or a value is out of the
        bounds that [samples] has.

        With all values from [samples], the image equals the preview of the stage `samples` for the same prompt and
        seed. The text encoder, the transformer and the autoencoder are loaded one after another.
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
    """Return the embeddings of `texts`, one bfloat16 array per text, in the same order. Each array has the shape
    `(1, tokens, features)`; `tokens` includes padding. The text encoder and its precision are those of `project`. The
    encoder is loaded for this call and freed afterwards.
    """
    import mlx.core as mx

    from stages.text_to_image.embeddings.memory_plan import load_encoder

    family = project.family
    family.require("text_encoder")
    weights, tokenizer = (project.component(name) for name in ("text_encoder", "tokenizer"))
    encoder = load_encoder(family, weights, tokenizer, project.config.sections["embeddings"])
    embeddings = [mx.array(each.words).view(mx.bfloat16)[None] for each in encoder.encode(list(texts))]
    del encoder
    release()
    return embeddings


def encode_files(project: Project, files: Sequence[Path]) -> list[mx.array]:
    """Return the latents of reference images, one float32 array per file of the list `files`. Each has the shape `(1,
    channels, height / 16, width / 16)`. An image of more than 1024 x 1024 pixels is first reduced to this area. Then
    its sides are cut to multiples of 16 pixels. `height` and `width` are those of the result. `project` is the opened
    project folder, which has the autoencoder. Raises ValueError if a file is no usable image.

    The autoencoder is loaded for this call and freed afterwards.
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
    """Decode one latent with the autoencoder of `project` and return a PIL image. `latent_1Chw` has the shape
    `(1, channels, height / 16, width / 16)`. `height` and `width` are those of the image in pixels. The autoencoder is
    loaded for this call and freed afterwards.
    """
    import mlx.core as mx

    from stages.text_to_image.samples.decoding import decode

    family = project.family
    autoencoder = family.architecture.load_autoencoder(project.component("autoencoder"), family, mx.float32)
    image = decode(autoencoder, latent_1Chw)
    del autoencoder
    release()
    return image


def release() -> None:
    """Free the memory of deleted models: collect garbage and clear MLX's cache."""
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
