"""Drawing latents: the transformer with an adapter, and the denoising steps of one image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from stages.models.family import Family
from stages.models.protocols import Transformer
from stages.text_to_image import converted
from stages.text_to_image.packing import Packed, load_packed
from stages.tuner.adapters.combine import join
from stages.tuner.blockwise.forward import AdapterMismatch, BlockwiseForward, check_adapter, model_forward

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class LatentSampler:
    """A sampler that draws images with a diffusion transformer. The method `draw` returns the latent of one image.
    `label` names the sampler in error messages, such as "step 500". `family` is the model family. `model` is the
    transformer. `predict` is the forward pass of `model` with its adapters, block by block. `steps` is the number of
    denoising steps. `guidance` is the guidance scale. `negative` is the embedding of the empty prompt, (1, text tokens,
    features), or None.

    If `negative` is None, each step takes one forward pass instead of two.
    """

    label: str
    family: Family
    model: Transformer
    predict: BlockwiseForward
    steps: int
    guidance: float
    negative: mx.array | None

    def draw(
        self,
        text_1TJ: mx.array,
        seed: int,
        width: int,
        height: int,
        stop_after: Callable[[int], bool] = lambda step: False,
        references: Sequence[mx.array] = (),
    ) -> mx.array | None:
        """Draw one image and return its latent, (1, channels, height / 16, width / 16), float32. `text_1TJ` is the
        prompt's embedding, (1, text tokens, features). `seed` determines the starting noise. `width` and `height` are
        in pixels. `stop_after(step)` is called after each denoising step, from 1. If it returns True before the last
        step, the result is None. `references` are the latents of reference images, (1, channels, rows, columns) each. Raises
        ValueError if the latent has values that are not finite.
        """
        latents = self.family.architecture.draw(
            self.model,
            text_1TJ,
            height,
            width,
            seed=seed,
            steps=self.steps,
            guidance=self.guidance,
            negative_1TJ=self.negative,
            predict=self.predict,
            references=references,
        )
        latent_1Chw = mx.zeros(0)
        for step, latent_1Chw in enumerate(latents, 1):  # noqa: B007  (the last one is the image's)
            if stop_after(step) and step < self.steps:
                return None
        if not mx.all(mx.isfinite(latent_1Chw)).item():
            raise ValueError(f"{self.label} draws values that are not finite; choose another checkpoint, or lower [train] lr")
        return latent_1Chw


def load_sampler(
    label: str,
    transformer: Path,
    family: Family,
    read_negative: Callable[[], mx.array],
    adapters: Sequence[tuple[Path, float]] = (),
    *,
    precision: str = "bfloat16",
    packed: Packed | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    live_bytes: int | None = None,
    folder: Path | None = None,
    copies: Path | None = None,
) -> LatentSampler:
    """Load a transformer and return a sampler that draws images with it. `label` names the sampler in error messages.
    `transformer` is the path of the weights, and `family` is the model family. `read_negative()` returns the embedding
    of the empty prompt. `adapters` lists pairs (file, strength). `precision` is the dtype of the weights. `packed` says
    how weights are quantised. `steps` is the number of denoising steps, and `guidance` is the guidance scale.
    `live_bytes` is a memory limit in bytes. `folder` is the place on disk into which this function writes weights that
    memory must not hold. `copies` is a folder of already quantised weights, which are read instead of `transformer`.

    `precision` is "bfloat16" or "float32". `packed` None means that no weight is quantised. If `steps` or `guidance` is
    None, the value of `family` is used. While `live_bytes` bytes of memory are in use, MLX starts no further operation;
    None means no limit. `folder` is used only if `packed.stream_blocks` is true: the weights of the blocks (layers) are
    written there, and each step reads them again (see `load_packed`). Otherwise, `folder` may be None.

    A file in `copies` is a converted copy: the weights after casting and packing (quantising), written by an earlier
    training run. If `copies` is None or has no copy of this transformer, `transformer` is read. Copies are not used if
    `packed` is None or `packed.stream_blocks` is true.

    The embedding has the shape (1, text tokens, features). `read_negative` is only called if a denoising step takes two
    forward passes. The changes of all adapters are added. Raises ValueError if an adapter does not fit the transformer.
    """
    dtype = DTYPES[precision]
    model = None
    if copies and packed and not packed.stream_blocks:
        model = converted.load_copy(family, transformer, dtype, packed, copies)
    if model is None and packed:
        model = load_packed(transformer, family, dtype, packed, folder)
    model = model or family.architecture.load_transformer(transformer, family, dtype)
    predict = adapted_forward(model, family, adapters)
    predict.live_bytes = live_bytes
    chosen = family.guidance if guidance is None else guidance
    negative = read_negative() if family.real_cfg and chosen > 1 else None
    return LatentSampler(label, family, model, predict, family.sampling_steps if steps is None else steps, chosen, negative)


def check_file(file: Path, transformer: Path, family: Family) -> int:
    """Check that an adapter file fits a transformer, before the transformer is loaded. Return the number of its values.
    `file` is the adapter. `transformer` is the path of the weights, of which only the sizes are read. `family` is the
    record of the model family. Raises ValueError if the file is damaged, is no adapter that can be read, or is one of
    another model. The message names a part that does not fit.
    """
    architecture = family.architecture
    meta = architecture.meta_transformer(architecture.transformer_config(transformer, family), mx.float32)
    try:
        arrays, scales = architecture.read_adapter(file)
        check_adapter(meta, arrays, scales)
    except ValueError as error:
        raise ValueError(f"samples.adapter: {file} does not fit {family.name}: {error}") from None
    return sum(array.size for array in arrays.values())


def adapted_forward(model: Transformer, family: Family, adapters: Sequence[tuple[Path, float]]) -> BlockwiseForward:
    """Return the forward pass of `model` with adapters, computed block by block. `adapters` has (file, strength) pairs,
    in the file format of `family`. The change that an adapter makes is multiplied by its strength: 1 is full, 0 is
    none. The changes of several adapters are added.

    Raises ValueError if an adapter does not match the transformer. If there are several adapters, each must be a plain
    LoRA.
    """
    read = [(*family.architecture.read_adapter(file), strength) for file, strength in adapters]
    for (file, _), (arrays, scales, strength) in zip(adapters, read, strict=True):
        try:
            forward = model_forward(model, (arrays, scales), strength)
        except AdapterMismatch as error:
            raise ValueError(f"{file} was trained on another transformer: {error}") from None
    return forward if len(read) == 1 else model_forward(model, join(read) if read else None)
