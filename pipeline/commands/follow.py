"""Follow one image through every table: what the file is, what is said of it, how it is cropped, where its latent lies,
which steps drew it and what they lost. Plain lines; nothing is printed here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.query import open_catalog
from pipeline.terminal import spell_bytes

if TYPE_CHECKING:
    import duckdb

    from pipeline.project.project import Project

Row = dict[str, Any]

NAMED = 5  # images named when what was asked fits several
STEPS_NAMED = 12  # of the steps that drew the image
ID_DIGITS = 4  # fewer hex digits are taken for part of a path, not for the start of an image_id


def follow(project: Project, what: str) -> Iterator[str]:
    """The story of one image, line by line. `what`: its path, part of it, the start of its image_id, or part of a caption.

    ValueError, in one line, if that names no image, or several.
    """
    catalog = Catalog(project)
    image = find(project, catalog, what)
    built = {row["stage_name"] for row in catalog.ask("select stage_name from tables where built")}
    yield from _file(catalog, image)
    for stage_name, tell in (
        ("captions", _captions),
        ("buckets", _buckets),
        ("latents", _latents),
        ("train", _train),
        ("samples", _samples),
    ):
        lines = tell(catalog, image["image_id"]) if stage_name in built else iter([f"not built yet; run: make {stage_name}"])
        for number, line in enumerate(lines):
            yield f"{stage_name if number == 0 else '':10}{line}"


class Catalog:
    """Questions with values, answered as dictionaries."""

    def __init__(self, project: Project) -> None:
        self.connection: duckdb.DuckDBPyConnection = open_catalog(project)

    def ask(self, sql: str, **values: Any) -> list[Row]:
        """Rows of an answer; `$name` in the SQL is a value."""
        result = self.connection.execute(sql, values)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def find(project: Project, catalog: Catalog, what: str) -> Row:
    """The one row of images that `what` names: whole path first, then image_id, part of a path, part of a caption."""
    below = _below(project.resource("image_folder"), what)
    ways = [("path = $what", below)]
    if len(what) >= ID_DIGITS and set(what.lower()) <= set("0123456789abcdef"):
        ways.append(("image_id ^@ $what", what.lower()))
    ways.append(("contains(lower(path), $what)", below.lower()))
    captioned = "select image_id from captions where role = 'caption' and contains(lower(text), $what)"
    ways.append((f"image_id in ({captioned})", what.lower()))
    for where, value in ways:
        # The file that is used comes before its duplicates; those are named in its story.
        rows = catalog.ask(f"select * from images where {where} order by rejected is not null, path", what=value)
        if where == "path = $what" and rows:
            return rows[0]
        distinct = list({row["image_id"] or row["path"]: row for row in reversed(rows)}.values())[::-1]
        if len(distinct) > 1:
            named = ", ".join(row["path"] for row in distinct[:NAMED]) + (", ..." if len(distinct) > NAMED else "")
            raise ValueError(f"{what!r} fits {len(distinct)} images: {named}; say more of one")
        if distinct:
            return distinct[0]
    paths = [row["path"] for row in catalog.ask("select path from images order by path")]
    if not paths:
        raise ValueError(f"the table images is empty; run: make images PROJECT={project.path}")
    names = {Path(path).name: path for path in reversed(paths)} | {path: path for path in paths}
    near = list(dict.fromkeys(names[n] for n in difflib.get_close_matches(below, names, n=NAMED, cutoff=0.4)))
    raise ValueError(f"{what!r} is no path, image_id or caption of this project{'; near it: ' + ', '.join(near) if near else ''}")


def _below(source: Path, what: str) -> str:
    """A path on this disk as the tables write it; anything else as it is."""
    try:
        return Path(what).resolve().relative_to(source.resolve()).as_posix() if Path(what).exists() else what
    except (ValueError, OSError):
        return what


def _file(catalog: Catalog, image: Row) -> Iterator[str]:
    kind = f"{image['format'] or 'unknown format'} {image['mode']}".strip()
    size = f"{image['width']} x {image['height']}" if image["width"] else "unknown size"
    frames = f", the first of {image['frames']} frames" if image["frames"] > 1 else ""
    yield f"{'images':10}{image['path']}"
    yield f"{'':10}{kind}, {size}, {spell_bytes(image['bytes'])}{frames}"
    yield f"{'':10}image_id {image['image_id'] or 'unknown'}"
    if image["rejected"]:
        yield f"{'':10}not used: {image['rejected']}{': ' + image['detail'] if image['detail'] else ''}"
    if image["image_id"]:
        others = "select path from images where image_id = $id and path <> $path order by path"
        for other in catalog.ask(others, id=image["image_id"], path=image["path"]):
            yield f"{'':10}the same bytes lie at {other['path']}"


def _captions(catalog: Catalog, image_id: str) -> Iterator[str]:
    rows = catalog.ask(
        "select text, source, origin, tokens, dropped_tokens from captions left join embeddings using (caption_id) "
        "where image_id = $id and role = 'caption' order by position",
        id=image_id,
    )
    for row in rows:
        tokens = "not embedded yet" if row["tokens"] is None else f"{row['tokens']} tokens"
        cut = f", {row['dropped_tokens']} more were cut" if row["dropped_tokens"] else ""
        origin = f" ({row['source']}{' ' + row['origin'] if row['origin'] else ''})"
        yield f'"{" ".join(row["text"].split())}"{origin}: {tokens}{cut}'
    if not rows:
        yield "none"


def _buckets(catalog: Catalog, image_id: str) -> Iterator[str]:
    rows = catalog.ask("select * from buckets where image_id = $id order by resolution", id=image_id)
    for row in rows:
        if row["rejected"]:
            yield f"{row['resolution']}: not trained, {row['rejected']}"
            continue
        crop = f"from {row['crop_w']:.0f} x {row['crop_h']:.0f} at ({row['crop_x']:.0f}, {row['crop_y']:.0f})"
        lost = f"scale {row['scale']:.3g}, crop loss {100 * row['crop_loss']:.1f} %"
        yield f"{row['resolution']}: {row['width']} x {row['height']} {crop}, {lost}, {row['tokens']} tokens"
    if not rows:
        yield "none"


def _latents(catalog: Catalog, image_id: str) -> Iterator[str]:
    rows = catalog.ask(
        "select * from latents where image_id = $id order by width * height, width, flip, crop_x, crop_y", id=image_id
    )
    for row in rows:
        size = f"{row['width']} x {row['height']}{' mirrored' if row['flip'] else ''}"
        if row["rejected"]:
            yield f"{size}: not encoded, {row['rejected']}"
            continue
        shape = " x ".join(map(str, row["shape"]))
        values = f"mean {row['mean']:.3f}, std {row['std']:.3f}, largest {row['absmax']:.2f}"
        yield f"{size}: {shape} {row['dtype']}, {values}; {row['shard']} at {row['byte_offset']}, {spell_bytes(row['nbytes'])}"
    if not rows:
        yield "none"


def _train(catalog: Catalog, image_id: str) -> Iterator[str]:
    """Losses depend on the noise level above all, so the fair average is that of all samples in the same tenths of sigma."""
    (drawn,) = catalog.ask(
        "with drawn as (select * from train where split = 'train'), "
        "levels as (select avg(loss) as level, floor(sigma * 10) as tenth from drawn group by tenth), "
        "mine as (select * from drawn join levels on floor(sigma * 10) = tenth where image_id = $id) "
        "select count(*) as times, list(distinct step order by step) as steps, avg(loss) as loss, avg(level) as level, "
        "count(*) filter (dropped) as dropped, (select avg(loss) from drawn) as every, "
        "(select max(step) from drawn) as last from mine",
        id=image_id,
    )
    measured = list(_measured(catalog, image_id))
    yield from measured
    if not drawn["times"]:
        yield from [] if measured else [f"never drawn in {drawn['last'] or 0} steps"]
        return
    steps = drawn["steps"]
    named = ", ".join(map(str, steps[:STEPS_NAMED])) + (f", ... {steps[-1]}" if len(steps) > STEPS_NAMED else "")
    dropped = f", {_times(drawn['dropped'])} without its caption" if drawn["dropped"] else ""
    yield f"drawn {_times(drawn['times'])} in {drawn['last']} steps{dropped}: steps {named}"
    against = f"all images at these noise levels {drawn['level']:.4f}; all samples {drawn['every']:.4f}"
    yield f"mean loss {drawn['loss']:.4f}; {against}"
    for way, order in (("highest", "desc"), ("lowest", "asc")):
        (row,) = catalog.ask(
            f"select step, sigma, loss from train where image_id = $id and split = 'train' order by loss {order}, step limit 1",
            id=image_id,
        )
        yield f"{way} loss {row['loss']:.4f} at step {row['step']}, sigma {row['sigma']:.3f}"


def _measured(catalog: Catalog, image_id: str) -> Iterator[str]:
    """Of an image that is held out: what the first and the last measurement and the best one say."""
    found = catalog.ask(
        "select step, avg(loss) as loss, count(*) as samples from train "
        "where image_id = $id and split = 'validation' group by step order by step",
        id=image_id,
    )
    if found:
        first, last, least = found[0], found[-1], min(found, key=lambda row: float(row["loss"]))
        yield f"held out, measured by {first['samples']} samples: mean loss {_at(first)}, {_at(last)}; the least {_at(least)}"


def _at(row: Row) -> str:
    return f"{row['loss']:.4f} at step {row['step']}"


def _samples(catalog: Catalog, image_id: str) -> Iterator[str]:
    rows = catalog.ask(
        "select step, path, prompt from samples where caption_id in "
        "(select caption_id from captions where image_id = $id and role = 'caption') order by prompt, step, path",
        id=image_id,
    )
    for row in rows:
        yield f"step {row['step']}: {row['path']}, with its caption"
    if not rows:
        (count,) = catalog.ask("select count(*) as n, count(distinct prompt) as prompts from samples")
        yield f"no preview has its caption as prompt; previews: {count['n']}, prompts: {count['prompts']}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
