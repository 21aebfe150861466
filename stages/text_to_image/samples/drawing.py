"""Drawing latents: the transformer with an adapter, and the denoising steps of one image. Also serves the Python API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from stages.models.family import Family, Transformer
from stages.text_to_image import converted
from stages.text_to_image.packing import Packed, load_packed
from stages.tuner.adapters.combine import join
from stages.tuner.blockwise.forward import AdapterMismatch, BlockwiseForward, check_adapter, model_forward

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class LatentSampler:
    label: str  # in error messages, such as "step 500"
    family: Family
    model: Transformer
    predict: BlockwiseForward  # of `model` with its adapters
    steps: int  # denoising steps
    guidance: float
    negative: mx.array | None  # embedding of the empty prompt, (1, T, J); None: one forward pass per step instead of two

    def draw(
        self,
        text_1TJ: mx.array,
        seed: int,
        width: int,
        height: int,
        stop_after: Callable[[int], bool] = lambda step: False,
        references: Sequence[mx.array] = (),
    ) -> mx.array | None:
        """A float32 latent (1, channels, height / 16, width / 16); None if `stop_after(step)` ended it before the last step.

        `text_1TJ`: embedding of the prompt. `references`: latents (1, channels, rows, columns). Raises ValueError if values
        are not finite.
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
    """Load the transformer and adapters, (file, strength), whose changes are added. Raises ValueError if one does not fit.

    `read_negative`: called only if a denoising step takes two forward passes. `packed`: None packs no weight. `steps`,
    `guidance`:
    those of the family if None. `live_bytes`: while so many are in use, MLX starts no further operation. `folder`: takes the
    weights of the blocks if `packed.stream_blocks`; each step reads them again. `copies`: folder of converted copies of
    training;
    one of this transformer is read instead of `transformer`.
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
    """Number of values of an adapter that fits the transformer, checked before it is loaded. Raises ValueError with a
    part that does not.
    """
    architecture = family.architecture
    # Only the sizes of the transformer are read.
    meta = architecture.meta_transformer(architecture.transformer_config(transformer, family), mx.float32)
    try:
        arrays, scales = architecture.read_adapter(file)
        check_adapter(meta, arrays, scales)
    except ValueError as error:
        raise ValueError(f"samples.adapter: {file} does not fit {family.name}: {error}") from None
    return sum(array.size for array in arrays.values())


def adapted_forward(model: Transformer, family: Family, adapters: Sequence[tuple[Path, float]]) -> BlockwiseForward:
    """The changes of adapters are added; several must be plain LoRAs. Raises ValueError if one does not match the transformer."""
    read = [(*family.architecture.read_adapter(file), strength) for file, strength in adapters]
    # One by one, so that the message names the file that does not match.
    for (file, _), (arrays, scales, strength) in zip(adapters, read, strict=True):
        try:
            forward = model_forward(model, (arrays, scales), strength)
        except AdapterMismatch as error:
            raise ValueError(f"{file} was trained on another transformer: {error}") from None
    return forward if len(read) == 1 else model_forward(model, join(read) if read else None)
