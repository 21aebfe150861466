"""An image folder with its stored table, and images to put into it."""

import numpy as np
from PIL import Image

from schemas.text_to_image import IMAGES
from stages.text_to_image.images.stage import STAGE, ImagesConfig
from tests.harness import context, rows_of, run


def draw(path, seed=0, size=(80, 72)):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(noise).save(path)
    return path


class Project:
    """An image folder and its stored table. As the runner does, it replaces rows by key and drops rows of deleted files."""

    def __init__(self, folder, **config):
        self.folder, self.config, self.lines = folder, ImagesConfig(**config), []
        self.source = folder / "images"
        self.source.mkdir()
        self.stored = None

    def context(self, **options):
        made = context(STAGE, self.folder, config=self.config, stored=self.stored, source=self.source, **options)
        made.report.say = self.lines.append
        return made

    def run(self, **options):
        self.lines.clear()
        made = self.context(**options)
        yielded = {row["path"]: row for row in run(STAGE, made).to_pylist()}
        self.store(yielded.values())
        return yielded

    def store(self, rows):
        wanted = STAGE.wants(self.context())["path"].to_pylist()
        old = {row["path"]: row for row in self.stored.to_pylist()} if self.stored is not None else {}
        old |= {row["path"]: row for row in rows}
        self.stored = rows_of(IMAGES, *[old[path] for path in sorted(old) if path in wanted])

    def verdicts(self):
        return {row["path"]: row["rejected"] for row in self.stored.to_pylist()}
