"""The task of training on images, which the training loop in `stages.tuner` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS
from schemas.text_to_image.train import TRAIN
from stages.models.protocols import Transformer
from stages.models.reading import reading
from stages.stage import StageContext
from stages.text_to_image import converted
from stages.text_to_image.packing import STREAMED
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train import memory_plan, model, sound_start
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.dataset import Dataset, load_dataset
from stages.text_to_image.train.objective import FlowMatching
from stages.text_to_image.train.reader import BatchReader
from stages.text_to_image.train.sampler import Sample, build_sampler
from stages.text_to_image.train.validation import HeldOutImages
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.memory_plan import MemoryPlan
from stages.tuner.task import ExpectedLoss, InitialAdapter


class ImageTask:
    """The task of training a LoRA on images by flow matching, from latents and embeddings on disk. It implements
    `stages.tuner.task.Task` for the training loop.
    """

    def __init__(self, ctx: StageContext, data: Dataset | None = None) -> None:
        """Prepare the training run that `ctx` describes. `data` is the loaded dataset, or None to load it. Raises
        ValueError if the input tables or the settings leave nothing to train on.
        """
        config: TrainConfig = ctx.config
        self.ctx, self.config = ctx, config
        self.family = ctx.need("family")
        self.data = data or load_dataset(ctx, config)
        self.sampler = build_sampler(config, self.data)
        self.mask_floor = config.mask.floor if config.mask else 0.0
        self.held_out: HeldOutImages | None = None
        if config.validation:
            at_once = config.measured_at_once
            self.held_out = HeldOutImages(ctx, self.data.held, config.validation, at_once, self.mask_floor)

    @property
    def objective(self) -> FlowMatching:
        """The flow-matching loss of the run. It is built from the settings [train.loss] and [train.preservation]."""
        return FlowMatching(self.family.architecture, self.config.loss, self.config.preservation)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows of the table `train`."""
        schema: pa.Schema = TRAIN.batch
        return schema

    @property
    def metadata(self) -> Mapping[str, str]:
        """Facts for the headers of adapter files. "family" is the model family's name. "resolution" is the largest one that
        images are trained at, such as "768x768". "trigger" is left out if there is none.
        """
        captions = self.ctx.rows(CAPTIONS)
        triggers = captions.filter(pc.equal(captions["role"], "trigger"))["text"].to_pylist()
        largest = max(crop.resolution for crop in self.data.crops)
        found = {"family": self.family.name, "resolution": f"{largest}x{largest}"}
        return found | {"trigger": triggers[0]} if triggers else found

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in each batch of step `step` (from 1). No sample is drawn."""
        return self.sampler.sizes(step)

    def draw(self, step: int) -> list[list[Sample]]:
        """Draw the samples of training step `step` and return one list per batch. Steps are counted from 1. All batches
        together give one optimizer update.
        """
        return self.sampler.step(step)

    def reader(self) -> BatchReader:
        """Return a new reader of micro-batches. It has the tables `latents` and `embeddings` open."""
        return BatchReader(self.ctx, self.sampler, self.mask_floor)

    def row(self, sample: Sample) -> dict[str, Any]:
        """Return the columns of the table `train` that describe `sample`, as a dict from column to value. They tell its
        image, crop, caption, noise level and number of tokens. They contain no loss and no step.
        """
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
        """Yield lines that warn the user before training, one for each problem. First, the model family may be
        distilled (trained to sample in few steps). Second, the latents may have another mean or standard deviation than
        those the transformer was trained on. Third, the embeddings may not suit the transformer, such as with padding
        at the wrong end.
        """
        if self.family.distilled:
            yield (f"{self.family.title}: train LoRAs on the base model and use them on this one; training on this one may fail")
        yield from self._input_warnings()

    def _input_warnings(self) -> Iterator[str]:
        """Yield lines that warn the user about the latents and the embeddings, one line each. Latents should have the
        mean and standard deviation of the latents that the transformer was trained on. Embeddings should have their
        padding where the model family has it, at the start or at the end. Embeddings should also come from the hidden
        states of the text encoder that the family uses. Only the first latents and embeddings are checked.
        """
        crops, latents, embeddings = self.data.crops, self.ctx.tensors(LATENTS), embedding_reader(self.ctx)
        yield from sound_start.check_latents(latents.read(crop.latent_id) for crop in crops[: sound_start.CROPS])
        captions = [crop.captions[0] for crop in crops[: sound_start.CAPTIONS]]
        rows = self.ctx.rows(EMBEDDINGS).select(["caption_id", "tokens"])
        tokens = {
            row["caption_id"]: row["tokens"] for row in rows.filter(pc.is_in(rows["caption_id"], pa.array(captions))).to_pylist()
        }
        yield from sound_start.check_embeddings(((embeddings.read(each), tokens[each]) for each in captions), self.family)

    @property
    def expected_loss(self) -> ExpectedLoss | None:
        """The loss that the run should start with, as an `ExpectedLoss`. The value is None if the loss is not a mean
        squared error, or if the model has random weights.
        """
        return sound_start.expected_loss(self.config.loss, self.family)

    def description(self) -> str:
        """Return one line with the number of crops, images and shapes that the run trains on, the size of its batches, and the
        number of images held out.
        """
        crops, held, order = self.data.crops, self.data.held, self.sampler.order
        images, shapes = {crop.image_id for crop in crops}, {crop.shape for crop in crops}
        line = f"{len(crops)} crops of {len(images)} images in {len(shapes)} shapes"
        line += f", mean batch {order.batch_size}, {order.per_epoch:.4g} batches per epoch"
        if order.sharing:
            line += f"; {len(order.sharing)} shapes share batches, because one has fewer crops than a batch"
        if sum(crop.rate > 0 for crop in crops) < order.batch_size:
            line += "; crops repeat within a batch, because there are fewer than a batch has"
        if held:
            line += f"; {len({crop.image_id for crop in held})} images are held out"
        if count := sum(bool(crop.references) for crop in crops):
            line += f"; {count} crops have references"
        if self.config.mask:
            line += f"; {sum(crop.mask is not None for crop in crops)} crops have a mask"
        return line

    def memory_plan(self, start: Checkpoint | None, recorded: bool = False) -> MemoryPlan:
        """Choose the memory plan of the run and return it. A memory plan says how many samples are computed at once,
        and how many blocks (layers) keep their activations. `start` is a checkpoint of the run, or None for a new run.
        If `recorded` is False, the setting [train] `memory` decides the number of blocks. If `recorded` is True, the
        number recorded in `start` is used if it fits into memory. Raises ValueError if no allowed plan fits into
        memory.

        If `recorded` is True, [train] `memory` counts as "auto". With "auto", the fastest plan that fits is chosen if
        `start` is None, or if the plan recorded in `start` does not fit.
        """
        config = dataclasses.replace(self.config, memory="auto") if recorded else self.config
        return memory_plan.choose(config, self.family, self.ctx.need("transformer"), self.sampler, start, self.ctx.say)

    def initial_adapter(self) -> InitialAdapter | None:
        """Read the adapter file that the setting [train] `initial` names. Return the pair (dict from name to float32
        array, dict from the name of a Linear to its scale). Return None if the setting is empty. Raises ValueError if
        the file is damaged or does not fit the model.
        """
        if not self.config.initial:
            return None
        file = self.ctx.root / self.config.initial
        return model.read_initial_adapter(file, self.ctx.need("transformer"), self.family, self.config)

    def load_model(self) -> Transformer:
        """Return the frozen transformer with its weights loaded. The setting [train] `base_bits` gives the bits of a
        weight: 16, 8 or 4. Weights with fewer than 16 bits are quantised. If the setting [train] `stream_blocks` is
        true, the weights of the blocks stay in files. These files lie beside the folder of the run's artifacts.
        """
        folder = self.ctx.artifacts.parent / STREAMED
        copies = self.ctx.root / converted.FOLDER if self.config.keep_converted else None
        with reading("the transformer", self.ctx.note):
            return model.load_transformer(self.ctx.need("transformer"), self.family, self.config, folder, copies, self.ctx.say)
