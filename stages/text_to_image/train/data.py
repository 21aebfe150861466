"""Which rows of the tables a run trains on, and how often: crops with their captions, class captions, masks and references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from schemas.text_to_image import BUCKETS, CAPTIONS, DRAWINGS, EMBEDDINGS, IMAGES, LATENTS
from stages.hashing import text_sha256
from stages.run import Run, TensorReader
from stages.settings import nearest
from stages.text_to_image.imaging.masks import composed
from stages.text_to_image.imaging.usable import REFERENCE, usable_paths
from stages.text_to_image.slider import NEUTRAL, SliderConfig
from stages.text_to_image.train.config import DataConfig, TrainConfig, ValidationConfig
from stages.tuner import draws

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
    dropped: str = ""  # caption_id of what its dropped caption becomes; "": `Dataset.empty`
    of_class: bool = False  # a regularisation image
    poles: tuple[str, ...] = ()  # caption_ids of a slider's positive and negative prompt
    strength: float = 1.0  # of the adapter; -1: the picture shows the other end of a slider

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

    @property
    def pictures(self) -> set[str]:
        """The image_ids of the subject, without those of the class."""
        return {crop.image_id for crop in self.crops if not crop.of_class}

    @property
    def share(self) -> float:
        """Of the draws, those of the subject."""
        own = sum(crop.rate for crop in self.crops if not crop.of_class)
        return own / sum(crop.rate for crop in self.crops) if own else 1.0

    def pairs(self) -> list[tuple[str, str, str]]:
        """Every (latent_id, image_id, caption_id) that the run may read, also to measure. Part of the recipe."""
        crops = [*self.crops, *self.held]
        pairs = [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.captions]
        pairs += [(crop.latent_id, crop.image_id, caption) for crop in crops for caption in crop.classes if caption]
        pairs += [(crop.latent_id, crop.image_id, crop.dropped) for crop in crops if crop.dropped]
        pairs += [(crop.latent_id, crop.image_id, pole) for crop in crops for pole in crop.poles]
        # What replaces a dropped caption belongs to no crop.
        return [*pairs, ("", "", self.empty), *([("", "", self.empty_class)] if self.empty_class else [])]


def load_dataset(run: Run[TrainConfig]) -> Dataset:
    """What [train] chooses to train on. Raises ValueError if nothing is left, or if a table lacks rows that the settings need."""
    data = drawn_dataset(run, run.config.slider) if run.config.slider else pictured_dataset(run)
    read = {caption for _, _, caption in data.pairs() if caption}
    if lost := len(read - set(data.text_rows)):
        raise ValueError(f"train: {lost} of {len(read)} captions have no embedding; run the stage embeddings")
    return data


def drawn_dataset(run: Run[TrainConfig], slider: SliderConfig) -> Dataset:
    """The drawings of a slider's neutral prompts."""
    if count := run.inputs.rows(IMAGES).num_rows:
        raise ValueError(
            f"[train.slider] is trained on the model's own drawings, not on pictures, of which there are {count}; set [images] "
            "folder = []"
        )
    captions = run.inputs.rows(CAPTIONS).to_pylist()
    texts = {row["caption_id"]: row["text"] for row in captions if row["role"] == NEUTRAL}
    empty = next(row["caption_id"] for row in captions if row["role"] == "empty")
    crops = [
        Crop(
            row["latent_id"],
            row["image_id"],
            row["width"],
            row["height"],
            (row["shape"][1], row["shape"][2]),
            captions=(row["caption_id"],),
            resolution=max(row["width"], row["height"]),
            poles=tuple(map(text_sha256, slider.poles(texts[row["caption_id"]]))),
        )
        for row in sorted(run.inputs.rows(DRAWINGS).to_pylist(), key=lambda row: str(row["latent_id"]))
    ]
    return Dataset(tuple(crops), empty if run.config.caption_dropout else "", _text_rows(run))


def latent_reader(run: Run[TrainConfig]) -> TensorReader:
    """By the latent_id of a crop."""
    return run.inputs.tensors(DRAWINGS if run.config.slider else LATENTS)


def _text_rows(run: Run[TrainConfig]) -> dict[str, int]:
    return {row["caption_id"]: row["shape"][0] for row in run.inputs.rows(EMBEDDINGS).to_pylist()}


def pictured_dataset(run: Run[TrainConfig]) -> Dataset:
    config = run.config
    paths = usable_paths(run.inputs.rows(IMAGES))
    every = run.inputs.rows(IMAGES).to_pylist()
    images = {row["image_id"]: row for row in every if row["rejected"] is None and row["use"] != REFERENCE}
    texts = _texts(run, config.data, bool(config.caption_dropout), config.preservation is not None)
    latents = _latents(run, paths, texts)
    if config.mask and not any(row["mask"] for row in latents):
        raise ValueError('[train.mask]: no crop has a mask; set mask = "alpha" or "file" in [latents] and run that stage')
    references = References(every, run.inputs.rows(BUCKETS).to_pylist(), run.inputs.rows(LATENTS).to_pylist())
    found = rates(config.data, [(row["resolution"], paths[row["image_id"]][0]) for row in latents])
    found = folder_rates(found, [images[row["image_id"]] for row in latents], config.data.regularisation)
    drawn = [(row, rate) for row, rate in zip(latents, found, strict=True) if rate]
    if not drawn:
        raise ValueError(f"[train.data]: nothing to train on: resolutions and repeats leave out all {len(latents)} crops")
    trained = {row["image_id"]: paths[row["image_id"]] for row, _ in drawn}
    other_end = matching(config.data.backwards, trained, "[train.data] backwards")
    aside: frozenset[str] = frozenset()
    if config.validation:
        # Regularisation images show the class of the subject, not the subject, and are never held out. Measured is strength 1.
        own = {image_id for image_id in trained if images[image_id]["use"] is None} - other_end
        aside = held_out(config.validation, {image_id: paths[image_id] for image_id in own})
    crops, held = [], []
    for row, rate in drawn:
        image = row["image_id"]
        crop = Crop(
            latent_id=row["latent_id"],
            image_id=image,
            width=row["width"],
            height=row["height"],
            grid=(row["shape"][1], row["shape"][2]),
            captions=texts.captions[image],
            classes=texts.classes.get(image, ()),
            rate=rate,
            mask=row["mask"] if config.mask else None,
            resolution=row["resolution"],
            references=references.of(image, row["resolution"], row["flip"]),
            weights=texts.weights.get(image, ()),
            dropped=texts.dropped.get(images[image]["trigger"], ""),
            of_class=images[image]["use"] is not None,
            strength=-1.0 if image in other_end else 1.0,
        )
        if image not in aside:
            crops.append(crop)
        elif not row["flip"] and not row["further"]:  # validation measures the plain crops
            held.append(crop)
    if not crops:
        raise ValueError(f"[train.validation]: all {len(aside)} images are held out; lower share, or name fewer paths")
    if all(crop.strength < 0 for crop in crops):
        raise ValueError(f"[train.data] backwards: {list(config.data.backwards)} leaves no image that is trained at strength 1")
    return Dataset(tuple(crops), texts.empty, _text_rows(run), tuple(held), texts.empty_class)


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


@dataclass(frozen=True)
class Texts:
    """The caption_ids that a run may use, by image_id."""

    captions: dict[str, tuple[str, ...]]  # the captions of the image, in order
    classes: dict[str, tuple[str, ...]]  # the class caption of each of them, "" if there is none
    empty: str  # used in place of a dropped caption; "" if captions are never dropped
    empty_class: str  # the class word alone, if `empty` is the trigger word and class captions are used; else ""
    weights: dict[str, tuple[float, ...]]  # how often each caption is drawn; without images whose captions are drawn equally
    dropped: dict[str, str]  # a folder's own trigger -> what replaces a dropped caption of its images, where that is not `empty`


def _texts(run: Run[Any], data: DataConfig, dropout: bool, with_classes: bool) -> Texts:
    """Raises ValueError if the table `captions` lacks a kind of caption that the settings need."""
    by_role: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(run.inputs.rows(CAPTIONS).to_pylist(), key=lambda row: (row["position"], row["caption_id"])):
        by_role[row["role"]].append(row)
    if with_classes and not by_role["class"]:
        raise ValueError("[train.preservation] needs captions with a class word: set trigger and class_word in [captions]")
    class_of = {(row["image_id"], row["position"]): row["caption_id"] for row in by_role["class"] if with_classes}
    captions: dict[str, list[Row]] = defaultdict(list)
    for row in by_role["caption"]:
        captions[row["image_id"]].append(row)
    empty = empty_class = ""
    own: dict[str, str] = {}
    if dropout:
        if not by_role[data.dropped]:
            raise ValueError(
                '[train.data] dropped = "trigger": captions has no such row; set trigger in [captions]'
                if data.dropped == "trigger"
                else "train: caption_dropout needs the empty caption, of which captions has no row; run the stage captions"
            )
        # The trigger of [captions] has position 0. Images of a folder with a trigger of its own keep that.
        first = by_role[data.dropped][0]
        empty = (first if not first["position"] else by_role["empty"][0])["caption_id"]
        if data.dropped == "trigger":
            alone = {row["text"]: row["caption_id"] for row in (*by_role["empty"], *by_role["trigger"])}
            words = {word for word in run.inputs.rows(IMAGES)["trigger"].to_pylist() if word is not None}
            if absent := sorted(words - set(alone)):
                raise ValueError(f"train: captions has no row of the trigger {absent[0]!r}; run the stage captions")
            own = {word: alone[word] for word in words if alone[word] != empty}
        # The class caption of the trigger word alone has no image and position 0: it is the class word.
        empty_class = class_of.get(("", 0), "") if data.dropped == "trigger" else ""
    return Texts(
        {image: tuple(row["caption_id"] for row in rows) for image, rows in captions.items()},
        {image: tuple(class_of.get((image, row["position"]), "") for row in rows) for image, rows in captions.items()},
        empty,
        empty_class,
        {image: tuple(weights) for image, rows in captions.items() if len(set(weights := [row["weight"] for row in rows])) > 1},
        own,
    )


@dataclass(frozen=True)
class Reference:
    latent_id: str
    grid: tuple[int, int]  # (height, width) of the latent, in tokens


class References:
    def __init__(self, images: Iterable[Row], buckets: Iterable[Row], latents: Iterable[Row]) -> None:
        rows = list(images)
        # The file of a reference may be a duplicate; its latent is that of the image with the same content.
        self.ids = {row["path"]: row["image_id"] for row in rows if row["rejected"] in (None, "duplicate")}
        self.paths: dict[str, list[str]] = {}
        for row in sorted(rows, key=lambda row: row["reference"] or 0):
            if row["use"] == REFERENCE and row["reference_of"] and row["path"] in self.ids:
                self.paths.setdefault(self.ids.get(row["reference_of"], ""), []).append(row["path"])
        wanted = {self.ids[path] for paths in self.paths.values() for path in paths}
        self.encoded = {(*place(row), row["flip"]): row for row in latents if row["image_id"] in wanted and not row["rejected"]}
        self.buckets: dict[str, list[Row]] = {}
        # By resolution, so that `_reference` finds the highest that fits at the end.
        for row in sorted(buckets, key=lambda row: int(row["resolution"])):
            if row["image_id"] in wanted and row["rejected"] is None:
                self.buckets.setdefault(row["image_id"], []).append(row)

    def of(self, image_id: str, resolution: int, flip: bool) -> tuple[Reference, ...]:
        """The references of a crop, in order, mirrored if the crop is. Raises ValueError if one has no latent."""
        return tuple(self._reference(path, resolution, flip) for path in self.paths.get(image_id, ()))

    def _reference(self, path: str, resolution: int, flip: bool) -> Reference:
        buckets = self.buckets.get(self.ids[path], [])
        # The crop's resolution, else the next lower one, else the reference's lowest.
        fitting = [row for row in buckets if row["resolution"] <= resolution] or buckets[:1]
        latent = self.encoded.get((*place(fitting[-1]), flip)) if fitting else None
        if latent is None:
            raise ValueError(f"train: the reference {path} has no latent; see the tables buckets and latents")
        return Reference(latent["latent_id"], (latent["shape"][1], latent["shape"][2]))


PLACE = ("image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h")  # columns that a bucket and its latents share


def size(row: Row) -> tuple[Any, ...]:
    """Image and trained size: equal for a bucket and the jittered crops made from it."""
    return row["image_id"], row["width"], row["height"]


def is_inside(row: Row, bucket: Row | None) -> bool:
    """Whether the crop of a latent lies inside that of its bucket, to a thousandth of a pixel."""
    if bucket is None or None in (row["crop_x"], row["crop_y"], row["crop_w"], row["crop_h"]):
        return False
    return all(
        row[start] >= bucket[start] - 1e-3 and row[start] + row[side] <= bucket[start] + bucket[side] + 1e-3
        for start, side in (("crop_x", "crop_w"), ("crop_y", "crop_h"))
    )


def place(row: Row) -> tuple[Any, ...]:
    """Image, trained size and crop: equal for a bucket and its own latents."""
    return tuple(row[name] for name in PLACE)


def folder_rates(base: Sequence[float], images: Sequence[Row], regularisation: float) -> list[float]:
    """`base`, the rate of each crop, changed by the columns `repeats`, `weight` and `use` of its image."""
    found = [rate * (1.0 if row["repeats"] is None else row["repeats"]) for rate, row in zip(base, images, strict=True)]
    # Weights compare folders of one use: those of the subject with each other, and those of regularisation images with each
    # other.
    for use in {row["use"] for row in images}:
        own = [
            (n, row["folder"], row["weight"]) for n, row in enumerate(images) if row["use"] == use and row["weight"] is not None
        ]
        weights = {folder: weight for _, folder, weight in own}
        sums: dict[str, float] = defaultdict(float)
        for n, folder, _ in own:
            sums[folder] += found[n]
        # No rate is reduced: the folder with the largest sum per weight keeps its rates. A folder whose rates are all 0 stays
        # at 0.
        most = max((sums[folder] / weights[folder] for folder in weights), default=0.0)
        for n, folder, weight in own:
            found[n] *= most * weight / sums[folder] if sums[folder] else 1.0
    subject = sum(rate for rate, row in zip(found, images, strict=True) if row["use"] is None)
    of_class = sum(rate for rate, row in zip(found, images, strict=True) if row["use"] is not None)
    if not of_class:
        return found
    # One factor for all, so that regularisation images keep their proportions among themselves.
    factor = regularisation * subject / of_class
    return [rate if row["use"] is None else rate * factor for rate, row in zip(found, images, strict=True)]


def rates(config: DataConfig, crops: Sequence[tuple[int, str]]) -> list[float]:
    """By crop, (resolution, path of its image). Raises ValueError if a setting names what no crop has, or lacks a resolution."""
    weights = _weights(config, {resolution for resolution, _ in crops})
    folders = {folder.strip("/").removeprefix("./"): count for folder, count in (config.repeats or {}).items()}
    for given, folder in zip(config.repeats or {}, folders, strict=True):
        if not any(_below(path, folder) for _, path in crops):
            folders_above = {str(above) for _, path in crops for above in PurePosixPath(path).parents}
            hint = nearest(folder, sorted(folders_above), '"{}"', 0.5)
            raise ValueError(f"[train.data] repeats: no image that is trained on has the path {given!r}{hint}")
    # The longest path that matches decides.
    longest = sorted(folders, key=len, reverse=True)
    times = [next((folders[f] for f in longest if _below(path, f)), 1.0) for _, path in crops]
    found = [weights[resolution] * count for (resolution, _), count in zip(crops, times, strict=True)]
    most = max(found, default=0.0)
    return [rate / most for rate in found] if 0 < most < 1 else found  # else some epochs would have no crop


def _weights(config: DataConfig, present: Iterable[int]) -> dict[int, float]:
    """Relative frequency by resolution; the largest is 1."""
    resolutions = sorted(present)
    if config.resolutions is None:
        return dict.fromkeys(resolutions, 1.0)
    given = {int(name): float(weight) for name, weight in config.resolutions.items()}
    names = ", ".join(map(str, resolutions))
    for resolution in given:
        if resolution not in resolutions:
            raise ValueError(f"[train.data] resolutions: no crop has {resolution}; there are {names}")
    for resolution in resolutions:
        if resolution not in given:
            raise ValueError(f"[train.data] resolutions: {resolution} has no weight; 0 leaves it out; there are {names}")
    return {resolution: given[resolution] / max(given.values()) for resolution in resolutions}


def matching(wildcards: Sequence[str], paths: Mapping[str, Sequence[str]], setting: str) -> frozenset[str]:
    """The image_ids of which one of all paths matches. Raises ValueError if none does, unless there are no wildcards."""
    patterns = [composed(each) for each in wildcards]
    found = {i for i, own in paths.items() if any(fnmatchcase(composed(path), p) for path in own for p in patterns)}
    if wildcards and not found:
        raise ValueError(f"{setting}: {list(wildcards)} matches none of the {len(paths)} images")
    return frozenset(found)


def held_out(config: ValidationConfig, paths: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The image_ids to hold out. `paths`: all paths of each image. Raises ValueError if `config.paths` matches none."""
    if config.paths:
        return matching(config.paths, paths, "[train.validation] paths")
    # The choice depends on image_ids and seed alone. Each image has a draw of its own, which added images do not change.
    drawn = sorted((draws.uniform(config.seed, f"held out {image_id}"), image_id) for image_id in paths)
    below = [image_id for u, image_id in drawn if u < config.share][: config.most]
    return frozenset(below or [image_id for _, image_id in drawn[:1]])


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(composed(path)).is_relative_to(composed(folder))
