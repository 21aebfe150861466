"""What the names of folders say about their images: kohya's 10_ohwx cat and reg, and the entries [[images.folder]].

kohya's trainers read repeats and the subject from the name of a folder: the images of "10_ohwx cat" occur 10 times per epoch, and
"ohwx cat" is the caption of an image without a caption file. Images below "reg" are of the class alone (regularisation).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from stages.text_to_image.images.roots import Root
from stages.text_to_image.imaging import packed, references

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
    """Return the settings that each image gets from its folder, as a dict from the image's path to a dict of settings.
    The settings are the columns of the table `images` that `RULES` lists, such as `repeats` and `trigger`. A setting
    that the folder does not give is None. `paths` are the images' paths relative to the image folder. `folders` are the
    folders that were searched, with the settings of their entries [[images.folder]]. If `read_names` is True, folder
    names give settings too: "10_cat" gives 10 repeats.
    """
    paths = list(paths)
    names = {str(PurePosixPath(path).parent) for path in paths}
    by_parent = {parent: _rule(PurePosixPath(parent), folders, read_names) for parent in names}
    return {path: by_parent[str(PurePosixPath(path).parent)] for path in paths}


def reference_rules(paths: Iterable[str], folders: Sequence[str] | None) -> dict[str, Row]:
    """Find the reference images among the files `paths`, and return a dict from the path of each reference image to its
    values in the table `images`. A reference image is a picture that an edit starts from. For example, control/cat.png
    is the reference image of cat.png. Its values are {"folder": "control", "use": "reference", "reference_of":
    "cat.png", "reference": 1}. Every other column in `RULES` is None. `paths` are relative to the image folder.
    `folders` are the names of folders that hold reference images. If `folders` is None, the usual names such as
    "control" are used.

    `RULES` lists the columns of the table `images` that depend on an image's folder. `reference_of` is the path of the
    image after the edit, or None if there is none. `reference` numbers the reference images of one image, from 1.
    """
    pairs = references.pair_references(paths, folders)
    return {
        path: NOTHING
        | {"folder": str(PurePosixPath(path).parent), "use": references.USE, "reference_of": image, "reference": number}
        for path, (image, number) in pairs.items()
    }


def _rule(parent: PurePosixPath, folders: Sequence[Root], read_names: bool) -> Row:
    """Return the settings that a folder gives to the images in it. The result is a dict from each column in `RULES` to
    its value, such as 10.0 for "repeats". A column without a setting is None. `parent` is the folder's path relative to
    the image folder. `folders` are the folders in which the search for images began. `parent` equals one of `folders`
    or lies below one. If `read_names` is True, folder names such as "10_cat" give settings. Settings in an entry
    [[images.folder]] replace settings from names.

    The entries [[images.folder]] of project.toml are in `folders`, as the attribute `settings`. Only the entry of the
    folder at or above `parent` counts. A `weight` in the entry sets "repeats" to None.
    """
    root = next(each for each in folders if parent.is_relative_to(each.path))
    found = dict(NOTHING)
    if read_names:
        inner = parent.relative_to(root.path).parts if root.settings is None else parent.parts
        found |= _named(parent.parts[: len(parent.parts) - len(inner)], inner)
    if root.settings:
        given = root.settings
        found["folder"] = root.path or "."
        found["use"] = USE if given.regularisation else found["use"]
        found |= {name: getattr(given, name) for name in ("repeats", "weight", "trigger") if getattr(given, name) is not None}
        found["repeats"] = None if given.weight is not None else found["repeats"]
    return found


def _named(above: tuple[str, ...], parts: tuple[str, ...]) -> Row:
    """Return the settings that folder names give to the images inside, as a dict from a column of the table `images` to
    its value. `parts` are the names of nested folders, outermost first. For example, `parts` = ("10_cat",) gives
    {"folder": "10_cat", "repeats": 10.0, "concept": "cat"}, and `parts` = ("reg",) gives {"folder": "reg", "use":
    "regularisation"}. `above` are the names of the folders above `parts`. The names in `above` give no settings, and
    are only put before the path in "folder". With `above` = ("data",), "folder" is "data/10_cat".

    Names of other forms give no settings. If no name gives a setting, the dict is empty. The form of the names comes
    from kohya's trainers. If two names give the same column, the inner one counts.
    """
    found: Row = {}
    for number, part in enumerate(parts, 1):
        where = str(PurePosixPath(*above, *parts[:number]))
        if part.lower() in REGULARISATION:
            found |= {"folder": where, "use": USE}
        elif name := REPEATED.fullmatch(part):
            found |= {"folder": where, "repeats": float(name[1]), "concept": name[2].strip()}
    return found


def check_rules(found: Mapping[str, Row], folder: Path) -> None:
    """Raise ValueError if no image is left to train on. An image is trained on if its `use` is None and its `repeats`
    is not 0. `use` is set for regularisation images and for reference images. `found` maps the path of each image to a
    dict with its columns of the table `images`, as `rules` returns it. Only the columns `use`, `repeats` and `folder`
    are read. `folder` is the image folder, for the message.
    """
    remedy = 'or set images.layout = "plain" if the names of the folders mean nothing'
    trained = [rule for rule in found.values() if rule["use"] is None]
    if not trained:
        uses = " and ".join(sorted({rule["use"] for rule in found.values()}))
        name = next(iter(found.values()))["folder"]
        raise ValueError(f"{folder} holds only {uses} images, in {name}/: add images of the subject, {remedy}")
    if all(rule["repeats"] == 0 for rule in trained):
        raise ValueError(f"{folder}: all images have 0 repeats, as in {trained[0]['folder']}: give one folder more, {remedy}")


def describe(rows: Iterable[Row]) -> Iterator[str]:
    """Yield lines for the user that say where the images lie. One line counts the images inside other files, such as
    "12 images inside a.tar". One line lists the folders that decide how their images are used, such as "kohya folder:
    10 repeats of 'ohwx cat', 24 images; reg/: 100 class images". The last lines report the reference images, the
    pictures that an edit starts from. A line that does not apply is left out. `rows` are rows of the table `images`.

    Rejected images are not counted, with one exception: a reference counts even if it or its image is a duplicate. Equal
    images count once.
    """
    rows = list(rows)
    usable = [row for row in rows if not row["rejected"]]
    yield from _describe_packed([row["path"] for row in usable if row["offset"] is not None])
    yield from _describe_folders([row for row in usable if row["folder"] and row["use"] != references.USE])
    yield from _describe_references([row for row in rows if row["use"] == references.USE], rows)


def _describe_packed(paths: Sequence[str]) -> Iterator[str]:
    """Yield one line that counts the images inside other files and names the files, such as "12 images inside a.tar". `paths`
    are the paths of these images, such as "a.tar/0001.jpg". Without paths, nothing is yielded.
    """
    if not paths:
        return
    parents = (PurePosixPath(path).parents for path in paths)
    files = sorted({str(next(p for p in each if p.suffix.lower() in packed.SUFFIXES)) for each in parents})
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    yield f"{len(paths)} images inside {files[0]}{more}"


def _describe_folders(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line for the user that lists the folders with settings of their own, such as "kohya folder: 10 repeats
    of 'ohwx cat', 24 images; reg/: 100 class images". A folder gets settings from its name, such as "10_ohwx cat", or
    from its entry [[images.folder]]. For each folder, the line gives the settings and the number of images. `rows` are
    the rows of the table `images` for the images in these folders. If `rows` is empty, nothing is yielded.
    """
    groups = Counter(tuple(row[name] for name in RULES) for row in rows)
    found = [(dict(zip(RULES, key, strict=True)), count) for key, count in groups.items()]
    if found:
        kind = "kohya folder" if any(rule["concept"] for rule, _ in found) else "folders"
        yield f"{kind}: {'; '.join(_words(rule, count) for rule, count in found)}"


def _describe_references(found: list[Row], rows: list[Row]) -> Iterator[str]:
    """Yield lines for the user about reference images. A reference is an image that an edit starts from. The lines say
    how many references there are, and name a reference whose image is missing. `found` are the rows of the table
    `images` that are references. `rows` are all rows of the table.
    """
    if not found:
        return
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
    """Yield a line for the user if the name of a folder is nearly, but not quite, in kohya's form. Kohya's form is a
    number, an underscore and a name, such as "10_ohwx cat". A name with a hyphen or a space in place of the underscore,
    such as "10-ohwx cat", is reported. `paths` are the paths of the images.

    The line names only the first such folder, in the order of names.
    """
    names = sorted({part for path in paths for part in PurePosixPath(path).parts[:-1] if NEARLY.fullmatch(part)})
    if names:
        right = re.sub(r"^(\d+) ?[- ] ?", r"\1_", names[0])
        yield f"no repeats are read from the folder {names[0]!r}; kohya's form is {right!r}"
