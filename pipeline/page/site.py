"""The state behind the page: the opened project, its catalog, and pictures. It is reopened when a file of the project changes."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import threading
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.catalog import dicts, open_catalog, read_tables
from pipeline.commands.query import Limits, first_rows
from pipeline.page.blocks import (
    ROWS_SHOWN,
    Texts,
    block_data,
    compare_data,
    errors_as_text,
    exported,
    last_ended,
    listing_data,
    neighbours,
    overview,
    pages_of,
    run_colours,
    told,
)
from pipeline.project.config import Overrides
from pipeline.project.project import Project
from pipeline.project.runs import find_runs
from pipeline.queue import Queue
from pipeline.store.lock import texts_lock
from stages.pipelines import Cards, Editor, Folder, load

if TYPE_CHECKING:
    import duckdb

LIMITS = Limits(60.0, 2.0)  # of a query on the page
LONGEST = (160, 384, 2048)  # pixels: sizes in which a picture is shown


class LeadsOut(ValueError):  # noqa: N818  (of a picture, not of the program)
    """A link from a folder that is shown to a place that is not."""


class Site:
    def __init__(self, path: str | Path, overrides: Overrides = ()) -> None:
        self.path, self.overrides = Path(path), overrides
        self.seen = ""  # what `changes` returned at the last `refresh`
        self.project = Project(self.path, overrides)

    @property
    def name(self) -> str:
        return self.project.name

    def changes(self) -> str:
        return changes(self.path)

    def refresh(self) -> None:
        now = self.changes()
        if now != self.seen:
            self.project, self.seen = Project(self.path, self.overrides), now
            self.close()
        else:
            self.project.refresh()  # the user's files may have changed

    def close(self) -> None:
        """It is opened again by the next query."""
        self.__dict__.pop("tables", None)
        if opened := self.__dict__.pop("catalog", None):
            opened.close()

    @functools.cached_property
    def tables(self) -> dict[str, Any]:
        return read_tables(self.project)

    @functools.cached_property
    def catalog(self) -> duckdb.DuckDBPyConnection:
        opened = open_catalog(self.project, tables=self.tables)
        # Each thread has buffers of its own, and the other cores are for training.
        opened.execute("set threads = 1")
        # Else DuckDB keeps up to 512 MB that its queries have freed; 30 MB after the pages of a large project.
        opened.execute("set allocator_bulk_deallocation_flush_threshold = '1MB'")
        return opened

    def query(self, sql: str, most: int | None = None, **values: Any) -> list[dict[str, Any]]:
        return dicts(self.catalog, sql, most, **values)

    def titles(self) -> dict[str, str]:
        own = {name: page.title for name, page in pages_of(self.project).items()}
        found = {"overview": "Home", **own, "settings": "Settings", "sql": "SQL"}
        if "training" in own:
            titles = list(found.items())
            titles.insert(list(found).index("samples" if "samples" in own else "training") + 1, ("compare", "Compare"))
            found = dict(titles)
        return found

    def data(self, name: str, chosen: Mapping[str, str]) -> dict[str, Any]:
        """The variables of the template of a page. `chosen`: the parameters of its address. Raises KeyError."""
        if name == "overview":
            return {"overview": overview(self.project, self.query)}
        if name == "sql":
            return {"sql": self.described(), "panels": self.project.pipeline.panels}
        if name == "compare":
            return {"compare": compare_data(self.project, self.query, chosen)}
        blocks, colours = pages_of(self.project)[name].blocks, run_colours(find_runs(self.project))
        return {"blocks": [block_data(self.query, block, chosen, self.project, colours) for block in blocks]}

    def answer(self, sql: str, lock: threading.Lock, cancelled: threading.Event | None = None) -> dict[str, Any]:
        """The rows or the "error" of a query, which ends once `cancelled` is set. `lock` is held while the tables are read, not
        while it asks, with a connection of its own: pages are answered meanwhile.
        """
        found: dict[str, Any] = {"text": sql}
        if sql.strip():
            with errors_as_text(found):
                with lock:
                    self.refresh()
                    project, tables = self.project, self.tables
                found |= listing_data(*first_rows(project, sql, ROWS_SHOWN, LIMITS, cancelled, tables))
        return found

    def described(self) -> dict[str, Any]:
        """What can be queried."""
        found: dict[str, Any] = {}
        found["tables"] = self.query("select stage, doc from tables")
        found["columns"] = self.query("select stage, name, type, doc from columns")
        found["views"] = [{"name": name, "doc": view.doc} for name, view in self.project.pipeline.views.items()]
        return found

    def progress(self) -> dict[str, Any]:
        """How far the running job is, as `blocks.told`, and which ended last."""
        queue = Queue(self.path)
        with contextlib.suppress(ValueError):
            jobs = queue.jobs()
            return told(queue, jobs) | {"ended": last_ended(jobs)}
        return {}

    def export(self, name: str) -> Path:
        """A file of exports/ or of a folder in it. ValueError if there is none of that name."""
        if path := exported(self.path, "exports").get(name):
            return path
        raise ValueError(f"no file {name}")

    def rates(self) -> dict[str, float]:
        """How often per epoch inputs are trained on that the user has set apart, by key."""
        described = self.project.pipeline.detail
        section, *names = described.rate.split(".") if described else [""]
        found: Any = self.project.config.sections.get(section)
        for name in names:
            found = getattr(found, name, None)
        return dict(found or {})

    def detail(self, key: str, chosen: Mapping[str, str]) -> dict[str, Any] | None:
        """None if there is no such input, or if the pipeline has no page about one. `chosen`: of the cards it is among."""
        from pipeline.commands.follow import follow

        described = self.project.pipeline.detail
        if not described or not (found := self.query(described.sql, text=key)):
            return None
        boxes = self.query(described.boxes, text=key) if described.boxes else []
        masks = []
        for row in self.query(described.masks, text=key) if described.masks else []:
            picture: bytes = load(described.draw_mask)(row["columns"], row["values"])
            masks.append((row["label"], f"data:image/webp;base64,{base64.b64encode(picture).decode()}"))
        try:
            lines = list(follow(self.project, key, self.query))
        except ValueError as error:
            lines = [str(error)]
        card: dict[str, Any] = {}
        texts: list[dict[str, Any]] = []
        with errors_as_text({}):  # a table is not built yet
            if described.cards:
                (cards,) = (each for each in pages_of(self.project)[described.cards].blocks if isinstance(each, Cards))
                card = neighbours(self.query, cards, chosen, key)
            if described.texts:
                texts = self.texts(described.texts).rows("select * from shown where picture = $of", of=found[0]["picture"])
        about = {"boxes": boxes, "masks": masks, "lines": lines, "card": card, "texts": texts, "editor": described.texts}
        return {"name": key, **found[0], **about, "rate": described.rate, "times": self.rates().get(key)}

    def file(self, name: str) -> Path:
        """The file of "RESOURCE/PATH" (the user's) or "TABLE/RECIPE/PATH" (a stage's). ValueError if it leads elsewhere."""
        source, _, rest = name.partition("/")
        root = None
        if isinstance(self.project.pipeline.resources.get(source), Folder):
            root = Path(self.project.resource(source)).resolve()
        elif source in self.project.pipeline.stages or source in self.project.pipeline.tables:
            recipe, _, rest = rest.partition("/")
            tables = (self.path / "tables" / source).resolve()
            artifacts = (tables / recipe / "artifacts").resolve()
            # RECIPE may not be "..", nor a link that leads elsewhere.
            root = artifacts if artifacts.parent.parent == tables else None
        if root and rest and "\0" not in rest:
            path = (root / rest).resolve()
            if path.is_relative_to(root) and path.is_file():
                return path
            if not path.is_relative_to(root) and not rest.startswith("/") and ".." not in Path(rest).parts:
                raise LeadsOut(f"no picture {name}: a link leads out of its folder")
        raise ValueError(f"no picture {name}")

    def picture(self, name: str, longest: int) -> bytes:
        """WebP bytes, the longer side at most `longest` pixels."""
        path, pipeline = self.file(name), self.project.pipeline
        section, _, key = pipeline.background.partition(".")
        background = getattr(self.project.config.sections[section], key) if section else ""
        made = _thumbnail if longest < LONGEST[-1] else _thumbnail.__wrapped__  # a large one is shown once, and has up to 1 MB
        return made(pipeline.thumbnail, path, path.stat().st_mtime_ns, longest, background)

    def texts(self, page: str) -> Texts:
        found = pages_of(self.project).get(page)
        editors = [block for block in found.blocks if isinstance(block, Editor)] if found else []
        if not editors:
            raise ValueError(f"there is nothing to edit on the page {page!r}")
        return Texts(self.project, self.query, editors[0])

    def edit(self, page: str, edits: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Write edits {key: {"before": seen, "text": new or None to undo}}; returns the present texts of those in conflict."""
        with texts_lock(self.path):
            texts = self.texts(page)
            shown = texts.of_keys(list(edits))
            for key, change in edits.items():
                if key not in shown:
                    raise ValueError(f"there is no text {key[:80]!r}")
                if not isinstance(change, dict) or not isinstance(change.get("text"), str | None) or "before" not in change:
                    raise ValueError('an edit must be {"before": text, "text": text or null}')
            # Browsers and the file of edits keep a text without blanks at its ends and with plain newlines.
            conflicts = {key: shown[key] for key, change in edits.items() if _plain(change["before"]) != _plain(shown[key])}
            good = {key: change["text"] for key, change in edits.items() if key not in conflicts}
            if good:
                load(texts.block.write)(self.path, good)
            return conflicts

    def replace(self, page: str, find: str, by: str) -> dict[str, dict[str, Any]]:
        """Replace in all texts of a page. Returns the edits: {key: {"before", "text", "edited": there was one before}}."""
        if not find:
            raise ValueError("write the text to replace into the field Find")
        with texts_lock(self.path):
            texts = self.texts(page)
            edits = texts.replaced(find, by)
            if edits:
                load(texts.block.write)(self.path, {key: change["text"] for key, change in edits.items()})
            return edits

    def write_files(self, page: str, undo: bool) -> tuple[str, str]:
        """Write a page's edits into the user's files, or undo it; returns a sentence for the user and the stage to run next."""
        block = self.texts(page).block
        if not block.write_files:
            raise ValueError(f"the edits of the page {page!r} have no files")
        stage = self.project.stage(block.stage)
        with texts_lock(self.path):
            return load(block.undo_files if undo else block.write_files)(self.project.open(stage.name)), stage.name

    def update(self, stage: str) -> str:
        """Run a stage, in a project of its own, so that pages are answered meanwhile. Returns "" or why it did not run."""
        from pipeline import runner
        from pipeline.terminal import Quiet

        try:
            runner.run(Project(self.path, self.overrides), stage, Quiet(stage))
        except ValueError as error:
            return f". The table {stage} is not up to date: {error}"
        return ""


def changes(project: Path) -> str:
    """A hash that differs once a stage writes rows, starts or ends, or a setting or caption is edited."""
    # A folder, such as _versions, changes when a file in it appears.
    tables = ("tables/*/*/*.json", "tables/*/*/rows.lance/_versions", "tables/*/*/lock")
    patterns = ("*.toml", "*.jsonl", "queue/jobs.json", "exports", *tables)
    digest = hashlib.sha256()
    # Path.glob raises if a folder is deleted meanwhile, as temporary ones are.
    for path in sorted(path for pattern in patterns for path in glob(pattern, root_dir=project)):  # noqa: PTH207
        with contextlib.suppress(OSError):  # deleted meanwhile
            stat = (project / path).stat()
            digest.update(f"{path}{stat.st_mtime_ns}{stat.st_size}\n".encode())
    return digest.hexdigest()[:16]


def _plain(text: Any) -> Any:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip() if isinstance(text, str) else text


# `changed` is the file's time of change: a key of the cache only.
@functools.lru_cache(maxsize=256)  # as a page shows; the browser keeps them too
def _thumbnail(function: str, path: Path, changed: int, longest: int, background: str) -> bytes:
    content: bytes = load(function)(path, longest, background)
    return content
