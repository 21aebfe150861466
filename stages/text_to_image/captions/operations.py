"""Change captions before the template is applied: replace words, drop parts between commas, and shuffle them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from stages.text_to_image.caption_files.text import Caption
from stages.text_to_image.captions.config import CaptionsConfig
from stages.tuner import draws


def operate(captions: Iterable[Caption], config: CaptionsConfig, image_id: str) -> list[Caption]:
    """Replace, drop and shuffle as [captions] says. The orders of a caption share its weight."""
    found = []
    for position, caption in enumerate(weighted(captions, config.weights)):
        text = caption.text
        for word, other in (config.replace or {}).items():
            text = text.replace(word, other)
        if config.drop or config.shuffle:
            unwanted = {part.strip().casefold() for part in config.drop}
            parts = [part.strip() for part in text.split(",")]
            parts = [part for part in parts if part and part.casefold() not in unwanted]
            # The name of the draw is the image and the position, so that a run again gives the same orders.
            orders = [_shuffled(parts, config.keep, f"{image_id} {position} {n}") for n in range(config.shuffle)] or [parts]
            weight = None if caption.weight is None else caption.weight / len(orders)
            found += [dataclasses.replace(caption, text=", ".join(order), weight=weight) for order in orders]
        else:
            found.append(dataclasses.replace(caption, text=text))
    return found


def weighted(captions: Iterable[Caption], weights: Sequence[float]) -> list[Caption]:
    """The last weight holds for all further captions."""
    if not weights:
        return list(captions)
    return [dataclasses.replace(each, weight=weights[min(n, len(weights) - 1)]) for n, each in enumerate(captions)]


def _shuffled(parts: list[str], keep: int, name: str) -> list[str]:
    head, tail = parts[:keep], parts[keep:]
    return head + [tail[at] for at in draws.permutation(len(tail), 0, f"caption {name}")]
