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
from stages.run import Run
from stages.text_to_image.imaging.usable import USE, usable_paths
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.folders import folder_rates
from stages.text_to_image.train.references import Reference, References, is_inside, place, size
from stages.text_to_image.train.selection import DataConfig, held_out, rates

Row = dict[str, Any]


@dataclass(frozen=True)
class Crop:
    latent_id: str
    image_id: str
    width: int  # pixels
    height: int
    grid: tuple[int, int]  # (height, width) of the latent, in tokens
    captions: tuple[str, ...]  # caption_ids
    classes: tuple[str, ...] = ()  # for each caption, its class caption; "": it has none
    rate: float = 1.0  # mean occurrences per epoch
    mask: bytes | None = None  # the weight of each token, one byte each; None: all count in full
    resolution: int = 0  # of its bucket
    references: tuple[Reference, ...] = ()  # what an edit starts from
    weights: tuple[float, ...] = ()  # for each caption, how often it is drawn; empty: equally

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def reference_tokens(self) -> int:
        return sum(each.grid[0] * each.grid[1] for each in self.references)

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """Sizes of the latent and of its references, (height, width) in tokens. Crops of one shape can share a batch."""
        return (self.grid, *(each.grid for each in self.references))

    def class_of(self, caption: int) -> str:
        """The class caption made from caption number `caption`; "" if there is none."""
        return self.classes[caption] if self.classes else ""


@dataclass(frozen=True)
class Dataset:
    """What a run trains on. The order of `crops` and `held` depends on their content alone."""

    crops: tuple[Crop, ...]
    empty: str  # caption_id of what a dropped caption becomes, the empty caption or the trigger; "": no caption is dropped
    text_rows: dict[str, int]  # caption_id -> rows of its embedding
    held: tuple[Crop, ...] = ()  # crops that are never trained on: the run is measured by them
    empty_class: str = ""  # caption_id of the class word alone, if a dropped caption becomes the trigger and classes are used

    @property
    def rates(self) -> list[float] | None:
        """None if every crop occurs exactly once per epoch."""
        found = [crop.rate for crop in self.crops]
        return None if set(found) == {1.0} else found

    def pairs(self) -> list[tuple[str, str, str]]:
        """Every (latent_id, image_id, caption_id) that the run may read, held-out crops and class captions included.
        Part of the recipe.
        """
        crops = [*self.crops, *self.held]
        pairs = [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.captions]
        pairs += [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.classes if caption]
        # What replaces a dropped caption belongs to no crop.
        return [*pairs, ("", "", self.empty), *([("", "", self.empty_class)] if self.empty_class else [])]


def load_dataset(run: Run[TrainConfig]) -> Dataset:
    """What [train] chooses to train on. Raises ValueError if nothing is left, or if a table lacks rows that the settings need."""
    config = run.config
    paths = usable_paths(run.inputs.rows(IMAGES))
    every = run.inputs.rows(IMAGES).to_pylist()
    images = {row["image_id"]: row for row in every if row["rejected"] is None and row["use"] != USE}
    texts = _texts(run, config.data, bool(config.caption_dropout), config.preservation is not None)
    latents = _latents(run, paths, texts)
    if config.mask and not any(row["mask"] for row in latents):
        raise ValueError('[train.mask]: no crop has a mask; set mask = "alpha" or "file" in [latents] and run that stage')
    references = References(every, run.inputs.rows(BUCKETS).to_pylist(), run.inputs.rows(LATENTS).to_pylist())
    for row in latents:
        row["references"] = references.of(row["image_id"], row["resolution"], row["flip"])
    drawn = _with_rates(latents, images, paths, config.data)
    aside = _held_images(drawn, images, paths, config)
    crops = [_crop(row, rate, texts, config.mask is not None) for row, rate in drawn if row["image_id"] not in aside]
    if not crops:
        raise ValueError(f"[train.validation]: all {len(aside)} images are held out; lower share, or name fewer paths")
    # Validation measures the plain crops: no mirrored copies, no jittered ones.
    plain = [(row, rate) for row, rate in drawn if row["image_id"] in aside and not row["flip"] and not row["further"]]
    held = [_crop(row, rate, texts, config.mask is not None) for row, rate in plain]
    return _with_embeddings(run, Dataset(tuple(crops), texts.empty, {}, tuple(held), texts.empty_class))


def _with_rates(
    latents: Sequence[Row], images: Mapping[str, Row], paths: Mapping[str, list[str]], data: DataConfig
) -> list[tuple[Row, float]]:
    found = rates(data, [(row["resolution"], paths[row["image_id"]][0]) for row in latents])
    found = folder_rates(found, [images[row["image_id"]] for row in latents], data.regularisation)
    drawn = [(row, rate) for row, rate in zip(latents, found, strict=True) if rate]
    if not drawn:
        raise ValueError(f"[train.data]: nothing to train on: resolutions and repeats leave out all {len(latents)} crops")
    return drawn


def _held_images(
    drawn: Sequence[tuple[Row, float]], images: Mapping[str, Row], paths: Mapping[str, list[str]], config: TrainConfig
) -> frozenset[str]:
    """The image_ids that [train.validation] holds out, of those with a crop in `drawn`."""
    if not config.validation:
        return frozenset()
    # Regularisation images show the class of the subject, not the subject, and are never held out.
    own = {row["image_id"] for row, _ in drawn if images[row["image_id"]]["use"] is None}
    return held_out(config.validation, {image_id: paths[image_id] for image_id in own})


def _latents(run: Run[Any], paths: Container[str], texts: Texts) -> list[Row]:
    """Rows of `latents` to train on, with two more keys. Raises ValueError if a crop has no latent."""
    buckets = [row for row in run.inputs.rows(BUCKETS).to_pylist() if row["rejected"] is None]
    places = {place(row) for row in buckets if row["image_id"] in paths}
    by_size = {size(row): row for row in buckets if row["image_id"] in paths}
    # A jittered crop lies inside its bucket's crop and is resized to the same size.
    latents = [row for row in run.inputs.rows(LATENTS).to_pylist() if is_inside(row, by_size.get(size(row)))]
    lost = len(places - {place(row) for row in latents})
    if lost:
        raise ValueError(f"train: {lost} of {len(places)} crops have no latent; run the stage latents")
    # `further`: made by [latents] jitter, in addition to the crop of the bucket.
    encoded = [
        row | {"resolution": by_size[size(row)]["resolution"], "further": place(row) not in places}
        for row in latents
        if row["rejected"] is None
    ]
    # Sorted by key, so that what is drawn does not depend on the order of the table.
    used = sorted((row for row in encoded if row["image_id"] in texts.captions), key=lambda row: str(row["latent_id"]))
    if not used:
        raise ValueError(
            f"train: there is nothing to train on: of {len(places)} crops {len(latents) - len(encoded)} could not be encoded "
            f"and {len(encoded)} have no caption; see the tables buckets, latents and captions"
        )
    return used


def _with_embeddings(run: Run[Any], data: Dataset) -> Dataset:
    text_rows = {row["caption_id"]: row["shape"][0] for row in run.inputs.rows(EMBEDDINGS).to_pylist()}
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
    """The caption_ids that a run may use, by image_id."""

    captions: dict[str, tuple[str, ...]]  # the captions of the image, in order
    classes: dict[str, tuple[str, ...]]  # the class caption of each of them, "" if there is none
    empty: str  # used in place of a dropped caption; "" if captions are never dropped
    empty_class: str  # the class word alone, if `empty` is the trigger word and class captions are used; else ""
    weights: dict[str, tuple[float, ...]]  # how often each caption is drawn; without images whose captions are drawn equally


def _texts(run: Run[Any], data: DataConfig, dropout: bool, with_classes: bool) -> Texts:
    """Raises ValueError if the table `captions` lacks a kind of caption that the settings need."""
    by_role: dict[str, list[Row]] = {}
    for row in sorted(run.inputs.rows(CAPTIONS).to_pylist(), key=lambda row: (row["position"], row["caption_id"])):
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
        # The class caption of the trigger word alone has no image and position 0: it is the class word.
        empty_class = class_of.get(("", 0), "") if data.dropped == "trigger" else ""
    return Texts(
        {image: tuple(row["caption_id"] for row in rows) for image, rows in captions.items()},
        {image: tuple(class_of.get((image, row["position"]), "") for row in rows) for image, rows in captions.items()},
        empty,
        empty_class,
        {image: tuple(weights) for image, rows in captions.items() if len(set(weights := [row["weight"] for row in rows])) > 1},
    )


def _dropped_caption(by_role: dict[str, list[Row]], data: DataConfig) -> str:
    if data.dropped in by_role:
        caption: str = by_role[data.dropped][0]["caption_id"]
        return caption
    if data.dropped == "trigger":
        raise ValueError('[train.data] dropped = "trigger": captions has no such row; set trigger in [captions]')
    raise ValueError("train: caption_dropout needs the empty caption, of which captions has no row; run the stage captions")
