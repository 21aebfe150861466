"""What lies in the folder that becomes a new project: its pictures, captions and subjects, before any file is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stages.settings import several, toml_string
from stages.text_to_image.caption_files import make_lookups, trigger_pattern
from stages.text_to_image.captions.stage import CaptionsConfig
from stages.text_to_image.images.folder import REPEATED, Row, no_images, reference_rules, rules, scan
from stages.text_to_image.images.stage import may_be_image
from stages.text_to_image.imaging.usable import REFERENCE, first_names

KINDS = {"jpg": "JPEG", "jpe": "JPEG", "tif": "TIFF", "heif": "HEIC"}
FOLDER = """\
[[images.folder]]
path = {path}  # only read, never written
{more}# Another subject: one more [[images.folder]] with a path and a trigger of its own. It may lie in this folder.\
"""
SUBJECT = """\
[[images.folder]]
path = {path}
trigger = {trigger}  # the folder's name; "" leaves the captions as they are
repeats = {repeats:g}\
"""


@dataclass(frozen=True)
class Subject:
    """Of a folder that is named as kohya's trainers want it: 10_ohwx cat."""

    folder: str  # below the image folder; "": itself
    trigger: str
    repeats: float
    pictures: int


@dataclass(frozen=True)
class Seen:
    folder: Path
    kinds: Counter[str]  # JPEG: 12; without `others`
    captioned: int  # pictures with a caption in a file, as far as the files can be read
    unread: str  # why captions cannot be read, or ""
    others: Counter[str]  # "of the class" and "to edit from"
    subjects: tuple[Subject, ...]
    loose: int  # pictures to train on beside the folders of `subjects`

    @property
    def itself(self) -> Subject | None:
        """The image folder has repeats and subject in its own name."""
        return self.subjects[0] if self.subjects and not self.subjects[0].folder else None

    def own(self, trigger: str) -> tuple[Subject, ...]:
        """Subjects that get a trigger of their own. Raises ValueError if `trigger` would be the word of several."""
        if self.itself or (trigger and all(trigger_pattern(trigger).search(each.trigger) for each in self.subjects)):
            return ()
        if len({each.trigger for each in self.subjects}) < 2 and trigger:
            return ()
        if trigger and not self.loose:
            called = first_names([f"{each.folder} is '{each.trigger}'" for each in self.subjects])
            raise ValueError(
                f'--trigger "{trigger}" (TRIGGER with make) would be the word of {len(self.subjects)} subjects: {called}; leave '
                "it out, and the name of each folder becomes the trigger of its pictures"
            )
        return self.subjects

    def toml(self, images: str, trigger: str) -> str:
        """The entries [[images.folder]]. `images`: the image folder, as project.toml names it."""
        own, more = self.own(trigger), ""
        if self.itself:
            more = f"repeats = {self.itself.repeats:g}  # the folder's name\n"
        elif own and not trigger:
            more = 'trigger = ""  # of pictures that lie in none of the folders below\n'
        first = FOLDER.format(path=toml_string(images), more=more)
        entries = [
            SUBJECT.format(path=toml_string(f"{images}/{each.folder}"), trigger=toml_string(each.trigger), repeats=each.repeats)
            for each in own
        ]
        return "\n\n".join([first, *entries])

    def lines(self, trigger: str) -> Iterator[str]:
        count = self.kinds.total()
        if not count:
            yield no_images(self.folder)
            return
        yield f"{several(count, 'picture')} in {self.folder}: {', '.join(f'{n} {kind}' for kind, n in self.kinds.most_common())}"
        named = trigger or self.itself or (self.subjects and not self.loose)
        without = "their trigger alone will be trained" if named else "write one, or give a trigger"
        if self.unread:
            yield f"captions: {self.unread}"
        elif self.captioned < count:
            yield f"{self.captioned or 'none'} with a caption, {count - self.captioned} without: {without}"
        else:
            yield "all with a caption"
        own = self.own(trigger)
        for each in self.subjects:
            word = f"trigger '{each.trigger}'" if each in own or not trigger else f"named '{each.trigger}', trigger '{trigger}'"
            yield f"{each.folder or self.folder.name}: {several(each.pictures, 'picture')}, {each.repeats:g} repeats, {word}"
        if own and self.loose:
            word = f"have the trigger '{trigger}'" if trigger else "have no trigger"
            yield f"{several(self.loose, 'picture')} in no such folder: they {word}"
        for what, number in self.others.items():
            yield f"{several(number, 'picture')} {what}"


def look(folder: Path, project: Path) -> Seen:
    """Raises ValueError if a folder cannot be read."""
    paths = [str(row["path"]) for row in scan(folder).files]
    pictures = [path for path in paths if may_be_image(path)]
    found: dict[str, Row] = rules(pictures, {"": None}, True) | reference_rules(pictures, None)
    trained = [path for path in pictures if found[path]["use"] is None]
    groups = Counter((row["folder"], row["concept"], row["repeats"]) for row in map(found.get, trained) if row)
    subjects = [Subject(where, name, repeats, count) for (where, name, repeats), count in sorted(groups.items(), key=str) if name]
    loose = sum(count for (_, name, _), count in groups.items() if not name)
    if not subjects and (name := REPEATED.fullmatch(folder.name)):
        subjects, loose = [Subject("", name[2].strip(), float(name[1]), loose)], 0
    uses = Counter(found[path]["use"] for path in pictures)
    others = {"to edit from": uses[REFERENCE], "of the class (regularisation)": uses.total() - uses[None] - uses[REFERENCE]}
    captioned, unread = _captioned(folder, trained, project)
    kinds = Counter(KINDS.get(suffix := PurePosixPath(path).suffix[1:].lower(), suffix.upper()) for path in trained)
    return Seen(folder, kinds, captioned, unread, +Counter(others), tuple(subjects), loose)


def _captioned(folder: Path, paths: list[str], project: Path) -> tuple[int, str]:
    """(pictures with a caption, why captions cannot be read)."""
    count, problem = 0, ""
    try:
        lookups, _ = make_lookups(folder, paths, CaptionsConfig().where, project)
    except ValueError as error:
        return 0, str(error)
    for path in paths:
        try:
            count += any(lookup(path) for lookup in lookups)
        except ValueError as error:
            problem = problem or str(error)
    return count, problem
