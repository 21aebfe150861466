"""How `latentmill follow` traces one image through the tables of text_to_image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.pipelines import Chain, Query, Row
from stages.settings import several

STEPS_NAMED = 12  # at most this many of an image's training steps are listed
ID_DIGITS = 4  # a text of fewer hex digits is not taken for the start of an image_id


def find_image(query: Query, need: Callable[[str], Any], text: str) -> list[dict[str, Any]]:
    """Rows of `images`, by path, start of an image_id, part of a path, part of a caption: the first that matches."""
    path = text
    # What the user typed may be a path from the current folder; the table has paths below the image folder.
    with suppress(ValueError, OSError):
        if Path(text).exists():
            path = Path(text).resolve().relative_to(need("image_folder").resolve()).as_posix()
    if exact := query("select * from images where path = $path", path=path):
        return exact[:1]
    captioned = "select image_id from captions where role = 'caption' and contains(lower(text), $text)"
    ways = [("contains(lower(path), $text)", path.lower()), (f"image_id in ({captioned})", text.lower())]
    if len(text) >= ID_DIGITS and set(text.lower()) <= set("0123456789abcdef"):
        ways.insert(0, ("image_id ^@ $text", text.lower()))
    for condition, value in ways:
        rows = query(f"select * from images where {condition} order by rejected is not null, path", text=value)
        if rows:
            # One row of several files with the same bytes: the first that is not rejected.
            return list({row["image_id"] or row["path"]: row for row in reversed(rows)}.values())[::-1]
    return []


def describe_image(query: Query, image: Row) -> Iterator[str]:
    kind = f"{image['format'] or 'unknown format'} {image['mode']}".strip()
    size = f"{image['width']} x {image['height']}" if image["width"] else "unknown size"
    frames = f", the first of {image['frames']} frames" if image["frames"] > 1 else ""
    yield image["path"]
    yield f"{kind}, {size}, {image['bytes'] / 1000:.1f} kB{frames}"
    yield f"image_id {image['image_id'] or 'unknown'}"
    if image["rejected"]:
        yield f"not used: {image['rejected']}{': ' + image['detail'] if image['detail'] else ''}"
    if image["image_id"]:
        others = "select path from images where image_id = $id and path <> $path order by path"
        for other in query(others, id=image["image_id"], path=image["path"]):
            yield f"the same bytes are also in {other['path']}"


def describe_captions(query: Query, image: Row) -> Iterator[str]:
    rows = query(
        "select text, source, origin, tokens, dropped_tokens from captions left join embeddings using (caption_id) "
        "where image_id = $id and role = 'caption' order by position",
        id=image["image_id"],
    )
    for row in rows:
        tokens = "not embedded yet" if row["tokens"] is None else several(row["tokens"], "token")
        cut = f", {row['dropped_tokens']} more were cut" if row["dropped_tokens"] else ""
        origin = f" ({row['source']}{' ' + row['origin'] if row['origin'] else ''})"
        yield f'"{" ".join(row["text"].split())}"{origin}: {tokens}{cut}'


def describe_buckets(query: Query, image: Row) -> Iterator[str]:
    rows = query("select * from buckets where image_id = $id order by resolution", id=image["image_id"])
    for row in rows:
        if row["rejected"]:
            yield f"{row['resolution']}: not trained, {row['rejected']}"
            continue
        crop = f"from {row['crop_w']:.0f} x {row['crop_h']:.0f} at ({row['crop_x']:.0f}, {row['crop_y']:.0f})"
        lost = f"scale {row['scale']:.3g}, crop loss {100 * row['crop_loss']:.1f} %"
        yield f"{row['resolution']}: {row['width']} x {row['height']} {crop}, {lost}, {several(row['tokens'], 'token')}"


def describe_latents(query: Query, image: Row) -> Iterator[str]:
    rows = query(
        "select * from latents where image_id = $id order by width * height, width, flip, crop_x, crop_y", id=image["image_id"]
    )
    for row in rows:
        size = f"{row['width']} x {row['height']}{' mirrored' if row['flip'] else ''}"
        if row["rejected"]:
            yield f"{size}: not encoded, {row['rejected']}"
            continue
        shape = " x ".join(map(str, row["shape"]))
        values = f"mean {row['mean']:.3f}, std {row['std']:.3f}, largest {row['absmax']:.2f}"
        yield f"{size}: {shape} {row['dtype']}, {values}; {row['shard']} at {row['byte_offset']}, {row['nbytes']} bytes"


def describe_training(query: Query, image: Row) -> Iterator[str]:
    held_out = query(
        "select step, avg(loss) as loss, count(*) as samples from train "
        "where image_id = $id and split = 'validation' group by step order by step",
        id=image["image_id"],
    )
    if held_out:
        rows = held_out[0], held_out[-1], min(held_out, key=lambda row: float(row["loss"]))
        first, last, lowest = (f"{row['loss']:.4f} at step {row['step']}" for row in rows)
        yield f"held out, measured by {held_out[0]['samples']} samples: mean loss {first}, {last}; the lowest {lowest}"
    # A loss depends mostly on sigma, so it is compared with the mean loss of all samples in the same tenths of sigma.
    (drawn,) = query(
        "with drawn as (select * from train where split = 'train'), "
        "levels as (select avg(loss) as level, floor(sigma * 10) as tenth from drawn group by tenth), "
        "mine as (select * from drawn join levels on floor(sigma * 10) = tenth where image_id = $id) "
        "select count(*) as times, list(distinct step order by step) as steps, avg(loss) as loss, avg(level) as level, "
        "count(*) filter (dropped) as dropped, (select avg(loss) from drawn) as every, "
        "(select max(step) from drawn) as last from mine",
        id=image["image_id"],
    )
    if not drawn["times"]:
        if not held_out:
            yield f"never drawn in {drawn['last'] or 0} steps"
        return
    steps = drawn["steps"]
    named = ", ".join(map(str, steps[:STEPS_NAMED])) + (f", ... {steps[-1]}" if len(steps) > STEPS_NAMED else "")
    dropped = f", {_times(drawn['dropped'])} without its caption" if drawn["dropped"] else ""
    yield f"drawn {_times(drawn['times'])} in {drawn['last']} steps{dropped}: steps {named}"
    others = f"all images at these noise levels {drawn['level']:.4f}; all samples {drawn['every']:.4f}"
    yield f"mean loss {drawn['loss']:.4f}; {others}"
    for word, order in (("highest", "desc"), ("lowest", "asc")):
        (row,) = query(
            f"select step, sigma, loss from train where image_id = $id and split = 'train' order by loss {order}, step limit 1",
            id=image["image_id"],
        )
        yield f"{word} loss {row['loss']:.4f} at step {row['step']}, sigma {row['sigma']:.3f}"


def describe_samples(query: Query, image: Row) -> Iterator[str]:
    rows = query(
        "select step, path, prompt from samples where caption_id in "
        "(select caption_id from captions where image_id = $id and role = 'caption') order by prompt, step, path",
        id=image["image_id"],
    )
    for row in rows:
        yield f"step {row['step']}: {row['path']}, with its caption"
    if not rows:
        (count,) = query("select count(*) as n, count(distinct prompt) as prompts from samples")
        yield f"no preview has a caption of this image as prompt; previews: {count['n']}, prompts: {count['prompts']}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


CHAIN = Chain(
    table="images",
    label="path",
    text="a path, the start of an image_id, or part of a path or caption",
    find=find_image,
    describe={
        "images": describe_image,
        "captions": describe_captions,
        "buckets": describe_buckets,
        "latents": describe_latents,
        "train": describe_training,
        "samples": describe_samples,
    },
)
