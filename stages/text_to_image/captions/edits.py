"""Captions that the user edited on the project's page. They lie in the project, over the untouched image folder.

`captions.edits.jsonl` has one line per edit, the newest last: {"key": "IMAGE_ID:POSITION", "text": "..."}. A text of null takes
the edits of that caption back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = "captions.edits.jsonl"
LONGEST = 20_000  # letters of a caption; every text encoder cuts much earlier


def read_edits(project: Path) -> dict[str, str]:
    """Edited texts by "IMAGE_ID:POSITION", the newest of each. Raises ValueError with file and line if a line is damaged."""
    found: dict[str, str | None] = {}
    try:
        lines = (project / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{project / FILE} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            found[str(entry["key"])] = None if entry["text"] is None else str(entry["text"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f'{project / FILE}:{number}: must be like {{"key": "...", "text": "..."}}, got {line[:80]!r}'
            ) from None
    return {key: text for key, text in found.items() if text is not None}


def write_edits(project: Path, edits: Mapping[str, str | None]) -> None:
    """Append edits; None takes one back. If one is blank, too long or invalid, raises ValueError and writes nothing."""
    lines = []
    for key, text in edits.items():
        if text is not None and (not text.strip() or len(text) > LONGEST):
            raise ValueError(f"a caption must have 1 to {LONGEST} letters, got {len(text.strip())}")
        try:
            lines.append(json.dumps({"key": key, "text": text if text is None else text.strip()}, ensure_ascii=False) + "\n")
            # `json.dumps` lets half of a surrogate pair through.
            lines[-1].encode()
        except UnicodeEncodeError:
            raise ValueError("a caption must be valid Unicode, got half of a surrogate pair") from None
    with (project / FILE).open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


def apply_edits(rows: Iterable[Mapping[str, Any]], edits: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of `captions` with the edits. Where an edit makes two texts of an image equal, only the first row is left."""
    import hashlib

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        # Positions of other roles count separately, so the key of an edit may also fit a row that is no caption.
        text = edits.get(f"{row['image_id']}:{row['position']}") if row["role"] == "caption" else None
        changed = dict(row)
        if text is not None:
            caption_id = hashlib.sha256(text.encode()).hexdigest()
            changed |= {"text": text, "caption_id": caption_id, "source": "edit", "origin": FILE}
        found.setdefault((row["image_id"] + row["role"], changed["caption_id"]), changed)
    return list(found.values())
