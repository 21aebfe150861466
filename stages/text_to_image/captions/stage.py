"""The stage `captions`: which texts each image is trained with, and the texts that belong to no image.

An image's captions lie in a text file (a sidecar: a.txt or a.png.txt for a.png) beside it or in a folder of captions, in a file
for many images in its folder or a folder above (metadata.jsonl, metadata.csv, captions.json, captions.jsonl, captions.csv or
captions.tsv), or are its file name or the name of its folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from schemas.text_to_image import CAPTIONS, DESCRIPTIONS, IMAGES
from stages.hashing import text_sha256
from stages.run import Problems, Run
from stages.settings import Section, nearest, selects, setting, several
from stages.stage import Stage
from stages.text_to_image.caption_files import (
    READERS,
    Caption,
    CaptionSources,
    Lookup,
    check_trigger,
    from_file_name,
    make_lookups,
    sidecar_names,
    trigger_pattern,
)
from stages.text_to_image.imaging.masks import composed
from stages.text_to_image.imaging.usable import REFERENCE, first_names, usable_paths, without_ending
from stages.text_to_image.slider import NEUTRAL, POLE, SliderConfig
from stages.tuner import draws
from stages.untrusted import open_regular

Row = dict[str, Any]

BATCH = 4096  # rows per record batch
EDITS = "captions.edits.jsonl"
NO_CAPTION = "no_caption"  # a warning
TABLES = frozenset({".json", ".jsonl", ".csv", ".tsv", ".xlsx", ".parquet"})  # files that may hold captions of many images
FOREIGN = "[trigger]"  # another program's placeholder for the trigger, in lower case
# Special cases of the trigger, for the column `reason`.
HAS_TRIGGER = "the caption has the trigger"
REPLACED = f"{FOREIGN} in the caption was replaced by the trigger"
CLASS_ONLY = "a regularisation image has no trigger"
NO_TRIGGER = "its folder has no trigger"
NEWER = "has changed since this edit"


@dataclass(frozen=True)
class CaptionsConfig(Section):
    sources: tuple[Literal["sidecar", "metadata", "filename"], ...] = setting(
        ("sidecar", "metadata"),
        "where captions are looked for, in this order: sidecar, metadata, filename; the first that has one is used",
    )
    extension: str | tuple[str, ...] = setting(
        (".txt", ".caption"), "suffix of sidecar files; of a list, the first that an image has is used"
    )
    folder: str = setting(
        "",
        "separate folder of sidecars, in the same folders below it as the images; relative to the project; empty: beside the "
        "images, or in a folder `captions` beside or above them",
        unrecorded=("",),
        path=True,
    )
    caption_column: str = setting(
        "", "column of metadata and captions files that holds the caption; empty: text, caption or prompt", unrecorded=("",)
    )
    lines: Literal["one", "many"] = setting(
        "one", "one: a sidecar is one caption, with its line breaks; many: every line of a sidecar is a caption"
    )
    template: str = setting(
        "{caption}",
        "text that is trained with, made of {caption} and {trigger}; without {caption}, all images get the same text; a caption "
        "that has the trigger is not given it twice",
    )
    replace: Mapping[str, str] | None = setting(
        None, 'words to replace in captions, in this order: {"cat" = "ohwx cat"}; "" removes them', unrecorded=(None, {})
    )
    drop: tuple[str, ...] = setting(
        (), 'parts of comma lists to leave out, such as ["watermark"]; capitals do not matter', unrecorded=((),)
    )
    shuffle: int = setting(
        0,
        "orders of the parts of a comma list that are trained, each as a caption; 0: as written",
        unit="orders",
        bounds=(0, 100),
        unrecorded=(0,),
    )
    keep: int = setting(
        1, "shuffle: parts at the beginning that stay where they are", unit="parts", bounds=(0, 1000), unrecorded=(1,)
    )
    weights: tuple[float, ...] = setting(
        (),
        "draws of an image's first, second, ... caption, relative to each other: [3, 1]; the last number is for all further "
        "captions; empty: equally",
        unit="draws, relative",
        bounds=(1e-3, 1000.0),
        unrecorded=((),),
    )
    trigger: str = setting("", "word that the adapter is called with; replaces {trigger} in the template and in preview prompts")
    missing: Literal["error", "empty", "trigger", "filename", "skip"] = setting(
        "error", "what an image without a caption gets: an error (it is usually a mistake), empty, trigger, filename or skip"
    )
    class_word: str = selects(
        "",
        'class that the trigger belongs to, such as "cat"; adds each caption with this word in place of the trigger, for '
        "[train.preservation]",
    )
    preview_prompts: tuple[str, ...] = selects((), "prompts that the stage samples draws images for")
    slider: SliderConfig | None = setting(  # noqa: RUF009
        None, "the prompts of a slider; by default those of [train.slider]", unrecorded=(None,), follows="train.slider"
    )

    def check(self) -> None:
        if "" in (self.replace or {}):
            raise ValueError('replace must name the words to replace, such as {"cat" = "ohwx cat"}, got ""')
        check_trigger(self.trigger)
        check_placeholders("template", self.template, ("caption", "trigger"))
        for prompt in self.preview_prompts:
            check_placeholders("preview_prompts", prompt, ("trigger",))
        if self.class_word and self.trigger and trigger_pattern(self.trigger).search(self.class_word):
            raise ValueError(f'class_word must not contain the trigger "{self.trigger}", got "{self.class_word}"')
        if not self.template.strip():
            raise ValueError(f'template must not be empty ("{{caption}}" is the caption alone), got "{self.template}"')
        if not self.sources:
            raise ValueError('sources must name at least one source, such as ["sidecar", "metadata"], got []')
        for extension in self.where.extensions or ("",):
            if not extension.startswith(".") or len(extension) < 2:
                raise ValueError(f'extension must be a dot and a name such as ".txt", got "{extension}"')

    def previews(self, triggers: Sequence[str]) -> dict[str, str]:
        """Text -> the prompt of the settings that it is made of: with {trigger}, one text for each of `triggers`."""
        return {prompt.replace("{trigger}", each): prompt for prompt in self.preview_prompts for each in triggers or [""]}

    @property
    def where(self) -> CaptionSources:
        return CaptionSources(self.sources, self.extension, self.folder, self.caption_column, self.lines)


# The template


@dataclass(frozen=True)
class Filled:
    text: str
    template: str | None = None  # that was filled in, without the parts that were left out
    reason: str | None = None  # special case of the trigger: HAS_TRIGGER, REPLACED, CLASS_ONLY, NO_TRIGGER


def fill(template: str, caption: str, trigger: str, class_only: bool = False, class_word: str = "") -> Filled:
    """Leaves out the part with {trigger} if the caption has it or the image is of the class; replaces foreign "[trigger]"."""
    # A template without {caption} would leave no text at all: the class word takes the trigger's place.
    if class_only and "{caption}" not in template and class_word:
        return Filled(fill_template(template, "", class_word), template, CLASS_ONLY)
    if class_only:
        cut = without_trigger(template)
        return Filled(fill_template(cut, replace_foreign(caption, class_word), ""), cut, CLASS_ONLY)
    # First, so that the trigger that comes in this way counts as one that the caption has.
    whole = replace_foreign(caption, trigger)
    if "{trigger}" not in template or not (trigger and trigger_pattern(trigger).search(whole)):
        return Filled(fill_template(template, whole, trigger), template, REPLACED if whole != caption else None)
    cut = without_trigger(template)
    return Filled(fill_template(cut, whole, trigger), cut, HAS_TRIGGER if whole == caption else REPLACED)


def without_trigger(template: str) -> str:
    """The template without its part, between commas, that has {trigger}; at least "{caption}"."""
    kept = ", ".join(part.strip() for part in template.split(",") if "{trigger}" not in part)
    return kept if "{caption}" in kept else "{caption}"


def replace_foreign(text: str, word: str) -> str:
    # A function, since a backslash in `word` is no escape.
    return re.sub(re.escape(FOREIGN), lambda match: word, text, flags=re.IGNORECASE)


def fill_template(template: str, caption: str, trigger: str) -> str:
    values = {"{caption}": caption, "{trigger}": trigger}
    # In one pass: braces in a caption are text.
    return re.sub(r"\{(?:caption|trigger)\}", lambda match: values[match.group()], template)


def check_placeholders(setting: str, text: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for an unknown placeholder, a lone brace, or ai-toolkit's "[trigger]"."""
    known = " and ".join(f"{{{each}}}" for each in allowed)
    for name in re.findall(r"\{(\w+)\}", text):
        if name not in allowed:
            hint = nearest(name, allowed, "{{{}}}")
            raise ValueError(f"{setting} must have no placeholder but {known}, got {{{name}}}{hint}")
    if re.search(r"[{}]", re.sub(r"\{\w+\}", "", text)):
        raise ValueError(f'{setting} must have no braces but those of {known}, got "{text}"')
    if FOREIGN in text.lower():
        raise ValueError(f'{setting} must not have ai-toolkit\'s {FOREIGN}; write {{trigger}} instead, got "{text}"')


# What is trained


@dataclass(frozen=True)
class Subject:
    """What the table `images` says about the texts of a usable image."""

    paths: tuple[str, ...]  # of the image, its duplicates and its references: the first with a caption gives it
    trigger: str = ""  # word that the texts get
    concept: str = ""  # subject in the folder's name, such as cat of 10_cat; of the class, else the class word
    class_only: bool = False  # a regularisation image: its texts get no trigger
    own_trigger: bool = False  # the trigger is a setting of the folder, not of [captions]
    folder: str = ""  # whose name or settings give these facts

    def fill(self, config: CaptionsConfig, caption: Caption) -> Filled:
        """The training text of one caption. A folder's own trigger is used even where the template has no {trigger}."""
        template = config.template
        if self.own_trigger and not self.trigger:
            return dataclasses.replace(fill(without_trigger(template), caption.text, ""), reason=NO_TRIGGER)
        if self.own_trigger and "{trigger}" not in template:
            template = f"{{trigger}}, {template}"
        return fill(template, caption.text, self.trigger, self.class_only, config.class_word or self.concept)


def subjects_of(images: pa.Table, config: CaptionsConfig) -> dict[str, Subject]:
    every = images.to_pylist()
    rows = {row["image_id"]: row for row in every if row["rejected"] is None and row["use"] != REFERENCE}
    beside: dict[str, list[str]] = defaultdict(list)
    for row in every:
        if row["reference_of"]:
            beside[row["reference_of"]].append(row["path"])
    found = {}
    for image_id, paths in usable_paths(images).items():
        row = rows[image_id]
        own, class_only = row["trigger"] is not None, row["use"] is not None
        trigger = "" if class_only else row["trigger"] if own else config.trigger
        concept = row["concept"] or (config.class_word if class_only else "")
        # The caption of an edit's picture may be named after the pair: cat.txt for cat_in.png and cat_out.png.
        named = [other for path in paths if path in beside for other in (*beside[path], *without_ending(path))]
        found[image_id] = Subject((*paths, *named), trigger, concept, class_only, own and not class_only, row["folder"] or "")
    return found


@dataclass(frozen=True)
class Found:
    """What the images and their files say, before [captions] changes it."""

    subjects: dict[str, Subject]  # by image_id
    captions: dict[str, list[Caption]]  # by image_id
    notes: list[str]  # for the user
    wrong: list[tuple[str, str]] = field(default_factory=list)  # (path of an image or "", why its caption file cannot be read)
    without: list[str] = field(default_factory=list)  # paths of images without a caption
    empty: dict[str, str] = field(default_factory=dict)  # path of an image without a caption -> its empty sidecar


def find_captions(run: Run[CaptionsConfig]) -> Found:
    """Raises ValueError if no image is usable, Problems if files cannot be read or captions are missing and that is an error."""
    config, found = run.config, look_for_captions(run)
    problems = list(dict.fromkeys(sentence for _, sentence in found.wrong))
    what, names = f"{len(found.without)} of {len(found.subjects)} images have no caption", first_names(found.without)
    if found.without and config.missing == "error":
        folder, paths = run.needs["image_folder"], run.inputs.rows(IMAGES)["path"].to_pylist()
        problems.append(
            f"{what} ({' or '.join(config.sources)}): {names}; write {_sidecar_of(found.without[0], config)} and so on beside "
            "them, let a model write them ([descriptions]), or set captions.missing to empty, trigger, filename or skip"
            + (_other_captions(folder, paths, config, found.notes) if not found.empty else _empty(found))
        )
    elif found.without:
        found.notes.append(f"{what} (captions.missing = {config.missing}): {names}")
    if problems:
        raise Problems(problems)
    return found


def look_for_captions(run: Run[CaptionsConfig]) -> Found:
    """The same, with what is wrong in `wrong` and `without`. Raises ValueError if no image is usable."""
    config, images = run.config, run.inputs.rows(IMAGES)
    folder, paths, subjects = run.needs["image_folder"], images["path"].to_pylist(), subjects_of(images, config)
    if "{caption}" not in config.template:  # no file is read
        return Found(subjects, {image_id: [Caption("", "template", "captions.template")] for image_id in subjects}, [])
    lookups: list[Lookup] = []
    result = Found(subjects, {}, [])
    for source in config.sources:
        try:
            more, notes = make_lookups(folder, paths, dataclasses.replace(config.where, sources=(source,)), run.root)
        except ValueError as error:
            result.wrong.append(("", str(error)))
            continue
        lookups += more
        result.notes.extend(notes)
    described, whole = described_captions(run), not result.wrong
    named = whole and "sidecar" in config.sources
    sidecars: Callable[[str], Iterator[str]] = sidecar_names(folder, config.where, run.root) if named else lambda path: iter(())
    for image_id, each in subjects.items():
        # The first path with a caption wins, whatever its source: duplicates are asked only where the image has none.
        # A model's caption comes after all files, the name of the folder last: "cat" of 10_cat.
        try:
            captions = next((captions for path in each.paths for lookup in lookups if (captions := lookup(path))), [])
        except ValueError as error:
            result.wrong.append((each.paths[0], str(error)))
            continue
        of_folder = [Caption(each.concept, "folder", each.folder)] if each.concept else []
        result.captions[image_id] = captions or described.get(image_id) or of_folder
        # A file for many images that cannot be read may have its caption.
        if whole and not result.captions[image_id]:
            result.without.append(each.paths[0])
            if name := next((name for path in each.paths for name in sidecars(path)), ""):
                result.empty[each.paths[0]] = name
    return result


def caption_problems(run: Run[CaptionsConfig]) -> list[tuple[str, str]]:
    """(path of an image or "", what is wrong and what would be right): all that keeps the captions from being made."""
    config, found = run.config, look_for_captions(run)
    problems = list(found.wrong)
    if config.missing == "error":
        for path in found.without:
            empty = found.empty.get(path)
            remedy = f"{empty} is there, but empty" if empty else f"write {_sidecar_of(path, config)} beside it"
            problems.append((path, f"no caption: {remedy}, or set captions.missing"))
    if not problems:
        try:
            caption_rows(found, config, read_edits(run.root))
        except ValueError as error:
            problems.append(("", str(error)))
    return problems


@dataclass(frozen=True)
class Doubt:
    """What may be a mistake although captions can be made."""

    path: str  # of an image, or ""
    name: str  # of the warning
    detail: str


def caption_doubts(run: Run[CaptionsConfig]) -> Iterator[Doubt]:
    config, found = run.config, look_for_captions(run)
    if "{caption}" not in config.template:
        yield Doubt("", "", _one_text(config))
        return
    yield from (Doubt("", "", note) for note in (*found.notes, *_one_trigger(found.subjects, config)))
    edits = read_edits(run.root)
    by_file = {each.paths[0] for image_id, each in found.subjects.items() if f"{image_id}:0" not in edits}
    yield from (each for each in _file_doubts(run, found) if each.path in by_file)
    for key, file in newer_files(run, found).items():
        path = found.subjects[key.rpartition(":")[0]].paths[0]
        yield Doubt(path, "newer_caption", f"{file} has changed since the caption was edited on the page: the edit is trained")


def _file_doubts(run: Run[CaptionsConfig], found: Found) -> Iterator[Doubt]:
    """About the files of images whose first caption is not edited."""
    config = run.config
    instead = {"empty": "the empty text is trained", "trigger": "the trigger alone is trained"}
    instead |= {"filename": "its file name is trained", "skip": "it is left out"}
    if config.missing != "error":
        for path in found.without:
            file = f"{found.empty[path]} is empty" if path in found.empty else "no caption"
            yield Doubt(path, NO_CAPTION, f"{file}: {instead[config.missing]}")
    for image_id, captions in found.captions.items():
        subject = found.subjects[image_id]
        if subject.trigger and captions and all(each.text.strip() == subject.trigger for each in captions):
            no_file = captions[0].source == "folder"
            said = f"no caption: {instead['trigger']}" if no_file else f"{captions[0].origin} has the trigger alone"
            yield Doubt(subject.paths[0], NO_CAPTION, said)
    yield from _contradictions(run, found)


def _contradictions(run: Run[CaptionsConfig], found: Found) -> Iterator[Doubt]:
    """Images with a sidecar and a line of a metadata file that say different things."""
    folder, paths, two = run.needs["image_folder"], run.inputs.rows(IMAGES)["path"].to_pylist(), ("sidecar", "metadata")
    order = [source for source in run.config.sources if source in two]
    lookups: list[Lookup] = []
    with suppress(ValueError):  # a file that cannot be read is an error already
        for source in order if len(order) == len(two) else ():
            more, _ = make_lookups(folder, paths, dataclasses.replace(run.config.where, sources=(source,)), run.root)
            lookups.append(more[-1])
    for subject in found.subjects.values() if len(lookups) == len(two) else ():
        with suppress(ValueError):
            first, second = ({" ".join(each.text.split()): each.origin for each in look(subject.paths[0])} for look in lookups)
            if first and second and not first.keys() & second.keys():
                origins = [next(iter(own.values())) for own in (first, second)]
                said = f"{origins[0]} and {origins[1]} differ: {origins[0]} is trained (captions.sources)"
                yield Doubt(subject.paths[0], "two_captions", said)


def _empty(found: Found) -> str:
    files = list(found.empty.values())
    return f"; {several(len(files), 'text file')} {'is' if len(files) == 1 else 'are'} there, but empty: {first_names(files)}"


def _sidecar_of(path: str, config: CaptionsConfig) -> str:
    return PurePosixPath(path).with_suffix(config.where.extensions[0]).name


def described_captions(run: Run[CaptionsConfig]) -> dict[str, list[Caption]]:
    """image_id -> its one caption by a model. Empty if the table `descriptions` is not built."""
    try:
        rows = run.inputs.rows(DESCRIPTIONS).to_pylist()
    except ValueError as error:
        # `NotBuilt` of pipeline, which stages may not import, names its table.
        if getattr(error, "table", "") != DESCRIPTIONS.name:
            raise
        return {}
    return {row["image_id"]: [Caption(row["text"], "description", row["model"])] for row in rows if row["text"]}


def _other_captions(folder: Path, paths: list[str], config: CaptionsConfig, notes: list[str]) -> str:
    if notes:
        return f"; {notes[0]}; names must be relative to the folder of the file"
    # The parent of an image inside a tar is a file.
    parents = sorted({str(above) for path in paths for above in PurePosixPath(path).parents if (folder / above).is_dir()})
    files = [entry for parent in parents for entry in sorted((folder / parent).iterdir()) if entry.is_file()]
    names = [PurePosixPath(entry.relative_to(folder).as_posix()) for entry in files]
    if tables := [str(name) for name in names if name.suffix.lower() in TABLES and name.name not in READERS]:
        *most, last = READERS
        return f"; {first_names(tables)} is not read: files of captions are {', '.join(most)} and {last}"
    texts = [name for name in names if name.suffix.lower() in (*config.where.extensions, ".txt", ".caption", ".tags")]
    stems = {composed(name) for path in paths for name in (path, str(PurePosixPath(path).with_suffix("")))}
    if lonely := [str(name) for name in texts if composed(str(name.with_suffix(""))) not in stems]:
        return f"; {len(lonely)} text files have the name of no image: {first_names(lonely)}"
    unread = [str(name) for name in texts if name.suffix not in config.where.extensions]
    return f"; {first_names(unread)} are not read: set captions.extension" if unread else ""


def operate(captions: Iterable[Caption], config: CaptionsConfig, image_id: str) -> list[Caption]:
    """Replace, drop and shuffle as [captions] says. The orders of a caption share its weight."""
    found = []
    for position, caption in enumerate(captions):
        text, weight = caption.text, caption.weight
        if config.weights:
            weight = config.weights[min(position, len(config.weights) - 1)]
        for word, other in (config.replace or {}).items():
            text = text.replace(word, other)
        if not (config.drop or config.shuffle):
            found.append(dataclasses.replace(caption, text=text, weight=weight))
            continue
        unwanted = {part.strip().casefold() for part in config.drop}
        parts = [part.strip() for part in text.split(",")]
        parts = [part for part in parts if part and part.casefold() not in unwanted]
        head, tail = parts[: config.keep], parts[config.keep :]
        # The name of the draw is the image and the position, so that a run again gives the same orders.
        drawn = [draws.permutation(len(tail), 0, f"caption {image_id} {position} {n}") for n in range(config.shuffle)]
        orders = [head + [tail[at] for at in order] for order in drawn] or [parts]
        weight = None if weight is None else weight / len(orders)
        found += [dataclasses.replace(caption, text=", ".join(order), weight=weight) for order in orders]
    return found


# Edits on the project's page, which lie in the project, over the untouched image folder. `EDITS` has one line per edit, the
# newest last: {"key": "IMAGE_ID:POSITION", "text": "...", "at": 1700000000.0}. A text of null takes the edits of that caption
# back. `at` is in seconds since 1970.


class Edit(NamedTuple):
    key: str
    text: str | None
    at: float


def edit_lines(project: Path) -> list[Edit]:
    """Every edit, oldest first. Raises ValueError with file and line if a line is damaged."""
    file, found = project / EDITS, list[Edit]()
    try:
        with open_regular(file) as content:
            written_text = content.read().decode()
        # Not splitlines(), which also ends a line where a caption has a Unicode line separator.
        *lines, last = written_text.split("\n")
        written = file.stat().st_mtime  # of edits by an earlier version, which have no time
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    for number, line in enumerate([*lines, last], 1):
        try:
            # A full disk could cut a line of an earlier version short, and the next edit then stands on the same line.
            entry = json.loads(line[max(0, line.rfind('{"key": ')) :])
            text = None if entry["text"] is None else str(entry["text"])
            found.append(Edit(str(entry["key"]), text, float(entry.get("at", written))))
        except (ValueError, KeyError, TypeError, RecursionError):
            # An earlier version wrote in place: a kill could cut its last line short.
            if number > len(lines):
                break
            raise ValueError(f'{file}:{number}: must be like {{"key": "...", "text": "..."}}, got {line[:80]!r}') from None
    return found


def read_edits(project: Path) -> dict[str, str]:
    """Edited texts by "IMAGE_ID:POSITION", the newest of each."""
    return {edit.key: edit.text for edit in _newest(project) if edit.text is not None}


def _newest(project: Path) -> Iterable[Edit]:
    return {edit.key: edit for edit in edit_lines(project)}.values()


def newer_files(run: Run[CaptionsConfig], found: Found) -> dict[str, str]:
    """The keys of edits -> the caption file that has changed since, and says something else."""
    newer: dict[str, str] = {}
    for edit in _newest(run.root):
        image_id, _, position = edit.key.rpartition(":")
        subject = found.subjects.get(image_id)
        if edit.text is None or not subject or not position.isdecimal():
            continue
        captions = operate(found.captions.get(image_id, []), run.config, image_id)
        rows = list(_image_rows(image_id, [(subject.fill(run.config, each), each) for each in captions]))
        row = rows[int(position)] if int(position) < len(rows) else {"source": ""}
        if row["source"] not in ("sidecar", "metadata") or row["text"] == edit.text:
            continue
        for name in (row["origin"], row["origin"].rpartition(":")[0]):  # with or without the number of a line
            path = run.needs["image_folder"] / name
            with suppress(OSError):
                if name and path.is_file() and path.stat().st_mtime > edit.at:
                    newer[edit.key] = name
    return newer


def apply_edits(rows: Iterable[Mapping[str, Any]], edits: Mapping[str, str]) -> list[Row]:
    """The rows of `captions` with the edits. Where an edit makes two texts of an image equal, only the first row is left."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        # Positions of other roles count separately, so the key of an edit may also fit a row that is no caption.
        text = edits.get(f"{row['image_id']}:{row['position']}") if row["role"] == "caption" else None
        changed = dict(row)
        if text is not None:
            changed |= {"text": text, "caption_id": text_sha256(text), "source": "edit", "origin": EDITS}
        found.setdefault((row["image_id"] + row["role"], changed["caption_id"]), changed)
    return list(found.values())


# The rows


def caption_rows(found: Found, config: CaptionsConfig, edits: Mapping[str, str]) -> tuple[list[Row], list[str]]:
    """All rows, and notes for the user. Raises ValueError if no caption has the trigger, or there is none for "[trigger]"."""
    subjects = found.subjects
    triggers = list(dict.fromkeys(filter(None, [config.trigger, *(each.trigger for each in subjects.values())])))
    _check_triggers(subjects, triggers, config)
    rows: list[Row] = []
    filled: list[tuple[Filled, Caption]] = []
    for image_id, captions in found.captions.items():
        subject = subjects[image_id]
        texts = [(subject.fill(config, each), each) for each in operate(captions, config, image_id)]
        if not texts and config.missing == "filename":
            texts = [(subject.fill(config, each), each) for each in from_file_name(subject.paths[0])]
        elif not texts and config.missing in ("empty", "trigger"):
            text = subject.trigger if config.missing == "trigger" else ""
            texts = [(Filled(text), Caption(text, "config", "captions.missing"))]
        rows += _image_rows(image_id, texts)
        filled += texts
    # Left in, "[trigger]" would be trained as a word.
    without = [image_id for image_id, each in subjects.items() if not (each.trigger or each.class_only)]
    foreign = [each.origin for image_id in without for each in found.captions[image_id] if FOREIGN in each.text.lower()]
    if foreign:
        raise ValueError(f"{first_names(foreign, 1)}: {FOREIGN} stands for the trigger; set captions.trigger, or write the word")
    notes = [*found.notes, *_describe(filled, config), *_one_trigger(subjects, config)]
    notes += [] if "{caption}" in config.template else [_one_text(config)]
    # Edits replace training texts, so they come after the template, and before the check that looks for the trigger.
    rows = apply_edits(rows, edits)
    notes += _check_trigger([row["text"] for row in rows if not subjects[row["image_id"]].class_only], subjects, config)
    rows.append(_row("", "empty", "", "config", "", 0))
    # Position 0 is the trigger of [captions]. The others are those of folders.
    places = {config.trigger: 0} if config.trigger else {}
    places |= {each: place for place, each in enumerate((each for each in triggers if each != config.trigger), 1)}
    for word, place in places.items():
        rows.append(_row("", "trigger", word, "config", "images.folder" if place else "captions.trigger", place))
    if config.class_word:
        rows += _class_rows(rows, subjects, config)
    for position, (text, prompt) in enumerate(config.previews(triggers).items()):
        # By this, [samples] prompt_references finds the prompts of all triggers.
        more = {"template": prompt} if len(triggers) > 1 and text != prompt else {}
        rows.append(_row("", "preview", text, "config", "", position, **more))
    if config.slider:
        neutral = dict.fromkeys(config.slider.neutral)
        rows += [_row("", NEUTRAL, text, "config", "train.slider", n) for n, text in enumerate(neutral)]
        poles = dict.fromkeys(pole for text in neutral for pole in config.slider.poles(text))
        rows += [_row("", POLE, text, "config", "train.slider", n) for n, text in enumerate(poles)]
    return rows, notes


def _image_rows(image_id: str, texts: list[tuple[Filled, Caption]]) -> Iterator[Row]:
    """One row per different text: the first caption that gave it, with the weights added up."""
    groups: dict[str, list[tuple[Filled, Caption]]] = defaultdict(list)
    for each in texts:
        groups[each[0].text].append(each)
    for position, (text, group) in enumerate(groups.items()):
        filled, caption = group[0]
        weight = caption.weight
        for _, other in group[1:]:
            weight = None if other.weight is None else (weight or 0.0) + other.weight
        more = {"template": filled.template, "reason": filled.reason, "weight": weight}
        yield _row(image_id, "caption", text, caption.source, caption.origin, position, **more)


def _class_rows(rows: list[Row], subjects: Mapping[str, Subject], config: CaptionsConfig) -> list[Row]:
    """Each caption and trigger again with the class in place of the trigger, for prior preservation."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        trigger = subjects[row["image_id"]].trigger if row["image_id"] else row["text"]
        if row["role"] not in ("caption", "trigger") or not trigger:
            continue
        text, count = trigger_pattern(trigger).subn(lambda match: config.class_word, row["text"])
        if count:
            made = _row(row["image_id"], "class", text, row["source"], row["origin"], row["position"])
            found.setdefault((row["image_id"], text), made)
    return list(found.values())


def _row(image_id: str, role: str, text: str, source: str, origin: str, position: int, **more: Any) -> Row:
    try:
        caption_id = text_sha256(text)
    except UnicodeEncodeError:
        raise ValueError(
            f"{origin or 'project.toml'}: the text must be valid Unicode, but contains half of a surrogate pair"
        ) from None
    row = {"caption_id": caption_id, "image_id": image_id, "role": role, "text": text, "source": source, "origin": origin}
    return row | {"position": position, "template": None, "reason": None, "weight": None} | more


def _check_triggers(subjects: Mapping[str, Subject], triggers: Sequence[str], config: CaptionsConfig) -> None:
    """Raise ValueError for a use of the trigger that images without any would have."""
    without = [each.paths[0] for each in subjects.values() if not (each.trigger or each.class_only or each.own_trigger)]
    uses = {
        "captions.template has {trigger}": "{trigger}" in config.template and without,
        "captions.preview_prompts has {trigger}": any("{trigger}" in each for each in config.preview_prompts) and not triggers,
        'captions.missing is "trigger"': config.missing == "trigger" and without,
        "captions.class_word takes its place": config.class_word and not triggers,
    }
    for use, needed in uses.items():
        if needed:
            some = f"; {first_names(without)} are in no [[images.folder]] with a trigger" if without and triggers else ""
            raise ValueError(f'captions.trigger must be set, because {use}, got ""{some}')


def _one_text(config: CaptionsConfig) -> str:
    return f'captions.template = "{config.template}" has no {{caption}}: captions are not read, and all pictures get this text'


def _one_trigger(subjects: Mapping[str, Subject], config: CaptionsConfig) -> Iterator[str]:
    """A note if the template puts one trigger before the captions of kohya's subjects that have other names."""
    named = {
        each.concept: each.folder for each in subjects.values() if each.concept and not (each.class_only or each.own_trigger)
    }
    others = [folder for concept, folder in named.items() if not trigger_pattern(config.trigger).search(concept)]
    if config.trigger and "{trigger}" in config.template and len(named) > 1 and others:
        yield (
            f'{len(named)} subjects ({first_names(list(named.values()))}) are trained with one trigger, "{config.trigger}": '
            "give each an [[images.folder]] with a trigger of its own, unless they show the same"
        )


def _check_trigger(texts: list[str], subjects: Mapping[str, Subject], config: CaptionsConfig) -> list[str]:
    """A note if only some texts have the trigger. Raises ValueError if none has it."""
    # A folder with a trigger of its own: no single word belongs in all captions.
    own = any(each.trigger != config.trigger for each in subjects.values() if not each.class_only)
    if not config.trigger or not texts or own:
        return []
    pattern = trigger_pattern(config.trigger)
    count = sum(bool(pattern.search(text)) for text in texts)
    if not count:
        raise ValueError(
            f'captions.trigger "{config.trigger}" is in none of the {len(texts)} captions: '
            'add it to them, or set captions.template = "{trigger}, {caption}"'
        )
    return [f'the trigger "{config.trigger}" is in only {count} of {len(texts)} captions'] if count < len(texts) else []


def _describe(filled: list[tuple[Filled, Caption]], config: CaptionsConfig) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for _, each in filled:
        if each.source == "folder":
            counts["the names of folders"] += 1
        elif each.source == "metadata":
            counts[PurePosixPath(each.origin.rpartition(":")[0]).name] += 1
        elif each.source == "sidecar":
            counts[PurePosixPath(each.origin).suffix.partition(":")[0]] += 1
        elif each.source == "description":
            counts[each.origin] += 1
    if counts and set(counts) != {config.where.extensions[0]}:
        yield f"{counts.total()} captions: {', '.join(f'{count} from {kind}' for kind, count in counts.most_common())}"
    reasons = Counter(text.reason for text, _ in filled)
    if has := reasons[HAS_TRIGGER]:
        first = next(caption.origin for text, caption in filled if text.reason == HAS_TRIGGER)
        yield f"{has} of {len(filled)} captions have the trigger already and do not get it a second time: {first} and so on"
    if reasons[REPLACED]:
        yield f"[trigger] was replaced by the trigger in {reasons[REPLACED]} of {len(filled)} captions"


# The stage


def _rows(run: Run[CaptionsConfig]) -> tuple[list[Row], list[str]]:
    found = find_captions(run)
    rows, notes = caption_rows(found, run.config, read_edits(run.root))
    newer = newer_files(run, found)
    for row in rows:
        if row["source"] == "edit" and (file := newer.get(f"{row['image_id']}:{row['position']}")):
            row["reason"] = f"{file} {NEWER}"
    return rows, notes


def wanted_captions(run: Run[CaptionsConfig]) -> pa.Table:
    # All texts are read each time: finding out which have changed would cost more.
    return pa.Table.from_pylist(run.once(_rows)[0], schema=CAPTIONS.batch)


def write_captions(run: Run[CaptionsConfig]) -> Iterator[pa.RecordBatch]:
    # `wanted_captions` has filled in all columns.
    yield from run.output.pending.select(CAPTIONS.batch.names).to_batches(max_chunksize=BATCH)


def finish_captions(run: Run[CaptionsConfig]) -> Iterator[pa.RecordBatch]:
    rows, notes = run.once(_rows)
    if run.output.pending.num_rows and not run.report.stop():
        for note in notes:
            run.report.say(note)
    # Each time: what is in the user's file is not what is trained.
    if newer := [row["reason"].removesuffix(f" {NEWER}") for row in rows if str(row["reason"]).endswith(NEWER)]:
        run.report.say(
            f"{several(len(newer), 'caption file')} changed after the caption was edited on the page ({first_names(newer)}): "
            "the edit is trained; `latentmill captions --sidecars` writes edits into the files, --take-files drops these edits"
        )
    yield from ()


STAGE = Stage(
    reads=(IMAGES,),
    optional=(DESCRIPTIONS,),
    writes=CAPTIONS,
    unit="caption",
    config=CaptionsConfig,
    needs=("image_folder",),
    wants=wanted_captions,
    foresee=wanted_captions,
    run=write_captions,
    finish=finish_captions,
    opens=lambda run: iter(()),  # the pending rows hold all texts
)
