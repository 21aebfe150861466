"""The state behind the page: the opened project, its catalog, and pictures. It is reopened when a file of the project changes."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.page.blocks import block_data, overview
from pipeline.page.catalog import Catalog
from pipeline.page.pages import pages_of
from pipeline.page.texts import Texts
from pipeline.project.config import Overrides
from pipeline.project.project import Project
from pipeline.store.lock import texts_lock
from stages.page import Detail, Editor
from stages.pipelines import Folder, load

LONGEST = (160, 384, 2048)  # pixels: sizes in which a picture is shown


class Site:
    """The data behind the local web page of the project in the folder `path`. `overrides` replace settings of
    project.toml: texts such as "train.steps=500", or a dict. Call `refresh` to see changes on disk.
    """

    def __init__(self, path: str | Path, overrides: Overrides = ()) -> None:
        self.path, self.overrides = Path(path), overrides
        self._seen = ""
        self._project = Project(self.path, overrides)
        self._catalog: Catalog | None = None

    @property
    def seen(self) -> str:
        """The hash of the project's state at the last `refresh`, 16 hex digits. It is "" before the first `refresh`."""
        return self._seen

    def changes(self) -> str:
        """Return a hash of the project's state, 16 hex digits. It changes if a stage writes rows, starts or ends, or if
        a setting or a caption is edited.
        """
        patterns = ("*.toml", "*.jsonl", "tables/*/*/*.json", "tables/*/*/rows.lance/_versions/*", "tables/*/*/lock")
        digest = hashlib.sha256()
        for path in sorted(path for pattern in patterns for path in self.path.glob(pattern)):
            with contextlib.suppress(OSError):  # deleted meanwhile
                stat = path.stat()
                digest.update(f"{path}{stat.st_mtime_ns}{stat.st_size}\n".encode())
        return digest.hexdigest()[:16]

    def refresh(self) -> None:
        """Open the project and its tables again if anything has changed."""
        now = self.changes()
        if now != self._seen:
            self._project = Project(self.path, self.overrides)
            if self._catalog:
                self._catalog.connection.close()
            self._catalog, self._seen = None, now

    @property
    def project(self) -> Project:
        """The opened project."""
        return self._project

    @property
    def catalog(self) -> Catalog:
        """Return an SQL catalog of the project's tables, opened at the first use."""
        if self._catalog is None:
            self._catalog = Catalog(self._project)
        return self._catalog

    def titles(self) -> dict[str, str]:
        """Return a dict from the name of each page of the web site to its title. It includes the pages "overview" and
        "sql".
        """
        own = {name: page.title for name, page in pages_of(self.project).items()}
        return {"overview": "Overview", **own, "sql": "SQL"}

    def data(self, name: str, chosen: Mapping[str, str]) -> dict[str, Any]:
        """Return the data that the template of the page `name` needs, as a dict. `chosen` maps the parameters of the
        page's address to the texts that the user chose. Raises KeyError if there is no such page.
        """
        if name == "overview":
            return {"overview": overview(self.project)}
        if name == "sql":
            return {"sql": self.answer(chosen.get("sql", "")), "panels": self.project.pipeline.panels}
        blocks = pages_of(self.project)[name].blocks
        return {"blocks": [block_data(self.catalog, block, chosen, self.path) for block in blocks]}

    def answer(self, sql: str) -> dict[str, Any]:
        """Run the user's SQL query and return the data of the SQL page as a dict. The rows of the answer are included,
        or a message under "error". "text" is the query itself. "tables", "columns" and "views" list what can be
        queried. If `sql` is blank, no query is run.
        """
        from pipeline.commands.query import answer
        from pipeline.page.blocks import ROWS_SHOWN, listing_data
        from pipeline.page.catalog import errors_as_text

        found: dict[str, Any] = {"text": sql}
        if sql.strip():
            with errors_as_text(found):
                self.refuse_writing(sql)
                rows = answer(self.project, sql)
                found |= listing_data(rows.slice(0, ROWS_SHOWN).to_pylist(), rows.num_rows)
        found["tables"] = self.catalog.rows("select stage, doc from tables")
        found["columns"] = self.catalog.rows("select stage, name, type, doc from columns")
        found["views"] = [{"name": name, "doc": view.doc} for name, view in self.project.pipeline.views.items()]
        return found

    def refuse_writing(self, sql: str) -> None:
        """Raise ValueError if the query `sql` writes, or if it has several statements. A syntax error is not reported
        here.
        """
        import json

        tree = json.loads(self.catalog.connection.execute("select json_serialize_sql($1)", [sql]).fetchall()[0][0])
        if tree.get("error") and tree.get("error_type") == "not implemented":
            raise ValueError("only queries that read are answered here: select ..., with ... select, from ...")
        if len(tree.get("statements", [])) > 1:
            raise ValueError("one query at a time")

    def detail(self, key: str) -> dict[str, Any] | None:
        """Return the data of the page about one input of the project, such as an image, as a dict. `key` is the text
        that identifies the input. Return None if there is no such input, or if the pipeline has no such page.
        """
        from pipeline.commands.follow import chain_of, follow

        described = self.project.pipeline.detail
        found = self.catalog.rows(described.sql, text=key) if described else []
        if not found or not described:
            return None
        boxes = self.catalog.rows(described.boxes, text=key) if described.boxes else []
        try:
            chain_of(self.project)
            lines = list(follow(self.project, key))
        except ValueError as error:
            lines = [str(error)]
        return {"name": key, **found[0], "boxes": boxes, "masks": list(self._masks(described, key)), "lines": lines}

    def _masks(self, described: Detail, key: str) -> Iterator[tuple[str, str]]:
        """Yield (label, picture) for every mask of one input. A picture is a data address: a text such as
        "data:image/webp;base64,..." that a browser shows as an image. `described` says which query finds the masks, and
        which function draws them. `key` is the input's key.
        """
        for row in self.catalog.rows(described.masks, text=key) if described.masks else []:
            picture: bytes = load(described.draw_mask)(row["columns"], row["values"])
            yield row["label"], f"data:image/webp;base64,{base64.b64encode(picture).decode()}"

    def file(self, name: str) -> Path:
        """Return the path of a picture file of the project. `name` says which file. A picture of the user is named
        "RESOURCE/PATH", such as "image_folder/a.png". A picture that a stage wrote is named "TABLE/RECIPE/PATH". Raises
        ValueError if there is no such file, or if PATH leads out of its folder.

        RESOURCE is the name of a `Folder` resource of the pipeline: a folder of the user. RECIPE is the name of a
        folder of the table. After RECIPE, PATH is relative to the folder `artifacts` in this folder.
        """
        source, _, rest = name.partition("/")
        if isinstance(self.project.pipeline.resources.get(source), Folder):
            root = Path(self.project.resource(source))
        elif source in self.project.pipeline.stages or source in self.project.pipeline.tables:
            recipe, _, rest = rest.partition("/")
            tables = (self.path / "tables" / source).resolve()
            root = tables / recipe / "artifacts"
            if root.resolve().parent.parent != tables:
                raise ValueError(f"no picture {name}")
        else:
            raise ValueError(f"no picture {name}")
        path = (root / rest).resolve()
        if not rest or "\0" in rest or not path.is_relative_to(root.resolve()) or not path.is_file():
            raise ValueError(f"no picture {name}")
        return path

    def picture(self, name: str, longest: int) -> bytes:
        """Return a picture of the project as the bytes of a WebP image. `name` says which picture. A picture of the
        user is named "RESOURCE/PATH", such as "image_folder/a.png". A picture that a stage wrote is named
        "TABLE/RECIPE/PATH". `longest` is the largest allowed length of the longer side in pixels. Raises ValueError if
        there is no such picture.
        """
        path = self.file(name)
        return _thumbnail(self.project.pipeline.thumbnail, path, path.stat().st_mtime_ns, longest)

    def texts(self, page: str) -> Texts:
        """Return the texts of the page `page` that the user may edit. Raises ValueError if the page has none."""
        found = pages_of(self.project).get(page)
        editors = [block for block in found.blocks if isinstance(block, Editor)] if found else []
        if not editors:
            raise ValueError(f"there is nothing to edit on the page {page!r}")
        return Texts(self.catalog, editors[0], self.path)

    def edit(self, page: str, edits: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Write the user's edits of texts on the page called `page`. `edits` maps a text's key to an edit, such as
        {"before": "a cat", "text": "a red cat"}. "before" is the text that the user saw. "text" is the new text, or
        None to undo earlier edits. An edit is refused if its text has changed since the user saw it. Return the present
        texts of refused edits, by key. Raises ValueError if the page has no texts to edit, or if an edit is invalid.
        """
        with texts_lock(self.path):
            texts = self.texts(page)
            shown = texts.of_keys(list(edits))
            for key, change in edits.items():
                if key not in shown:
                    raise ValueError(f"there is no text {key[:80]!r}")
                if not isinstance(change, dict) or not isinstance(change.get("text"), str | None) or "before" not in change:
                    raise ValueError('an edit must be {"before": text, "text": text or null}')
            conflicts = {key: shown[key] for key, change in edits.items() if _plain(change["before"]) != _plain(shown[key])}
            good = {key: change["text"] for key, change in edits.items() if key not in conflicts}
            if good:
                load(texts.block.write)(self.path, good)
            return conflicts

    def replace(self, page: str, find: str, by: str) -> dict[str, dict[str, Any]]:
        """Replace the text `find` by the text `by` in all texts of a page. `page` is the page's name. Return the edits
        that were written, as a dict from a text's key to a dict with three entries. "before" is the old text. "text" is
        the new text. "edited" is True if the text had been edited before. Raises ValueError, and writes nothing, if the
        page has no texts to edit, if `find` is empty, or if a text would have no letter left.
        """
        if not find:
            raise ValueError("write the text to replace into the field Find")
        with texts_lock(self.path):
            texts = self.texts(page)
            edits = texts.replaced(find, by)
            if edits:
                load(texts.block.write)(self.path, {key: change["text"] for key, change in edits.items()})
            return edits

    def write_files(self, page: str, undo: bool) -> str:
        """Write the texts that the user edited on the page called `page` into the user's files, such as caption files.
        If `undo` is True, restore instead the files that the last call changed. Then update the table of the page's
        texts. Return a sentence that says what was done. If the table cannot be updated, the sentence also says why.
        Raises ValueError if the page has no texts to edit, if edits of its texts cannot be written into files, or if
        there is nothing to do.
        """
        from pipeline import runner
        from pipeline.terminal import Quiet

        block = self.texts(page).block
        if not block.write_files:
            raise ValueError(f"the edits of the page {page!r} have no files")
        stage = self.project.stage(block.stage)
        with texts_lock(self.path):
            said: str = load(block.undo_files if undo else block.write_files)(self.project.context(stage))
        try:
            runner.run(self.project, block.stage, Quiet(block.stage))
        except ValueError as error:  # the files are written all the same
            said += f". The table {block.stage} is not up to date: {error}"
        return said


def _plain(text: Any) -> Any:
    """Return a text without blanks at its ends, with one newline character per line break. Browsers and the file of
    edits keep texts in this form. A value that is not a text is returned unchanged.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n").strip() if isinstance(text, str) else text


@functools.lru_cache(maxsize=4096)
def _thumbnail(function: str, path: Path, changed: int, longest: int) -> bytes:
    content: bytes = load(function)(path, longest)
    return content
