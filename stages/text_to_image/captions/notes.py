"""Lines for the user about captions: which files they are from, how triggers were added, and files that were not read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath

from stages.text_to_image.caption_files.text import Caption, first_names, normalise
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.template import HAS_TRIGGER, REPLACED, Filled

TABLES = frozenset({".json", ".jsonl", ".csv", ".tsv", ".xlsx", ".parquet"})
KNOWN = "metadata.jsonl, metadata.csv, captions.json, captions.jsonl, captions.csv and captions.tsv"


def describe_sources(captions: list[Caption], config: CaptionsConfig) -> list[str]:
    """A line such as "24 captions: 20 from .txt, 4 from captions.json"; none if all are from the preferred suffix."""
    counts = Counter(_kind(each) for each in captions if each.source not in ("config", "template", "filename"))
    if not counts or set(counts) == {config.extensions[0]}:
        return []
    return [f"{counts.total()} captions: {', '.join(f'{count} from {kind}' for kind, count in counts.most_common())}"]


def _kind(caption: Caption) -> str:
    if caption.source == "folder":
        return "the names of folders"
    name = PurePosixPath(caption.origin.rpartition(":")[0] if caption.source == "metadata" else caption.origin)
    return name.name if caption.source == "metadata" else name.suffix.partition(":")[0]


def describe_triggers(filled: list[tuple[Filled, Caption]]) -> list[str]:
    """Lines that say how many captions did not get the trigger from the template, and why."""
    counts = Counter(text.reason for text, _ in filled)
    first = {text.reason: caption.origin for text, caption in reversed(filled)}
    notes = []
    if counts[HAS_TRIGGER]:
        notes.append(
            f"{counts[HAS_TRIGGER]} of {len(filled)} captions have the trigger already and do not get it a second time: "
            f"{first[HAS_TRIGGER]} and so on"
        )
    if counts[REPLACED]:
        notes.append(f"[trigger] was replaced by the trigger in {counts[REPLACED]} of {len(filled)} captions")
    return notes


def _file_names(folder: Path, paths: list[str]) -> list[str]:
    parents = sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents})
    files = [entry for parent in parents for entry in sorted((folder / parent).iterdir()) if entry.is_file()]
    return [entry.relative_to(folder).as_posix() for entry in files]


def other_captions(folder: Path, paths: list[str], config: CaptionsConfig, notes: list[str]) -> str:
    """The end of the error about missing captions: where they may be. `notes` are those about rows of unknown images."""
    if notes:
        return f"; {notes[0]}; names must be relative to the folder of the file"
    stems = {normalise(name) for path in paths for name in (path, str(PurePosixPath(path).with_suffix("")))}
    names = _file_names(folder, paths)
    tables = [name for name in names if PurePosixPath(name).suffix.lower() in TABLES and PurePosixPath(name).name not in KNOWN]
    if tables:
        return f"; {first_names(tables)} is not read: files of captions are {KNOWN}"
    texts = [name for name in names if PurePosixPath(name).suffix.lower() in (*config.extensions, ".txt", ".caption", ".tags")]
    lonely = [name for name in texts if normalise(str(PurePosixPath(name).with_suffix(""))) not in stems]
    if lonely:
        return f"; {len(lonely)} text files have the name of no image: {first_names(lonely)}"
    return f"; {first_names(texts)} are not read: set captions.extension" if texts else ""
