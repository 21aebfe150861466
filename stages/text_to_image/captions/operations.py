"""Change captions before the template is applied: replace words, drop parts between commas, and shuffle them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from stages.text_to_image.caption_files.text import Caption
from stages.text_to_image.captions.config import CaptionsConfig
from stages.tuner import draws


def operate(captions: Iterable[Caption], config: CaptionsConfig, image_id: str) -> list[Caption]:
    """Return the captions of one image after the changes that the settings [captions] ask for. `captions` are the
    captions before the changes. `config` holds the settings: `replace` replaces words, and `drop` removes parts between
    commas. If `shuffle` is a number n above 0, each caption becomes n captions, each with its parts in a random order.
    `weights` sets the weight of each caption. `image_id` is the image's key.

    The first `keep` parts of a caption stay in place. The n captions share the weight of the caption that they are made
    from. Equal keys and positions give equal orders.
    """
    found = []
    for position, caption in enumerate(weighted(captions, config.weights)):
        text = caption.text
        for word, other in (config.replace or {}).items():
            text = text.replace(word, other)
        if config.drop or config.shuffle:
            unwanted = {part.strip().casefold() for part in config.drop}
            parts = [part.strip() for part in text.split(",")]
            parts = [part for part in parts if part and part.casefold() not in unwanted]
            orders = [_shuffled(parts, config.keep, f"{image_id} {position} {n}") for n in range(config.shuffle)] or [parts]
            weight = None if caption.weight is None else caption.weight / len(orders)
            found += [dataclasses.replace(caption, text=", ".join(order), weight=weight) for order in orders]
        else:
            found.append(dataclasses.replace(caption, text=text))
    return found


def weighted(captions: Iterable[Caption], weights: Sequence[float]) -> list[Caption]:
    """Return the captions of one image with their weights set. The first caption gets the first of `weights`, the second
    the second, and so on. If there are more captions than weights, the others get the last weight. If `weights` is empty,
    the captions are returned unchanged.
    """
    if not weights:
        return list(captions)
    return [dataclasses.replace(each, weight=weights[min(n, len(weights) - 1)]) for n, each in enumerate(captions)]


def _shuffled(parts: list[str], keep: int, name: str) -> list[str]:
    head, tail = parts[:keep], parts[keep:]
    return head + [tail[at] for at in draws.permutation(len(tail), 0, f"caption {name}")]
