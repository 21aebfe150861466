"""Which rows of the tables a run trains on: crops with their captions and, if asked for, class captions and masks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext
from stages.text_to_image.imaging.references import USE
from stages.text_to_image.imaging.usable import usable_paths
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.folders import folder_rates
from stages.text_to_image.train.references import Reference, References, is_inside, place, size
from stages.text_to_image.train.selection import DataConfig, held_out, rates

Row = dict[str, Any]


@dataclass(frozen=True)
class Crop:
    """One crop: the part of an image that is trained, with the image's captions. `latent_id` is the crop's key in the
    table `latents`. `image_id` is the sha256 of the image file. `width` and `height` are in pixels. `grid` is (height,
    width) in image tokens. `captions` lists the captions' keys in the table `captions`. `rate` is the mean number of
    times that an epoch uses the crop.

    `classes` holds one caption_id per caption: the class caption, or "" if there is none. A class caption has the class
    word (such as "cat") in place of the trigger word. If no caption has one, `classes` may be empty. `mask` has the
    weight of each image token as one byte, 0 to 255. If it is None, all tokens have full weight. `resolution` is the
    resolution of the crop's bucket. `references` are shown to the model beside the noisy latent. `weights` holds one
    number per caption: how often it is drawn relative to the others. If it is empty, all are drawn equally often.
    """

    latent_id: str
    image_id: str
    width: int  # pixels
    height: int
    grid: tuple[int, int]  # (height, width) of the latent
    captions: tuple[str, ...]
    classes: tuple[str, ...] = ()  # for each caption, its class caption; "": it has none
    rate: float = 1.0  # occurrences per epoch
    mask: bytes | None = None  # the weight of each token, one byte each; None: all count in full
    resolution: int = 0  # of its bucket
    references: tuple[Reference, ...] = ()  # what an edit starts from
    weights: tuple[float, ...] = ()  # for each caption, how often it is drawn; empty: equally

    @property
    def tokens(self) -> int:
        """Return the number of image tokens of the crop, one per position of the latent."""
        return self.grid[0] * self.grid[1]

    @property
    def reference_tokens(self) -> int:
        """Return the number of image tokens of all references of the crop. A reference is an image that the model sees
        beside the noisy one.
        """
        return sum(each.grid[0] * each.grid[1] for each in self.references)

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """Return the sizes of the crop's latent and of its references, as (height, width) in tokens. The latent comes
        first. Crops of one shape can share a batch.
        """
        return (self.grid, *(each.grid for each in self.references))

    def class_of(self, caption: int) -> str:
        """Return the caption_id of a class caption, or "" if there is none. A class caption is made from a caption: the
        class word (such as "cat") replaces the trigger word. `caption` is the index in `captions` of the caption from
        which the class caption was made.
        """
        return self.classes[caption] if self.classes else ""


@dataclass(frozen=True)
class Dataset:
    """The crops (parts of images) and captions of a training run. `crops` are trained on. `held` are only used for
    measurement. `empty` is the caption_id of the text that replaces a dropped caption: the empty caption or the trigger
    word. `text_rows` maps each caption_id to the number of rows of its embedding. A class caption has the class word,
    such as "cat", in place of the trigger word. `empty_class` is the caption_id of the text that replaces the class
    caption of a dropped caption: the class word alone.

    `empty` is "" if no caption is dropped. `empty_class` is "" unless two things hold: `empty` is the trigger word, and
    class captions are used. The order of `crops` and `held` depends only on their content.
    """

    crops: tuple[Crop, ...]
    empty: str  # caption_id of what a dropped caption becomes, the empty caption or the trigger; "": no caption is dropped
    text_rows: dict[str, int]  # caption_id -> rows of its embedding
    held: tuple[Crop, ...] = ()  # crops that are never trained on: the run is measured by them
    empty_class: str = ""  # caption_id of the class word alone, if a dropped caption becomes the trigger alone

    @property
    def rates(self) -> list[float] | None:
        """Return how often each crop of `crops` occurs per epoch, as a list of floats in the same order. Return None if
        every crop occurs exactly once.
        """
        found = [crop.rate for crop in self.crops]
        return None if set(found) == {1.0} else found

    def pairs(self) -> list[tuple[str, str, str]]:
        """Return every pair of a crop and one of its captions that a run may use. The result is a list of tuples
        (latent_id, image_id, caption_id). It contains the pairs for training and the held-out pairs for measurement.
        Class captions count as captions too. A class caption has the class word in place of the trigger word.

        The list ends with ("", "", `empty`), for dropped captions. If `empty_class` is not "", ("", "", `empty_class`)
        follows. These pairs are part of the run's recipe (the hash that identifies it).
        """
        crops = [*self.crops, *self.held]
        pairs = [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.captions]
        pairs += [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.classes if caption]
        return [*pairs, ("", "", self.empty), *([("", "", self.empty_class)] if self.empty_class else [])]


def load_dataset(ctx: StageContext, config: TrainConfig) -> Dataset:
    """Read the tables of the project and return the crops (trained parts of images) and captions to train on. `ctx` is
    the stage's context, with its input tables. `config` holds the settings [train]. Rejected crops, images that cannot
    be used and images without a caption are left out. Raises ValueError if no crop remains, or if a table lacks rows
    that the settings need.

    The settings choose the held-out images (never regularisation images), how often crops occur, and whether masks and
    class captions are used.
    """
    paths = usable_paths(ctx.rows(IMAGES))
    every = ctx.rows(IMAGES).to_pylist()
    images = {row["image_id"]: row for row in every if row["rejected"] is None and row["use"] != USE}
    texts = _texts(ctx, config.data, bool(config.caption_dropout), config.preservation is not None)
    latents = _latents(ctx, paths, texts)
    if config.mask and not any(row["mask"] for row in latents):
        raise ValueError('[train.mask]: no crop has a mask; set mask = "alpha" or "file" in [latents] and run that stage')
    references = References(every, ctx.rows(BUCKETS).to_pylist(), ctx.rows(LATENTS).to_pylist())
    for row in latents:
        row["references"] = references.of(row["image_id"], row["resolution"], row["flip"])
    drawn = _with_rates(latents, images, paths, config.data)
    aside = _held_images(drawn, images, paths, config)
    crops = [_crop(row, rate, texts, config.mask is not None) for row, rate in drawn if row["image_id"] not in aside]
    if not crops:
        raise ValueError(f"[train.validation]: all {len(aside)} images are held out; lower share, or name fewer paths")
    plain = [(row, rate) for row, rate in drawn if row["image_id"] in aside and not row["flip"] and not row["further"]]
    held = [_crop(row, rate, texts, config.mask is not None) for row, rate in plain]
    return _with_embeddings(ctx, Dataset(tuple(crops), texts.empty, {}, tuple(held), texts.empty_class))


def _with_rates(
    latents: Sequence[Row], images: Mapping[str, Row], paths: Mapping[str, list[str]], data: DataConfig
) -> list[tuple[Row, float]]:
    """Return the crops that an epoch uses, as a list of (row, rate). The row is a crop's row in `latents`. The rate is
    how many times an epoch uses the crop on average. Crops with the rate 0 are left out. `latents` has one row of the
    table `latents` per crop. `images` maps an image_id to the image's row of the table `images`. `paths` maps an
    image_id to the image's paths. `data` holds the settings that decide the rates. Raises ValueError if no crop
    remains.
    """
    found = rates(data, [(row["resolution"], paths[row["image_id"]][0]) for row in latents])
    found = folder_rates(found, [images[row["image_id"]] for row in latents], data.regularisation)
    drawn = [(row, rate) for row, rate in zip(latents, found, strict=True) if rate]
    if not drawn:
        raise ValueError(f"[train.data]: nothing to train on: resolutions and repeats leave out all {len(latents)} crops")
    return drawn


def _held_images(
    drawn: Sequence[tuple[Row, float]], images: Mapping[str, Row], paths: Mapping[str, list[str]], config: TrainConfig
) -> frozenset[str]:
    """Return the image_ids of the images that are held out from training, as [train.validation] says. Regularisation
    images are never held out. `drawn` lists the crops that an epoch uses, as (row, rate). The row is a crop's row in
    `latents`. The rate is how many times an epoch uses the crop on average. `images` maps an image_id to the image's
    row of the table `images`. `paths` maps an image_id to the image's paths. `config` holds the settings [train].

    Regularisation images show the class of the subject: for one cat, they show other cats. Only images with a crop in
    `drawn` are held out. Without [train.validation], the set is empty. Raises ValueError if the setting `paths` of
    [train.validation] matches no image.
    """
    if not config.validation:
        return frozenset()
    own = {row["image_id"] for row, _ in drawn if images[row["image_id"]]["use"] is None}
    return held_out(config.validation, {image_id: paths[image_id] for image_id in own})


def _latents(ctx: StageContext, paths: Container[str], texts: Texts) -> list[Row]:
    """Return the rows of the table `latents` that can be trained on, as dicts sorted by `latent_id`. `ctx` is the
    stage's context. `paths` contains the image_ids to use: it is a set, or a dict with image_ids as keys. `texts` holds
    the captions of each image. Each dict has two more keys. `resolution` is the resolution at which the crop is
    trained, such as 512. `further` is True for an additional, smaller crop. Raises ValueError if a crop has no latent,
    or if no row remains.

    The setting [latents] `jitter` makes the smaller crops. The table `buckets` gives the resolution. Images without a
    caption and crops that could not be encoded are left out.
    """
    buckets = [row for row in ctx.rows(BUCKETS).to_pylist() if row["rejected"] is None]
    places = {place(row) for row in buckets if row["image_id"] in paths}
    by_size = {size(row): row for row in buckets if row["image_id"] in paths}
    latents = [row for row in ctx.rows(LATENTS).to_pylist() if is_inside(row, by_size.get(size(row)))]
    lost = len(places - {place(row) for row in latents})
    if lost:
        raise ValueError(f"train: {lost} of {len(places)} crops have no latent; run the stage latents")
    encoded = [
        row | {"resolution": by_size[size(row)]["resolution"], "further": place(row) not in places}
        for row in latents
        if row["rejected"] is None
    ]
    used = sorted((row for row in encoded if row["image_id"] in texts.captions), key=lambda row: str(row["latent_id"]))
    if not used:
        raise ValueError(
            f"train: there is nothing to train on: of {len(places)} crops {len(latents) - len(encoded)} could not be encoded "
            f"and {len(encoded)} have no caption; see the tables buckets, latents and captions"
        )
    return used


def _with_embeddings(ctx: StageContext, data: Dataset) -> Dataset:
    """Return a copy of `data`, the crops and captions of a run, whose dict `text_rows` is filled. It maps each
    caption_id to the number of rows of the caption's embedding. `ctx` is the stage's context, with its input tables.
    Raises ValueError if a caption of the run has no embedding.
    """
    text_rows = {row["caption_id"]: row["shape"][0] for row in ctx.rows(EMBEDDINGS).to_pylist()}
    read = {caption for _, _, caption in data.pairs() if caption}
    if read - set(text_rows):
        raise ValueError(
            f"train: {len(read - set(text_rows))} of {len(read)} captions have no embedding; run the stage embeddings"
        )
    return replace(data, text_rows=text_rows)


def _crop(row: Row, rate: float, texts: Texts, masked: bool) -> Crop:
    image = row["image_id"]
    return Crop(
        row["latent_id"],
        image,
        row["width"],
        row["height"],
        (row["shape"][1], row["shape"][2]),
        texts.captions[image],
        texts.classes.get(image, ()),
        rate,
        row["mask"] if masked else None,
        row["resolution"],
        row["references"],
        texts.weights.get(image, ()),
    )


@dataclass(frozen=True)
class Texts:
    """The captions that a training run may use, as caption_ids of the table `captions`. `captions` maps each image_id
    to the captions of the image. `classes` maps each image_id to class captions, one for each caption of the image. A
    class caption has the class word, such as "cat", in place of the trigger word. If a caption is dropped, `empty`
    replaces the caption and `empty_class` replaces its class caption. `weights` maps an image_id to one number for each
    caption: how often the caption is drawn.

    An image_id is the sha256 of the image file. A class caption is "" if there is none. `weights` lacks images whose
    captions are drawn equally often. `empty` is "" if captions are never dropped. `empty_class` is "" unless `empty` is
    the trigger word and class captions are used.
    """

    captions: dict[str, tuple[str, ...]]  # the captions of the image, in order
    classes: dict[str, tuple[str, ...]]  # the class caption of each of them, "" if there is none
    empty: str  # used in place of a dropped caption; "" if captions are never dropped
    empty_class: str  # used in place of the class caption of a dropped caption; "" if captions are never dropped
    weights: dict[str, tuple[float, ...]]  # how often each caption is drawn; without images whose captions are drawn equally


def _texts(ctx: StageContext, data: DataConfig, dropout: bool, with_classes: bool) -> Texts:
    """Return the captions of a training run as `Texts`: their caption_ids, read from the table `captions`. `ctx` is the
    stage's context, with its input tables. `data` holds the settings [train.data]. `dropout` is True if captions are
    dropped at random. `with_classes` is True if the result must contain class captions. A class caption has the class
    word (such as "cat") in place of the trigger word. Raises ValueError if the table lacks a kind of caption that the
    settings need.
    """
    by_role: dict[str, list[Row]] = {}
    for row in sorted(ctx.rows(CAPTIONS).to_pylist(), key=lambda row: (row["position"], row["caption_id"])):
        by_role.setdefault(row["role"], []).append(row)
    if with_classes and "class" not in by_role:
        raise ValueError("[train.preservation] needs captions with a class word: set trigger and class_word in [captions]")
    class_of = {(row["image_id"], row["position"]): row["caption_id"] for row in by_role.get("class", []) if with_classes}
    captions: dict[str, list[Row]] = {}
    for row in by_role.get("caption", []):
        captions.setdefault(row["image_id"], []).append(row)
    empty = empty_class = ""
    if dropout:
        empty = _dropped_caption(by_role, data)
        empty_class = class_of.get(("", 0), "") if data.dropped == "trigger" else ""
    return Texts(
        {image: tuple(row["caption_id"] for row in rows) for image, rows in captions.items()},
        {image: tuple(class_of.get((image, row["position"]), "") for row in rows) for image, rows in captions.items()},
        empty,
        empty_class,
        {image: tuple(weights) for image, rows in captions.items() if len(set(weights := [row["weight"] for row in rows])) > 1},
    )


def _dropped_caption(by_role: dict[str, list[Row]], data: DataConfig) -> str:
    """Return the caption_id of the text that replaces a dropped caption. `by_role` maps a role to the rows of the table
    `captions` that have this role. A role is the purpose of a caption, such as "caption" or "empty". `data.dropped` is
    the role of the wanted text: "empty" for the empty caption, or "trigger" for the trigger word. Raises ValueError if
    no row has this role.
    """
    if data.dropped in by_role:
        caption: str = by_role[data.dropped][0]["caption_id"]
        return caption
    if data.dropped == "trigger":
        raise ValueError('[train.data] dropped = "trigger": captions has no such row; set trigger in [captions]')
    raise ValueError("train: caption_dropout needs the empty caption, of which captions has no row; run the stage captions")
