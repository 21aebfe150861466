"""The task of training on images, which the training loop in `stages.tuner` runs. Its objective is flow matching:
x_sigma = (1 - sigma) x0 + sigma noise; the model predicts noise - x0.

Letters in names: B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.text_to_image import CAPTIONS, EMBEDDINGS, TRAIN
from stages.models.family import Architecture, Family, Transformer
from stages.models.weights import reading
from stages.run import Run
from stages.settings import several
from stages.text_to_image.beneath import read_beneath
from stages.text_to_image.caption_files import trigger_word
from stages.text_to_image.slider import SliderConfig
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train import sound_start
from stages.text_to_image.train.batches import BatchReader, HeldOutImages, MicroBatch, Sample, build_sampler
from stages.text_to_image.train.config import LossConfig, PreservationConfig, TrainConfig
from stages.text_to_image.train.data import Dataset, latent_reader, load_dataset
from stages.text_to_image.train.memory import ImageEstimator, largest_batch
from stages.text_to_image.weights import CONVERTED, STREAMED, load_transformer, meta_transformer
from stages.tuner import diffusion
from stages.tuner.adapters.masks import RankMasks
from stages.tuner.adapters.targets import check_initial
from stages.tuner.blockwise.backprop import predict_base
from stages.tuner.checkpoint import adapter_damage
from stages.tuner.ranks import connect
from stages.tuner.step import choose_targets
from stages.tuner.task import ExpectedLoss, InitialAdapter, Term

GUIDANCE = 1.0  # the guidance that models with embedded guidance are trained at, as all trainers but one do

Loss = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class FlowMatching:
    """The model learns the velocity, noise - clean, or with a slider the base's prediction moved along a difference of prompts;
    `preservation` adds a loss that keeps the base's predictions.
    """

    architecture: Architecture
    loss: LossConfig
    preservation: PreservationConfig | None = None
    slider: SliderConfig | None = None
    masks: RankMasks | None = None
    separable: bool = True  # a sample's loss depends on that sample alone, so a batch may be divided into micro-batches

    def terms(self, model: Transformer, batch: MicroBatch) -> Iterator[Term]:
        x_BLC, target_BLC = self.mix(batch)
        masks = functools.partial(self.masks, batch.samples) if self.masks else None
        inputs, strength = self.inputs(batch, x_BLC, batch.ctx_BTJ, batch.tokens_B), batch.samples[0].strength
        if self.slider:
            neutral, positive, negative = (
                predict_base(model, each) for each in (inputs, *(self.inputs(batch, x_BLC, *texts) for texts in batch.poles))
            )
            target_BLC = diffusion.moved(neutral, positive, negative, strength * self.slider.guidance)
        yield Term(inputs, velocity_loss(batch, target_BLC, self.loss), strength=strength, masks=masks)
        if batch.class_BTJ is None or batch.class_B is None or self.preservation is None:
            return
        inputs = self.inputs(batch, x_BLC, batch.class_BTJ, batch.class_tokens_B)
        weight_B = self.preservation.weight * mx.array(batch.class_B)
        # How far the adapter moves the prediction: the target is the prediction of the base without it.
        preserved = functools.partial(diffusion.mse, target_BLC=predict_base(model, inputs), weight_B=weight_B)
        yield Term(inputs, preserved, "preservation", [bool(one) for one in batch.class_B], masks=masks)

    def validation_term(self, model: Transformer, batch: MicroBatch) -> Term:
        """Mean squared error, weighted by a mask if there is one."""
        x_BLC, target_BLC = self.mix(batch)
        # Whatever [train.loss] says, so that runs with different settings can be compared.
        return Term(self.inputs(batch, x_BLC, batch.ctx_BTJ, batch.tokens_B), velocity_loss(batch, target_BLC, LossConfig()))

    def mix(self, batch: MicroBatch) -> tuple[mx.array, mx.array]:
        """(noisy latents, velocity noise - clean), float32 (B, L, C)."""
        tokens = self.architecture.tokens
        x0_BLC = tokens(mx.array(batch.x0_BCHW).view(mx.bfloat16)).astype(mx.float32)
        noise_BLC = tokens(mx.array(batch.noise_BCHW))
        sigma_B11 = sigmas(batch)[:, None, None]
        return (1 - sigma_B11) * x0_BLC + sigma_B11 * noise_BLC, noise_BLC - x0_BLC

    def inputs(
        self, batch: MicroBatch, x_BLC: mx.array, words_BTJ: np.ndarray, tokens_B: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of the model for one prediction. `words_BTJ`: bfloat16 as uint16."""
        height, width = batch.x0_BCHW.shape[2:]
        text_BTJ = mx.array(words_BTJ).view(mx.bfloat16)
        beside = [mx.array(words_BCHW).view(mx.bfloat16) for words_BCHW in batch.references]
        unequal = {} if tokens_B is None else {"tokens_B": mx.array(tokens_B)}
        return self.architecture.inputs(x_BLC, (height, width), text_BTJ, sigmas(batch), GUIDANCE, beside, **unequal)


def sigmas(batch: MicroBatch) -> mx.array:
    return mx.array([s.sigma for s in batch.samples], mx.float32)


def velocity_loss(batch: MicroBatch, target_BLC: mx.array, config: LossConfig) -> Loss:
    """A function from the predicted velocity to one loss per sample, as [train.loss] and the mask weight it."""
    # The arrays are keywords of a partial, so that MLX can compile the function with the model's last blocks.
    arrays = {"target_BLC": target_BLC}
    if config.weight != "none":
        sigma_B = np.array([s.sigma for s in batch.samples])
        arrays["weight_B"] = mx.array(diffusion.weight(config.weight, sigma_B).astype(np.float32))
    if batch.mask_BL is not None:
        arrays["mask_BL"] = mx.array(batch.mask_BL)
    if config.kind == "pseudo_huber":
        return functools.partial(diffusion.pseudo_huber, c=mx.array(config.huber_c, mx.float32), **arrays)
    return functools.partial(diffusion.mse, **arrays)


def family_of(family: Family, data: Dataset) -> Family:
    """The record, without what only reference images need if there are none. Raises ValueError if it reads none."""
    if not any(crop.references for crop in (*data.crops, *data.held)):
        return family.without_references()
    family.require_references()
    return family


class ImageTask:
    """A LoRA on images by flow matching, from latents and embeddings on disk; a `stages.tuner.task.Task`."""

    def __init__(self, run: Run[Any]) -> None:
        config: TrainConfig = run.config
        self.run, self.data = run, run.once(load_dataset)
        self.config = config = config.settled(len(self.data.pictures), self.data.share)
        self.family = family_of(run.needs["family"], self.data)
        self.sampler = build_sampler(config, self.data, self.family.architecture.text_rows)
        self.mask_floor = config.mask.floor if config.mask else 0.0
        self.held_out: HeldOutImages | None = None
        if config.validation:
            at_once = config.measured_at_once
            self.held_out = HeldOutImages(run, self.data, config.validation, at_once, self.mask_floor)

    @property
    def objective(self) -> FlowMatching:
        c = self.config
        return FlowMatching(self.family.architecture, c.loss, c.preservation, c.slider, c.masks)

    @property
    def schema(self) -> pa.Schema:
        schema: pa.Schema = TRAIN.batch
        return schema

    @property
    def metadata(self) -> Mapping[str, str]:
        """For the headers of adapter files. "resolution" is the largest that is trained, such as "768x768"."""
        trigger = trigger_word(self.run.inputs.rows(CAPTIONS))
        largest = max(crop.resolution for crop in self.data.crops)
        found = {"family": self.family.name, "resolution": f"{largest}x{largest}"}
        if self.config.beneath:
            found["beneath"] = "; ".join(map(str, self.config.beneath))
        if slider := self.config.slider:
            found["slider"] = f"{slider.positive} | {slider.negative}"
        return found | {"trigger": trigger} if trigger else found

    def sizes(self, step: int) -> list[int]:
        # A batch that mixes shapes is one number.
        return [self.sampler.order.batch_size] * self.sampler.order.accumulate

    def draw(self, step: int) -> list[list[Sample]]:
        return self.sampler.step(step)

    def reader(self) -> BatchReader:
        return BatchReader(self.run, self.mask_floor, self.sampler.noise_of)

    def row(self, sample: Sample) -> dict[str, Any]:
        crop = sample.crop
        return {
            "epoch": sample.epoch,
            "image_id": crop.image_id,
            "latent_id": crop.latent_id,
            "caption_id": sample.caption_id,
            "width": crop.width,
            "height": crop.height,
            "dropped": sample.dropped,
            "sigma": sample.sigma,
            "reference_count": len(crop.references),
            "tokens": crop.tokens + crop.reference_tokens + self.data.text_rows[sample.caption_id],
        }

    def warnings(self) -> Iterator[str]:
        crops, latents, embeddings = self.data.crops, latent_reader(self.run), embedding_reader(self.run)
        yield from sound_start.check_latents(latents.read(crop.latent_id) for crop in crops[: sound_start.CROPS])
        captions = [crop.captions[0] for crop in crops[: sound_start.CAPTIONS]]
        rows = self.run.inputs.rows(EMBEDDINGS).select(["caption_id", "tokens"])
        tokens = {
            row["caption_id"]: row["tokens"] for row in rows.filter(pc.is_in(rows["caption_id"], pa.array(captions))).to_pylist()
        }
        yield from sound_start.check_embeddings(((embeddings.read(each), tokens[each]) for each in captions), self.family)

    @property
    def expected_loss(self) -> ExpectedLoss | None:
        # A slider begins at its target's distance from the base, whatever the model knows.
        return None if self.config.slider else sound_start.expected_loss(self.config.loss, self.family)

    def description(self) -> str:
        crops, held, order = self.data.crops, self.data.held, self.sampler.order
        images, shapes = {crop.image_id for crop in crops}, {crop.shape for crop in crops}
        line = f"{several(len(crops), 'crop')} of {several(len(images), 'image')} in {several(len(shapes), 'shape')}"
        line += f", mean batch {order.batch_size}, {order.per_epoch:.4g} batches per epoch"
        if order.sharing:
            line += f"; batches mix {len(order.sharing)} sizes, because there are fewer pictures of each than a batch has"
        if sum(crop.rate > 0 for crop in crops) < order.batch_size:
            line += "; crops repeat within a batch, because there are fewer than a batch has"
        if held:
            line += f"; held out: {several(len({crop.image_id for crop in held}), 'image')}"
        if count := sum(bool(crop.references) for crop in crops):
            line += f"; with references: {several(count, 'crop')}"
        if self.config.mask:
            line += f"; with a mask: {several(sum(crop.mask is not None for crop in crops), 'crop')}"
        return line

    def estimator(self) -> ImageEstimator:
        architecture = self.family.architecture
        sizes = architecture.transformer_config(self.run.needs["transformer"], self.family)
        batch = largest_batch(self.sampler, architecture.pixels_per_token, connect().size)
        return ImageEstimator(self.config, architecture, sizes, batch)

    def initial_adapter(self) -> InitialAdapter | None:
        if not self.config.initial:
            return None
        file = self.run.root / self.config.initial
        if damage := adapter_damage(file):
            raise ValueError(f"[train] initial: {file} {damage}; run `latentmill verify --repair` in its project")
        targets = choose_targets(meta_transformer(self.run.needs["transformer"], self.family).linears(), self.config)
        try:
            arrays, scales = self.family.architecture.read_adapter(file)
            check_initial(arrays, scales, targets)
        except ValueError as error:
            raise ValueError(f"[train] initial: {error}") from None
        return arrays, scales

    def load_model(self) -> Transformer:
        report, weights = self.run.report, self.run.needs["transformer"]
        family = self.run.needs["family"]
        beneath = read_beneath(self.config.beneath, self.run.root, family, meta_transformer(weights, family).linears())
        with reading("the transformer", report.note):
            return load_transformer(
                weights,
                self.family,
                getattr(mx, self.config.precision),
                self.config,
                folder=self.run.output.artifacts.parent / STREAMED,
                copies=self.run.root / CONVERTED if self.config.keep_converted else None,
                keep=True,
                say=report.say,
                beneath=beneath,
            )
