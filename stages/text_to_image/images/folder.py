"""The image folder: which files become rows, and what the names of folders and the entries [[images.folder]] say about them.

kohya's trainers read repeats and the subject from the name of a folder: the images of "10_ohwx cat" occur 10 times per epoch,
and "ohwx cat" is the caption of an image without a caption file. Images below "reg" are of the class alone (regularisation).

An image and its references, the pictures that an edit starts from, are a pair. The references of train/cat.png are
control/cat.png, train/control/cat.png, and so on in control_1, control_2 and control_3. In one folder, cat_in.png is the
reference of cat_out.png, and cat_start.png that of cat_end.png.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path, PurePosixPath
from typing import Any

from stages.settings import Section, nearest, selects, setting_path
from stages.text_to_image.caption_files import check_trigger
from stages.text_to_image.imaging import masks, packed
from stages.text_to_image.imaging.decode import IMAGE_SUFFIXES
from stages.text_to_image.imaging.masks import composed
from stages.text_to_image.imaging.usable import ENDINGS, REFERENCE, first_names
from stages.untrusted import Folders

Row = dict[str, Any]

FILE_COLUMNS = ("path", "bytes", "mtime_ns", "inode", "offset")  # by these values an unchanged file is recognised
RULES = ("folder", "use", "repeats", "weight", "trigger", "concept", "reference_of", "reference")  # columns of the table images
NOTHING: Row = dict.fromkeys(RULES)

# Files that lie beside images and describe them: they become no rows.
# fmt: off
SIDE_SUFFIXES = frozenset({
    ".aae", ".caption", ".captions", ".csv", ".ini", ".json", ".jsonl", ".lock", ".log", ".md", ".py", ".rst",
    ".tags", ".toml", ".tsv", ".txt", ".xml", ".xmp", ".yaml", ".yml",
})
SIDE_NAMES = frozenset({"authors", "copying", "credits", "license", "licence", "makefile", "notice", "readme", "thumbs.db"})
# fmt: on
PROJECT_FILE = "project.toml"  # a folder that holds this file is a project, and these folders in it are its output
PROJECT_FOLDERS = frozenset({"tables", "weights", "exports"})

REPEATED = re.compile(r"(0|[1-9]\d{0,2})_(.*\S.*)")  # a larger number is a year, one with a zero before it a count of folders
NEARLY = re.compile(r"[1-9]\d{0,2}(?: ?[- ] ?)[^\W\d].*")
REGULARISATION = frozenset({
    "reg", "regs", "reg_images", "regularization", "regularisation", "regularization_images", "regularisation_images",
    "class_images",
})  # fmt: skip
CLASS = "regularisation"  # in the column `use`
CONTROL = ("control", "control_1", "control_2", "control_3", "reference", "references")  # folders of references

MOST = 10_000  # files that are looked at if there is no image
KINDS = {  # suffix of other files -> what the user should do
    **dict.fromkeys((".zip", ".7z", ".rar", ".gz", ".tgz"), "unpack {them} first"),
    **dict.fromkeys((".mp4", ".mov", ".mkv", ".avi", ".webm"), "videos are not read: save frames as PNG or JPEG"),
    **dict.fromkeys((".safetensors", ".npz", ".pt"), "{they} may be another trainer's cache: name the folder of the pictures"),
    **dict.fromkeys((".parquet", ".arrow"), "{they} must have a column of images (binary, or bytes and path)"),
    ".tar": "{they} must hold images, without compression",
    **dict.fromkeys((".txt", ".caption"), "{they} may be captions: name the folder of the pictures, and set captions.folder"),
    **dict.fromkeys((".toml", ".yaml", ".yml"), "{they} may be another trainer's settings: name the folder in that file"),
    **dict.fromkeys((".json", ".jsonl", ".csv", ".tsv"), "{they} may list pictures: name the folder that holds the pictures"),
}


@dataclass(frozen=True)
class FolderConfig(Section):
    path: str = selects("", "the folder, searched with all folders below it; relative to the project", path=True)
    repeats: float | None = selects(
        None,
        "occurrences of each image per epoch; 0: never; unset: 1, or as the name says (10_name)",
        unit="times per epoch",
        bounds=(0.0, 1000.0),
    )
    weight: float | None = selects(
        None,
        "draws of the folder relative to the others, whatever its number of images; all folders have one, or none",
        unit="draws, relative",
        bounds=(1e-3, 1000.0),
    )
    trigger: str | None = selects(None, 'trigger of these images; "": none; unset: that of [captions]')
    regularisation: bool = selects(False, "images of the class: trained without the trigger, as often as all other images")

    def check(self) -> None:
        if not self.path.strip():
            raise ValueError(f'path must name a folder of images, such as "portraits", got "{self.path}"')
        check_trigger(self.trigger or "")
        if self.repeats is not None and self.weight is not None:
            raise ValueError(f"weight must be unset if repeats is set: it replaces repeats, got {self.weight:g}")


# The folders that are searched, relative to the image folder with forward slashes ("": itself), and their [[images.folder]]
Roots = Mapping[str, FolderConfig | None]


def roots(entries: Sequence[FolderConfig], folder: Path, project: Path) -> Roots:
    """Raises ValueError if the folder of an entry does not exist, or two name the same one. Inner folders win over outer ones."""
    found: list[tuple[str, FolderConfig]] = []
    for entry in entries:
        home = setting_path(entry.path, project).resolve()
        if not home.is_dir():
            what = "is a file, not a folder" if home.exists() else "does not exist"
            raise ValueError(f"images.folder path must be a folder of images, got {entry.path!r}: it {what}")
        below = Path(os.path.relpath(home, folder.resolve())).as_posix()
        found.append(("" if below == "." else below, entry))
    for (name, entry), (same, other) in combinations(found, 2):
        if name == same:
            raise ValueError(f"images.folder: {entry.path!r} and {other.path!r} are the same folder; name it once")
    return dict(found) or {"": None}


# Its files


@dataclass(frozen=True)
class Listing:
    files: list[Row]  # with FILE_COLUMNS, sorted by path
    masks: int  # files that are masks of others, and not in `files`


def scan(folder: Path, below: Iterable[str] = ("",)) -> Listing:
    """The image files, unopened, in and below the folders `below`, links included. Raises ValueError if one cannot be read."""
    if not folder.is_dir():
        raise ValueError(_no_folder(folder))
    found = [row for each in below for entry in _files_below(folder / each) for row in _rows_of(folder, entry)]
    rows = list({row["path"]: row for row in found}.values())  # one folder may lie in another
    of_others = masks.which_are_masks(row["path"] for row in rows)
    # A Live Photo is a picture and a film of one name.
    stems = {_parts(row["path"]) for row in rows if PurePosixPath(row["path"]).suffix.lower() in IMAGE_SUFFIXES}
    films = {row["path"] for row in rows if row["path"].lower().endswith(".mov") and _parts(row["path"]) in stems}
    files = [row for row in rows if row["path"] not in of_others and row["path"] not in films]
    return Listing(sorted(files, key=lambda row: str(row["path"])), len(of_others))


def _rows_of(folder: Path, entry: os.DirEntry[str]) -> list[Row]:
    """One row per image: several for a tar, Parquet or Arrow file, none for a caption file or a licence."""
    suffix = Path(entry.name).suffix.lower()
    if suffix in SIDE_SUFFIXES or entry.name.lower() in SIDE_NAMES:
        return []
    try:
        status = entry.stat()
    except OSError:
        status = entry.stat(follow_symlinks=False)
    path = Path(entry.path).relative_to(folder).as_posix()
    # A table cannot hold a name that is not UTF-8. The row gets the escaped name, under which no file will be found.
    path = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    inode = status.st_ino & (2**63 - 1)  # as int64
    mtime_ns = max(-(2**63), min(2**63 - 1, status.st_mtime_ns))  # after the year 2262, an int64 has no room for it
    row: Row = {"path": path, "bytes": status.st_size, "mtime_ns": mtime_ns, "inode": inode, "offset": None}
    if suffix not in packed.SUFFIXES:
        return [row]  # whatever is in it
    try:
        found, damaged = packed.members(Path(entry.path)), packed.damage(Path(entry.path))
    except OSError:  # a broken link
        return [row]
    inside = [
        row | {"path": f"{path}/{inner}", "bytes": member.size, "offset": member.offset}
        for inner, member in found.items()
        if PurePosixPath(inner).suffix.lower() in IMAGE_SUFFIXES and not PurePosixPath(inner).name.startswith(".")
    ]
    return [row, *inside] if damaged else inside


def _no_folder(folder: Path) -> str:
    problem = "is a file, not a folder" if folder.exists() else "does not exist"
    if folder.is_file() and folder.suffix == ".json":
        return (
            f"images.folder must be a folder, got the file {folder}: OneTrainer's concepts are read by latentmill init --images"
        )
    try:
        others = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        others = []
    near = nearest(folder.name, others, '"{}"')
    return f"image folder {folder} {problem}: put the images there, or set images.folder{near}"


def _files_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Raises ValueError if a folder cannot be read, or is one of the system's."""
    folders = Folders(folder)
    waiting: list[Iterator[os.DirEntry[str]]] = [iter(_entries(folder, folders))]
    while waiting:  # without recursion: folders may be nested a thousand deep
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
        elif entry.is_symlink() and not Path(entry.path).exists():
            yield entry  # a broken link becomes a row too, so that the user hears of it
        elif entry.is_dir():
            waiting.append(iter(_entries(Path(entry.path), folders)))
        elif entry.is_file():
            yield entry


def _entries(folder: Path, folders: Folders) -> list[os.DirEntry[str]]:
    try:
        entries = folders.entries(folder)
    except ValueError as error:
        remedy = "change its permissions, or move it out of the image folder"
        raise ValueError(f"folder {folder} {error}: {remedy}") from error
    # Without hidden entries, and in a project's folder without what the project writes.
    written = PROJECT_FOLDERS if any(entry.name == PROJECT_FILE for entry in entries) else frozenset()
    return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX")) and entry.name not in written]


def no_images(folder: Path) -> str:
    """The error about a folder without images: the first of KINDS that lies there, and what to do with it."""
    files = [path for path in islice(folder.rglob("*"), MOST) if path.is_file()]
    counts = Counter(path.suffix.lower() for path in files if not path.name.startswith("."))
    plain = f"image folder {folder} holds no images"
    suffix = next((each for each in KINDS if counts[each]), "")
    if not suffix:
        return f"{plain}: put some there, or set images.folder"
    problems = (packed.damage(path) for path in files if path.suffix.lower() in packed.SUFFIXES)
    if problem := next(filter(None, problems), ""):
        return f"{plain}: {problem}"
    example = min(path.relative_to(folder).as_posix() for path in files if path.suffix.lower() == suffix)
    one = counts[suffix] == 1
    remedy = KINDS[suffix].format(they="it" if one else "they", them="it" if one else "them")
    return f"{plain}, but {counts[suffix]} {suffix} file{'' if one else 's'}, such as {example}: {remedy}"


# Their rules


def rules(paths: Sequence[str], folders: Roots, read_names: bool) -> dict[str, Row]:
    """Path -> its columns RULES of the table `images`; None where the folder says nothing."""
    names = {str(PurePosixPath(path).parent) for path in paths}
    by_parent = {parent: _rule(PurePosixPath(parent), folders, read_names) for parent in names}
    return {path: by_parent[str(PurePosixPath(path).parent)] for path in paths}


def reference_rules(paths: Iterable[str], folders: Sequence[str] | None) -> dict[str, Row]:
    """The same of the reference images alone: control/cat.png is reference 1 of cat.png."""
    pairs = pair_references(paths, folders)
    return {
        path: NOTHING | {"folder": str(PurePosixPath(path).parent), "use": REFERENCE, "reference_of": image, "reference": number}
        for path, (image, number) in pairs.items()
    }


def _rule(parent: PurePosixPath, folders: Roots, read_names: bool) -> Row:
    """Entries [[images.folder]] replace what names say. `parent` lies in one of `folders`; the innermost counts."""
    root = max((path for path in folders if parent.is_relative_to(path)), key=len)
    found = dict(NOTHING)
    if read_names:
        # The name of an entry's own folder counts too. Inner folders win.
        for number, part in enumerate(parent.parts, 1):
            where = str(PurePosixPath(*parent.parts[:number]))
            if part.lower() in REGULARISATION:
                found |= {"folder": where, "use": CLASS}
            elif name := REPEATED.fullmatch(part):
                found |= {"folder": where, "repeats": float(name[1]), "concept": name[2].strip()}
    given = folders[root]
    if given and (root or given != FolderConfig(given.path)):  # the image folder itself, without a setting, says nothing
        found["folder"] = root or "."
        found["use"] = CLASS if given.regularisation else found["use"]
        found |= {name: getattr(given, name) for name in ("repeats", "weight", "trigger") if getattr(given, name) is not None}
        # A weight replaces repeats, also those of the name.
        found["repeats"] = None if given.weight is not None else found["repeats"]
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


def describe(rows: Sequence[Row]) -> Iterator[str]:
    usable = [row for row in rows if not row["rejected"]]
    if inside := [row["path"] for row in usable if row["offset"] is not None]:
        parents = (PurePosixPath(path).parents for path in inside)
        files = sorted({str(next(p for p in each if p.suffix.lower() in packed.SUFFIXES)) for each in parents})
        yield f"{len(inside)} images inside {first_names(files, 1)}"
    ruled = [row for row in usable if row["folder"] and row["use"] != REFERENCE]
    groups = Counter(tuple(row[name] for name in RULES) for row in ruled)
    if found := [(dict(zip(RULES, key, strict=True)), count) for key, count in groups.items()]:
        kind = "kohya folder" if any(rule["concept"] for rule, _ in found) else "folders"
        yield f"{kind}: {'; '.join(_words(rule, count) for rule, count in found)}"
    if references := [row for row in rows if row["use"] == REFERENCE]:
        # A reference may be a duplicate, and so may the image that it names: equal images count once.
        decoded = {row["path"]: row["image_id"] for row in rows if row["rejected"] in (None, "duplicate")}
        trained = {row["image_id"] for row in rows if row["rejected"] is None and row["use"] is None}
        paired = [row for row in references if row["path"] in decoded and decoded.get(row["reference_of"]) in trained]
        folders = ", ".join(f"{each}/" for each in sorted({row["folder"] for row in paired}))
        images = len({decoded[row["reference_of"]] for row in paired})
        yield f"paired images: {len(paired)} references in {folders or 'no folder'} for {images} of {len(trained)} images"
        if lost := [row["path"] for row in references if not row["reference_of"]]:
            yield f"no image has the name of the reference {first_names(lost, 1)}: it is not used"
    # Nearly in kohya's form, such as "10-ohwx cat".
    names = sorted({part for row in rows for part in PurePosixPath(row["path"]).parts[:-1] if NEARLY.fullmatch(part)})
    if names:
        right = re.sub(r"^(\d+) ?[- ] ?", r"\1_", names[0])
        yield f"no repeats are read from the folder {names[0]!r}; kohya's form is {right!r}"


def _words(rule: Row, count: int) -> str:
    images = "image" if count == 1 else "images"
    if rule["use"] == CLASS:
        name = f" of '{rule['concept']}'" if rule["concept"] else ""
        return f"{rule['folder']}/: {count} class {images}{name}"
    facts = [f"weight {rule['weight']:g}"] if rule["weight"] is not None else []
    if rule["concept"] and rule["repeats"] is not None:
        facts.append(f"{rule['repeats']:g} repeat{'' if rule['repeats'] == 1 else 's'} of '{rule['concept']}'")
        return ", ".join([*facts, f"{count} {images}"])
    facts += [f"{rule['repeats']:g} repeats"] if rule["repeats"] is not None else []
    facts += [f"trigger '{rule['trigger']}'"] if rule["trigger"] else []
    return ", ".join([f"{rule['folder']}/: {count} {images}", *facts])


# References


Parts = tuple[str, ...]
Pair = tuple[str | None, int]  # path of the image that a reference belongs to, and the number of the reference


def pair_references(paths: Iterable[str], folders: Sequence[str] | None) -> dict[str, Pair]:
    """Path of each reference -> its image (None if no name matches) and number from 1. `folders` None: CONTROL, ENDINGS."""
    paths = sorted(paths)
    names = CONTROL if folders is None else tuple(folders)
    inside = {path: place for path in paths if (place := _folder_of(path, names))}
    images = [path for path in paths if path not in inside]
    places = _places(images)
    found = {path: places.get((above, rest)) for path, (above, _, rest) in inside.items()}
    if folders is None:
        # An ordinary folder may be called control: it counts only if one of its files has the name of an image.
        real = {inside[path][:2] for path, image in found.items() if image}
        found = {path: image for path, image in found.items() if inside[path][:2] in real} | _by_ending(images)
    # From 1 for each image: by ending first, then by the rank of their folder, then by path.
    ranks = {path: names.index(name) for path, (_, name, _) in inside.items()}
    counts: Counter[str | None] = Counter()
    numbers: dict[str, Pair] = {}
    for path in sorted(found, key=lambda path: (ranks.get(path, -1), path)):
        counts[found[path]] += 1
        numbers[path] = (found[path], counts[found[path]])
    return numbers


def _folder_of(path: str, names: Sequence[str]) -> tuple[Parts, str, Parts] | None:
    """train/control/a/cat.png gives (("train",), "control", ("a", "cat")); None outside the folders `names`."""
    parts = _parts(path)
    for at in range(len(parts) - 1):
        for name in names:
            inner = PurePosixPath(name).parts
            if inner and parts[at : at + len(inner)] == inner and at + len(inner) < len(parts):
                return parts[:at], name, parts[at + len(inner) :]
    return None


def _places(images: Sequence[str]) -> dict[tuple[Parts, Parts], str]:
    """(folders above the folder of references, path below it) -> image. `images` has no files of such folders.

    (("train",), ("a", "cat")) is where the references of train/a/cat.png and train/target/a/cat.png are looked for.
    """
    found: dict[tuple[Parts, Parts], str] = {}
    # Images in a folder beside the references, such as train/target; first, so that the plain places below replace them.
    for path in reversed(images):
        parts = _parts(path)
        found |= {(parts[:at], parts[at + 1 :]): path for at in range(len(parts) - 1)}
    for path in reversed(images):
        parts = _parts(path)
        found |= {(parts[:at], parts[at:]): path for at in range(len(parts))}
    return found


def _by_ending(images: Sequence[str]) -> dict[str, str | None]:
    of_name = {_parts(path): path for path in reversed(images)}
    found: dict[str, str | None] = {}
    for path in images:
        *above, stem = _parts(path)
        for ending, other in ENDINGS.items():
            if stem.endswith(ending) and (image := of_name.get((*above, stem.removesuffix(ending) + other))):
                found[path] = image
    return found


def _parts(path: str) -> Parts:
    return PurePosixPath(composed(path)).with_suffix("").parts
