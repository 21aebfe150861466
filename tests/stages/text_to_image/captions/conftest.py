"""An image folder with captions, for the tests of the stage captions."""

from pathlib import Path

import pytest

from schemas.text_to_image import IMAGES
from stages.text_to_image.captions.stage import STAGE, CaptionsConfig
from tests.harness import context, rows_of, run


class Folder:
    """An image folder: rows of the table images (the stage opens no image), and text files beside them."""

    def __init__(self, root: Path, *paths: str) -> None:
        self.root, self.lines, self.images = root, [], []
        for path in paths:
            self.add(path)

    def add(self, path, image_id="", rejected=None):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        self.images.append({"path": path, "image_id": image_id or path, "rejected": rejected})

    def write(self, name, text, encoding="utf-8"):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(text if isinstance(text, bytes) else text.encode(encoding))

    def context(self, stored=None, **config):
        tables = {"images": rows_of(IMAGES, *self.images)}
        made = context(STAGE, self.root / "..", tables, config=CaptionsConfig(**config), stored=stored, source=self.root)
        made.report.say = self.lines.append
        return made

    def rows(self, **config):
        return run(STAGE, self.context(**config)).to_pylist()

    def captions(self, **config):
        found: dict[str, list[str]] = {}
        for row in sorted(self.rows(**config), key=lambda row: row["position"]):
            if row["role"] == "caption":
                found.setdefault(row["image_id"], []).append(row["text"])
        return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return Folder(tmp_path / "images", "a.png", "sub/b.jpg")


@pytest.fixture
def captioned(folder):
    folder.write("a.txt", "a cat")
    folder.write("sub/b.txt", "a dog")
    return folder
