"""What the names of folders say about their images: kohya's 10_ohwx cat and reg, and the entries [[images.folder]].

kohya's trainers read repeats and the subject from the name of a folder: the images of "10_ohwx cat" occur 10 times per epoch,
and
"ohwx cat" is the caption of an image without a caption file. Images below "reg" are of the class alone (regularisation).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from stages.text_to_image.images.roots import Root
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging import usable as references

Row = dict[str, Any]

RULES = ("folder", "use", "repeats", "weight", "trigger", "concept", "reference_of", "reference")  # columns of the table images
NOTHING: Row = dict.fromkeys(RULES)
REPEATED = re.compile(r"(0|[1-9]\d{0,2})_(.*\S.*)")  # a larger number is a year, one with a zero before it a count of folders
NEARLY = re.compile(r"[1-9]\d{0,2}(?: ?[- ] ?)[^\W\d].*")
REGULARISATION = frozenset({
    "reg", "regs", "reg_images", "regularization", "regularisation", "regularization_images", "regularisation_images",
    "class_images",
})  # fmt: skip
USE = "regularisation"


def rules(paths: Iterable[str], folders: Sequence[Root], read_names: bool) -> dict[str, Row]:
    """Path -> its columns RULES of the table `images`; None where the folder says nothing."""
    paths = list(paths)
    names = {str(PurePosixPath(path).parent) for path in paths}
    by_parent = {parent: _rule(PurePosixPath(parent), folders, read_names) for parent in names}
    return {path: by_parent[str(PurePosixPath(path).parent)] for path in paths}


def reference_rules(paths: Iterable[str], folders: Sequence[str] | None) -> dict[str, Row]:
    """The same of the reference images alone: control/cat.png is reference 1 of cat.png."""
    pairs = references.pair_references(paths, folders)
    return {
        path: NOTHING
        | {"folder": str(PurePosixPath(path).parent), "use": references.USE, "reference_of": image, "reference": number}
        for path, (image, number) in pairs.items()
    }


def _rule(parent: PurePosixPath, folders: Sequence[Root], read_names: bool) -> Row:
    """Entries [[images.folder]] replace what names say. `parent` lies in one of `folders`."""
    root = next(each for each in folders if parent.is_relative_to(each.path))
    found = dict(NOTHING)
    if read_names:
        # The name of an entry's own folder counts too.
        inner = parent.relative_to(root.path).parts if root.settings is None else parent.parts
        found |= _named(parent.parts[: len(parent.parts) - len(inner)], inner)
    if root.settings:
        given = root.settings
        found["folder"] = root.path or "."
        found["use"] = USE if given.regularisation else found["use"]
        found |= {name: getattr(given, name) for name in ("repeats", "weight", "trigger") if getattr(given, name) is not None}
        # A weight replaces repeats, also those of the name.
        found["repeats"] = None if given.weight is not None else found["repeats"]
    return found


def _named(above: tuple[str, ...], parts: tuple[str, ...]) -> Row:
    """("10_cat",) gives {"folder": "10_cat", "repeats": 10.0, "concept": "cat"}. Names in `above` say nothing; inner ones win."""
    found: Row = {}
    for number, part in enumerate(parts, 1):
        where = str(PurePosixPath(*above, *parts[:number]))
        if part.lower() in REGULARISATION:
            found |= {"folder": where, "use": USE}
        elif name := REPEATED.fullmatch(part):
            found |= {"folder": where, "repeats": float(name[1]), "concept": name[2].strip()}
    return found


def check_rules(found: Mapping[str, Row], folder: Path) -> None:
    """Raise ValueError if no image is left to train on."""
    remedy = 'or set images.layout = "plain" if the names of the folders mean nothing'
    trained = [rule for rule in found.values() if rule["use"] is None]
    if not trained:
        uses = " and ".join(sorted({rule["use"] for rule in found.values()}))
        name = next(iter(found.values()))["folder"]
        raise ValueError(f"{folder} holds only {uses} images, in {name}/: add images of the subject, {remedy}")
    if all(rule["repeats"] == 0 for rule in trained):
        raise ValueError(f"{folder}: all images have 0 repeats, as in {trained[0]['folder']}: give one folder more, {remedy}")


def describe(rows: Iterable[Row]) -> Iterator[str]:
    """Lines for the user: images inside other files, folders with settings of their own, references."""
    rows = list(rows)
    usable = [row for row in rows if not row["rejected"]]
    yield from _describe_packed([row["path"] for row in usable if row["offset"] is not None])
    yield from _describe_folders([row for row in usable if row["folder"] and row["use"] != references.USE])
    yield from _describe_references([row for row in rows if row["use"] == references.USE], rows)


def _describe_packed(paths: Sequence[str]) -> Iterator[str]:
    if not paths:
        return
    parents = (PurePosixPath(path).parents for path in paths)
    files = sorted({str(next(p for p in each if p.suffix.lower() in packed.SUFFIXES)) for each in parents})
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    yield f"{len(paths)} images inside {files[0]}{more}"


def _describe_folders(rows: Sequence[Row]) -> Iterator[str]:
    groups = Counter(tuple(row[name] for name in RULES) for row in rows)
    found = [(dict(zip(RULES, key, strict=True)), count) for key, count in groups.items()]
    if found:
        kind = "kohya folder" if any(rule["concept"] for rule, _ in found) else "folders"
        yield f"{kind}: {'; '.join(_words(rule, count) for rule, count in found)}"


def _describe_references(found: list[Row], rows: list[Row]) -> Iterator[str]:
    if not found:
        return
    # A reference may be a duplicate, and so may the image that it names: equal images count once.
    usable = {row["path"]: row["image_id"] for row in rows if row["rejected"] in (None, "duplicate")}
    trained = {row["image_id"] for row in rows if row["rejected"] is None and row["use"] is None}
    paired = [row for row in found if row["path"] in usable and usable.get(row["reference_of"]) in trained]
    folders = ", ".join(f"{each}/" for each in sorted({row["folder"] for row in paired}))
    images = len({usable[row["reference_of"]] for row in paired})
    yield f"paired images: {len(paired)} references in {folders or 'no folder'} for {images} of {len(trained)} images"
    if lost := [row["path"] for row in found if not row["reference_of"]]:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield f"no image has the name of the reference {lost[0]}{more}: it is not used"


def _words(rule: Row, count: int) -> str:
    images = "image" if count == 1 else "images"
    if rule["use"] == USE:
        name = f" of '{rule['concept']}'" if rule["concept"] else ""
        return f"{rule['folder']}/: {count} class {images}{name}"
    facts = [f"weight {rule['weight']:g}"] if rule["weight"] is not None else []
    if rule["concept"] and rule["repeats"] is not None:
        facts.append(f"{rule['repeats']:g} repeat{'' if rule['repeats'] == 1 else 's'} of '{rule['concept']}'")
        return ", ".join([*facts, f"{count} {images}"])
    facts += [f"{rule['repeats']:g} repeats"] if rule["repeats"] is not None else []
    facts += [f"trigger '{rule['trigger']}'"] if rule["trigger"] else []
    return ", ".join([f"{rule['folder']}/: {count} {images}", *facts])


def near_misses(paths: Iterable[str]) -> Iterator[str]:
    """A line if a folder's name is nearly in kohya's form, such as "10-ohwx cat"."""
    names = sorted({part for path in paths for part in PurePosixPath(path).parts[:-1] if NEARLY.fullmatch(part)})
    if names:
        right = re.sub(r"^(\d+) ?[- ] ?", r"\1_", names[0])
        yield f"no repeats are read from the folder {names[0]!r}; kohya's form is {right!r}"
