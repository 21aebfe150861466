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
from stages.models.family import Transformer
from stages.models.weights import reading
from stages.run import Run
from stages.text_to_image import converted
from stages.text_to_image.packing import STREAMED
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train import memory_plan, model, sound_start
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.dataset import load_dataset
from stages.text_to_image.train.objective import FlowMatching
from stages.text_to_image.train.reader import BatchReader
from stages.text_to_image.train.sampler import Sample, build_sampler
from stages.text_to_image.train.validation import HeldOutImages
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.memory_plan import MemoryPlan
from stages.tuner.task import ExpectedLoss, InitialAdapter


class ImageTask:
    """A LoRA on images by flow matching, from latents and embeddings on disk; a `stages.tuner.task.Task`."""

    def __init__(self, run: Run[Any]) -> None:
        config: TrainConfig = run.config
        self.run, self.config = run, config
        self.family = run.needs["family"]
        self.data = run.once(load_dataset)
        self.sampler = build_sampler(config, self.data)
        self.mask_floor = config.mask.floor if config.mask else 0.0
        self.held_out: HeldOutImages | None = None
        if config.validation:
            at_once = config.measured_at_once
            self.held_out = HeldOutImages(run, self.data.held, config.validation, at_once, self.mask_floor)

    @property
    def objective(self) -> FlowMatching:
        return FlowMatching(self.family.architecture, self.config.loss, self.config.preservation)

    @property
    def schema(self) -> pa.Schema:
        schema: pa.Schema = TRAIN.batch
        return schema

    @property
    def metadata(self) -> Mapping[str, str]:
        """For the headers of adapter files. "resolution" is the largest that is trained, such as "768x768"."""
        captions = self.run.inputs.rows(CAPTIONS)
        triggers = captions.filter(pc.equal(captions["role"], "trigger"))["text"].to_pylist()
        largest = max(crop.resolution for crop in self.data.crops)
        found = {"family": self.family.name, "resolution": f"{largest}x{largest}"}
        return found | {"trigger": triggers[0]} if triggers else found

    def sizes(self, step: int) -> list[int]:
        return self.sampler.sizes(step)

    def draw(self, step: int) -> list[list[Sample]]:
        return self.sampler.step(step)

    def reader(self) -> BatchReader:
        return BatchReader(self.run, self.sampler, self.mask_floor)

    def row(self, sample: Sample) -> dict[str, Any]:
        """The columns of `train` that describe a sample, without loss and step."""
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
        """About a distilled model, and about latents or embeddings that do not suit the transformer."""
        if self.family.distilled:
            yield (f"{self.family.title}: train LoRAs on the base model and use them on this one; training on this one may fail")
        yield from self._input_warnings()

    def _input_warnings(self) -> Iterator[str]:
        crops, latents, embeddings = self.data.crops, self.run.inputs.tensors(LATENTS), embedding_reader(self.run)
        yield from sound_start.check_latents(latents.read(crop.latent_id) for crop in crops[: sound_start.CROPS])
        captions = [crop.captions[0] for crop in crops[: sound_start.CAPTIONS]]
        rows = self.run.inputs.rows(EMBEDDINGS).select(["caption_id", "tokens"])
        tokens = {
            row["caption_id"]: row["tokens"] for row in rows.filter(pc.is_in(rows["caption_id"], pa.array(captions))).to_pylist()
        }
        yield from sound_start.check_embeddings(((embeddings.read(each), tokens[each]) for each in captions), self.family)

    @property
    def expected_loss(self) -> ExpectedLoss | None:
        return sound_start.expected_loss(self.config.loss, self.family)

    def description(self) -> str:
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
        """`recorded`: the plan in `start` if it fits, whatever [train] memory says. Raises ValueError if no allowed plan fits."""
        # With "auto", the plan of `start` is chosen again if it fits, else the fastest that does.
        config = dataclasses.replace(self.config, memory="auto") if recorded else self.config
        return memory_plan.choose(config, self.family, self.run.needs["transformer"], self.sampler, start, self.run.report.say)

    def initial_adapter(self) -> InitialAdapter | None:
        if not self.config.initial:
            return None
        file = self.run.root / self.config.initial
        return model.read_initial_adapter(file, self.run.needs["transformer"], self.family, self.config)

    def load_model(self) -> Transformer:
        folder = self.run.output.artifacts.parent / STREAMED
        copies = self.run.root / converted.FOLDER if self.config.keep_converted else None
        with reading("the transformer", self.run.report.note):
            return model.load_transformer(
                self.run.needs["transformer"], self.family, self.config, folder, copies, self.run.report.say
            )
