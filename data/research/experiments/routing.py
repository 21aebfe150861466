"""Token routing: in training, a share of the image tokens skips a range of blocks. Krause et al. 2025 (TREAD), arXiv 2501.04765.

Which tokens is drawn for each sample and step. They are left out before the first block of the range and put back after the last;
text tokens stay, and positions go along. Measurements are of the whole model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Block, Linear
from stages.own_gradient import OwnGradient
from stages.run import Run
from stages.text_to_image.train.batches import BatchReader, MicroBatch, Sample
from stages.text_to_image.train.task import FlowMatching, ImageTask
from stages.tuner import draws


@dataclass(frozen=True)
class Route:
    share: float  # of the image tokens that skip
    first: int  # block of the range
    last: int  # included; negative: from the end
    multiple: int = 1  # the number of tokens that stay is one: a fused kernel wants 128

    def stay(self, tokens: int) -> int:
        """How many of so many image tokens pass through the range."""
        return max(1, round((1 - self.share) * tokens / self.multiple)) * self.multiple

    def work(self, image: int, text: int, blocks: int) -> float:
        """Tokens that the blocks compute, as a share of those without routing."""
        routed = len(range(blocks)[self.first : range(blocks)[self.last] + 1])
        return 1 - routed / blocks * (image - self.stay(image)) / (image + text)


class Routed:
    """A FLUX.2 whose inputs may have `order_BL`: for each sample, the numbers of all image tokens, those that stay first.

    Two blocks without weights are added to its chain. Between them, `h` is (what the blocks compute, the tokens that skip).
    Without `order_BL` it computes what the model computes.
    """

    def __init__(self, model: Any, route: Route) -> None:
        self.model, self.route = model, route
        last = range(len(model.blocks))[route.last]
        inside = [Block(f"routed {each.kind}", each.name, each.weights) for each in model.blocks[route.first : last + 1]]
        ends = [Block("leave out", "leave_out", {})], [Block("put back", "put_back", {})]
        self.blocks = [*model.blocks[: route.first], *ends[0], *inside, *ends[1], *model.blocks[last + 1 :]]

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.model.dtype
        return found

    @property
    def leave(self) -> Any:
        return self.model.leave

    def linears(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = self.model.linears()
        return found

    def enter(self, order_BL: mx.array | None = None, **inputs: Any) -> tuple[Any, dict[str, Any]]:
        h, shared = self.model.enter(**inputs)
        if order_BL is None:
            return h, shared
        L, T = order_BL.shape[1], shared["text"][0].shape[1]
        assert shared["image"][0].shape[1] == L, "reference images are not routed"
        rows = self.route.stay(L)
        # The modulation of a sample is the same for all tokens of a stream.
        inside = {**shared, "image": [each[:, :rows] for each in shared["image"]]}
        inside["single"] = [each[:, : T + rows] for each in shared["single"]]
        inside["rope"] = [_of_those_that_stay(turn, order_BL[:, :rows], T) for turn in shared["rope"]]
        return h, shared | {"inside": inside, "order": order_BL, "back": mx.argsort(order_BL, axis=1)}

    def block(self, kind: str) -> Any:
        if kind == "leave out":
            return self._leave_out
        if kind == "put back":
            return _put_back
        own = self.model.block(kind.removeprefix("routed "))
        if not kind.startswith("routed "):
            return own

        def run(weights: Mapping[str, Any], h: Any, shared: Mapping[str, Any], linear: Linear) -> Any:
            if "inside" not in shared:
                return own(weights, h, shared, linear)
            return own(weights, h[0], shared["inside"], linear), h[1]

        return run

    def _leave_out(self, weights: Mapping[str, Any], h: Any, shared: Mapping[str, Any], linear: Linear) -> Any:
        if "inside" not in shared:
            return h
        text, image = _streams(h, shared)
        rows = self.route.stay(image.shape[1])
        image = permuted(image, shared["order"], shared["back"])
        stay = image[:, :rows]
        return (text, stay) if isinstance(h, tuple) else mx.concatenate([text, stay], axis=1), image[:, rows:]


def _put_back(weights: Mapping[str, Any], h: Any, shared: Mapping[str, Any], linear: Linear) -> Any:
    if "inside" not in shared:
        return h
    inner, skipped = h
    text, image = _streams(inner, shared)
    image = permuted(mx.concatenate([image, skipped], axis=1), shared["back"], shared["order"])
    return (text, image) if isinstance(inner, tuple) else mx.concatenate([text, image], axis=1)


def _streams(h: Any, shared: Mapping[str, Any]) -> Sequence[mx.array]:
    """Text rows and image rows."""
    return h if isinstance(h, tuple) else tuple(mx.split(h, [shared["text"][0].shape[1]], axis=1))


def _of_those_that_stay(turn_S1K: mx.array, stay_BN: mx.array, text: int) -> mx.array:
    """(B, T + N, 1, K): the rotary table with the positions of each sample's tokens."""
    text_T1K, image_L1K = mx.split(turn_S1K, [text])
    text_BT1K = mx.broadcast_to(text_T1K, (stay_BN.shape[0], *text_T1K.shape))
    return mx.concatenate([text_BT1K, image_L1K[stay_BN]], axis=1)


@OwnGradient
def permuted(x_BLD: mx.array, order_BL: mx.array, back_BL: mx.array) -> mx.array:
    """Rows of each sample in another order; `back_BL` is the inverse of `order_BL`."""
    return _rows(x_BLD, order_BL)


@permuted.vjp
def _permuted_vjp(primals: Any, dy_BLD: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # MLX's own gradient would be a sum into an array of zeros.
    _, order_BL, back_BL = primals
    return _rows(dy_BLD, back_BL), mx.zeros_like(order_BL), mx.zeros_like(back_BL)


def _rows(x_BLD: mx.array, order_BL: mx.array) -> mx.array:
    B, L, D = x_BLD.shape
    flat = order_BL + mx.arange(0, B * L, L, dtype=order_BL.dtype)[:, None]
    return mx.take(x_BLD.reshape(B * L, D), flat.reshape(-1), axis=0).reshape(B, L, D)


# Training


@dataclass
class RoutedBatch(MicroBatch):
    order_BL: np.ndarray | None = None  # noqa: N815  (int32)


class RoutedReader(BatchReader):
    seed = 0

    def read(self, step: int, samples: list[Sample]) -> RoutedBatch:
        orders = [draws.permutation(each.crop.tokens, self.seed, "route", step, each.number) for each in samples]
        return RoutedBatch(**vars(super().read(step, samples)), order_BL=np.array(orders, np.int32))


@dataclass(frozen=True)
class RoutedFlowMatching(FlowMatching):
    def inputs(self, batch: MicroBatch, *given: Any) -> dict[str, Any]:
        order_BL = getattr(batch, "order_BL", None)
        return super().inputs(batch, *given) | ({} if order_BL is None else {"order_BL": mx.array(order_BL)})


class RoutedTask(ImageTask):
    def __init__(self, run: Run[Any], route: Route) -> None:
        super().__init__(run)
        self.route = route

    @property
    def objective(self) -> FlowMatching:
        own = super().objective
        return RoutedFlowMatching(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})

    def reader(self) -> RoutedReader:
        reader = RoutedReader(self.run, self.mask_floor, self.sampler.noise_of)
        reader.seed = self.config.seed
        return reader

    def load_model(self) -> Any:
        return Routed(super().load_model(), self.route)
