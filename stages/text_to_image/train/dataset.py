"""Which rows of the tables a run trains on: crops with their captions, and where wanted with class captions and masks."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext
from stages.text_to_image.train.selection import DataConfig, ValidationConfig, held_out, rates

Row = dict[str, Any]
PLACE = ("image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h")  # what a bucket and its latents share


@dataclass(frozen=True)
class Crop:
    """One latent that may be trained on, with the captions of its image."""

    latent_id: str
    image_id: str
    width: int
    height: int
    captions: tuple[str, ...]
    classes: tuple[str, ...] = ()  # of each caption, the one with the class word in the trigger's place; "" where it has none
    rate: float = 1.0  # how often it comes per epoch
    mask: bytes | None = None  # the weight of each token, a byte each; None: all in full

    @property
    def tokens(self) -> int:
        """Image tokens: one per 16 x 16 pixels."""
        return self.width // 16 * (self.height // 16)

    def class_of(self, caption: int) -> str:
        """The class caption of that caption, by its place among `captions`; "" for none."""
        return self.classes[caption] if self.classes else ""


@dataclass(frozen=True)
class Data:
    """All that a run trains on, in an order that depends on content alone."""

    crops: tuple[Crop, ...]
    empty: str  # the id of what a dropped caption becomes, empty or the trigger; "" where no caption is ever dropped
    text_rows: dict[str, int]  # rows of each caption's embedding
    held: tuple[Crop, ...] = ()  # never trained on: the run is measured by them
    empty_class: str = ""  # the class word alone, where the trigger alone is what a dropped caption becomes

    @property
    def rates(self) -> list[float] | None:
        """What an Order wants; None where each crop comes once per epoch."""
        found = [crop.rate for crop in self.crops]
        return None if set(found) == {1.0} else found

    def pairs(self) -> list[tuple[str, str, str]]:
        """Every (latent_id, image_id, caption_id) that a run may draw, held out or not: its result depends on all of them."""
        crops = [*self.crops, *self.held]
        pairs = [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.captions]
        pairs += [(crop.latent_id, crop.image_id, made) for crop in crops for made in crop.classes if made]
        return [*pairs, ("", "", self.empty), *([("", "", self.empty_class)] if self.empty_class else [])]


def usable(
    ctx: StageContext,
    data: DataConfig = DataConfig(),  # noqa: B008  (frozen)
    held: ValidationConfig | None = None,
    *,
    classes: bool = False,
    masks: bool = False,
) -> Data:
    """The crops that the current buckets name, encoded and captioned. ValueError if there is none or a table lacks some.

    `classes`: with their captions in which the class word replaces the trigger. `masks`: with their masks.
    """
    paths = _paths(ctx)
    texts = _texts(ctx, data, classes)
    latents = _latents(ctx, paths, texts)
    if masks and not any(row["mask"] for row in latents):
        raise ValueError('[train.mask]: no crop has a mask; set mask = "alpha" or "file" in [latents] and run that stage')
    often = rates(data, [(row["resolution"], paths[row["image_id"]][0]) for row in latents])
    drawn = [(row, rate) for row, rate in zip(latents, often, strict=True) if rate]
    if not drawn:
        raise ValueError(f"[train.data]: nothing to train on: resolutions and repeats leave out all {len(latents)} crops")
    aside = held_out(held, {row["image_id"]: paths[row["image_id"]] for row, _ in drawn}) if held else frozenset()
    trained = [_crop(row, rate, texts, masks) for row, rate in drawn if row["image_id"] not in aside]
    if not trained:
        raise ValueError(f"[train.validation]: all {len(aside)} images are held out; lower share, or name fewer paths")
    measured = [_crop(row, rate, texts, masks) for row, rate in drawn if row["image_id"] in aside and not row["flip"]]
    return _embedded(ctx, Data(tuple(trained), texts.empty, {}, tuple(measured), texts.empty_class))


def _latents(ctx: StageContext, paths: Container[str], texts: Texts) -> list[Row]:
    """The rows of latents that can be trained on, each with its bucket's resolution, by latent_id."""
    buckets = [row for row in ctx.rows(BUCKETS).to_pylist() if row["rejected"] is None]
    places = {_place(row): row["resolution"] for row in buckets if row["image_id"] in paths}
    latents = [row for row in ctx.rows(LATENTS).to_pylist() if _place(row) in places]
    lost = len(places.keys() - {_place(row) for row in latents})
    if lost:
        raise ValueError(f"train: {lost} of {len(places)} crops have no latent; run the stage latents")
    encoded = [row | {"resolution": places[_place(row)]} for row in latents if row["rejected"] is None]
    used = sorted((row for row in encoded if row["image_id"] in texts.captions), key=lambda row: str(row["latent_id"]))
    if not used:
        raise ValueError(
            f"train: there is nothing to train on: of {len(places)} crops {len(latents) - len(encoded)} could not be encoded "
            f"and {len(encoded)} have no caption; see the tables buckets, latents and captions"
        )
    return used


def _embedded(ctx: StageContext, data: Data) -> Data:
    """The same, with the sizes of the embeddings. ValueError if a caption that may be drawn has none."""
    text_rows = {row["caption_id"]: row["shape"][0] for row in ctx.rows(EMBEDDINGS).to_pylist()}
    read = {caption for _, _, caption in data.pairs() if caption}
    if read - set(text_rows):
        raise ValueError(
            f"train: {len(read - set(text_rows))} of {len(read)} captions have no embedding; run the stage embeddings"
        )
    return replace(data, text_rows=text_rows)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)


def _paths(ctx: StageContext) -> dict[str, list[str]]:
    """The paths of each usable image: the one that is used, then its duplicates."""
    rows = sorted(ctx.rows(IMAGES).to_pylist(), key=lambda row: (row["rejected"] is not None, row["path"]))
    paths: dict[str, list[str]] = {row["image_id"]: [] for row in rows if row["rejected"] is None}
    for row in rows:
        if row["rejected"] in (None, "duplicate") and row["image_id"] in paths:
            paths[row["image_id"]].append(row["path"])
    return paths


def _crop(row: Row, rate: float, texts: Texts, masked: bool) -> Crop:
    image = row["image_id"]
    mask = row["mask"] if masked else None
    return Crop(
        row["latent_id"], image, row["width"], row["height"], texts.captions[image], texts.classes.get(image, ()), rate, mask
    )


@dataclass(frozen=True)
class Texts:
    """Captions by image in their order, their classes, and what a dropped caption becomes; ids all."""

    captions: dict[str, tuple[str, ...]]
    classes: dict[str, tuple[str, ...]]
    empty: str
    empty_class: str


def _texts(ctx: StageContext, data: DataConfig, classes: bool) -> Texts:
    """What the table captions holds for this run. ValueError for a role that it lacks."""
    by_role: dict[str, list[Row]] = {}
    for row in sorted(ctx.rows(CAPTIONS).to_pylist(), key=lambda row: (row["position"], row["caption_id"])):
        by_role.setdefault(row["role"], []).append(row)
    captions: dict[str, list[Row]] = {}
    for row in by_role.get("caption", []):
        captions.setdefault(row["image_id"], []).append(row)
    if classes and "class" not in by_role:
        raise ValueError("[train.preservation] needs captions with a class word: set trigger and class_word in [captions]")
    class_of = {(row["image_id"], row["position"]): row["caption_id"] for row in by_role.get("class", []) if classes}
    empty = empty_class = ""
    if ctx.config.caption_dropout:
        if data.dropped not in by_role and data.dropped == "trigger":
            raise ValueError('[train.data] dropped = "trigger": captions has no such row; set trigger in [captions]')
        if data.dropped not in by_role:
            raise ValueError(
                "train: caption_dropout needs the empty caption, of which captions has no row; run the stage captions"
            )
        empty = by_role[data.dropped][0]["caption_id"]
        empty_class = class_of.get(("", 0), "") if data.dropped == "trigger" else ""
    return Texts(
        {image: tuple(row["caption_id"] for row in rows) for image, rows in captions.items()},
        {image: tuple(class_of.get((image, row["position"]), "") for row in rows) for image, rows in captions.items()},
        empty,
        empty_class,
    )
