"""Presets of `latentmill init`: the first settings for what is trained, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Mapping[str, tuple[Any, str]]]  # section -> setting -> (value, reason)

PRESETS: Mapping[str, Settings] = {
    "subject": {
        "buckets": {"resolutions": ((512, 768), "add 1024 for the last bit of detail, if it fits")},
        "train": {
            "steps": (1000, "10 to 30 pictures of one thing: it is learned early, and later steps copy the pictures"),
            "checkpoint_every": (100, "compare the checkpoints: the best one is rarely the last"),
        },
        "train.data": {"dropped": ("trigger", "the trigger alone should be enough to call the subject")},
        "samples": {"checkpoints": ("all", "")},
    },
    "character": {
        "buckets": {"resolutions": ((512, 768, 1024), "a face is a small part of the picture: it needs the pixels")},
        "train": {
            "steps": (1500, "a face, clothes and poses: more than a thing has"),
            "checkpoint_every": (150, "compare the checkpoints: the best one is rarely the last"),
        },
        "train.data": {"dropped": ("trigger", "the trigger alone should be enough to call the character")},
        "samples": {"checkpoints": ("all", "")},
    },
    "style": {
        "latents": {"flip": (True, "a look has no left and right; false if the pictures have writing")},
        "train": {
            "steps": (2000, "30 to 200 pictures whose subjects differ: it takes longer until the look alone is left"),
            "caption_dropout": (0.1, "the look should also come if the prompt does not describe it"),
        },
        "samples": {"checkpoints": ("all", "")},
    },
    "edit": {
        "buckets": {"resolutions": ((512,), "a reference has as many tokens as its image, and a step more than twice the work")},
        "train": {
            "steps": (2000, "the model learns what to keep and what to change: more than a look"),
            "caption_dropout": (0.0, "the caption is the instruction: without it the task is unknown"),
        },
        "train.data": {"reference_dropout": (0.0, "the model always sees what it edits")},
        "samples": {
            "references": ((), 'the pictures that previews start from: ["images/control/a.png"]'),
            "checkpoints": ("all", ""),
        },
    },
}
