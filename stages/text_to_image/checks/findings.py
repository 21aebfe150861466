"""Turn the measurements in the table `checks` into warnings for the user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from stages.text_to_image.checks.config import ChecksConfig
from stages.text_to_image.checks.near import SIDE, near_pairs

Row = dict[str, Any]

WORDS = {  # warning -> how a line for the user names the images
    "near_duplicate": "near-duplicates of a larger image",
    "blurred": "blurred",
    "dark": "underexposed",
    "bright": "overexposed",
    "border": "with a border",
    "small": "very small",
    "aspect": "very long or wide",
    "equal_caption": "with the caption of another image",
    "near_caption": "with nearly the caption of another image",
    "no_trigger": "without the trigger in the caption",
    "long_caption": "with a very long caption",
    "mojibake": "with a caption in a wrong encoding",
}


def picture_warnings(row: Row, config: ChecksConfig) -> dict[str, str]:
    """Name of the warning -> sentence."""
    found = {
        "near_duplicate": (row["duplicate_of"] is not None, "a near-duplicate of a larger image"),
        "blurred": (row["blur"] >= config.blur, f"blur {row['blur']:.2f}"),
        "dark": (row["brightness"] <= config.dark, f"brightness {row['brightness']:.2f}"),
        "bright": (row["brightness"] >= config.bright, f"brightness {row['brightness']:.2f}"),
        "border": (row["border"] >= config.border, f"a border of {row['border']:.0%} of the picture"),
        "small": (row["short_side"] < config.short_side, f"shorter side {row['short_side']} pixels"),
        "aspect": (row["aspect"] > config.aspect, f"aspect ratio {row['aspect']:.1f}"),
    }
    if row["clipped"] >= config.clipped and not (found["dark"][0] or found["bright"][0]):
        # Clipped detail counts as over- or underexposed, unless the brightness has said so already.
        name = "bright" if row["brightness"] >= 0.5 else "dark"
        found[name] = (True, f"{row['clipped']:.0%} of the detail is clipped")
    return {name: sentence for name, (warned, sentence) in found.items() if warned}


def mark_near_duplicates(rows: Iterable[Row], least: float) -> list[Row]:
    """Copies with `duplicate_of` (an image_id) and `similarity`. Of two, that with the longer short side is the original."""
    rows = [row | {"duplicate_of": None, "similarity": None} for row in rows]
    ranked = sorted(range(len(rows)), key=lambda n: (-rows[n]["short_side"], rows[n]["path"]))
    thumbnails = np.frombuffer(b"".join(rows[n]["thumbnail"] for n in ranked), np.uint8).reshape(-1, SIDE, SIDE)
    for i, j, similarity in near_pairs(thumbnails, least):
        original, other = rows[ranked[i]], rows[ranked[j]]
        # A duplicate is never an original, so that chains end at one picture that stays.
        if other["duplicate_of"] is None and original["duplicate_of"] is None:
            other |= {"duplicate_of": original["image_id"], "similarity": round(similarity, 4)}
    return rows


def lines(rows: Iterable[Mapping[str, Any]], named: int = 3) -> list[str]:
    """One line per kind of warning, with the number of its images and the first `named` paths."""
    paths: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: str(row["path"])):
        for name in filter(None, row["warnings"].split(", ")):
            paths[name].append(row["path"])
    found = []
    for name, words in WORDS.items():
        if own := paths.get(name):
            more = f" and {len(own) - named} more" if len(own) > named else ""
            found.append(f"{len(own)} {'image' if len(own) == 1 else 'images'} {words}: {', '.join(own[:named])}{more}")
    return found
