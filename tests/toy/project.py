"""Projects of the toy pipeline, for tests."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
[project]
pipeline = "tests.toy"
commit_seconds = 0.0

[train]
steps = 4
batch_size = 4
checkpoint_every = 2

"""
TEXTS = {
    "a.txt": "a red apple on a table\na green leaf\nthe sea at night\n",
    "deep/b.txt": "one two three four five\nsix\nseven lines are enough\nand one more\n",
}


def make(folder: Path) -> Path:
    for name, text in TEXTS.items():
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "project.toml").write_text(CONFIG)
    return folder
