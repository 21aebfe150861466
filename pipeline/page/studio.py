"""The page of `latentmill view FOLDER`: the projects below a folder, and each project's own pages below its path."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Router

from pipeline.errors import one_line
from pipeline.page.app import Answers, Guard, ProjectAnswers, picture_address
from pipeline.page.blocks import overview, told
from pipeline.page.site import Site, changes
from pipeline.project.config import FILE
from pipeline.queue import Queue
from stages.settings import from_home

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Row = dict[str, Any]
DEPTH = 2  # folders between the folder of the page and a project, itself included
PROJECTS = "/p"


def projects_below(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Folders with a project.toml, by name. Hidden folders and links are left out, and what is in a project."""
    try:
        found = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in found:
        path = folder / name
        if (path / FILE).is_file():
            yield path
        elif depth > 1 and not name.startswith("."):
            yield from projects_below(path, depth - 1)


class Studio:
    """The projects below a folder. Raises ValueError for a folder that has files, but no project."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = from_home(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder}: no such folder; make it, or name the one that your projects are in")
        if not self.projects() and any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise ValueError(
                f"{self.folder}: no project in it, nor {DEPTH} folders below; name a project, or an empty folder for new ones"
            )
        self.seen = ""
        self._summaries: dict[Path, tuple[str, Row]] = {}  # of the project's present `changes`

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def projects(self) -> dict[str, Path]:
        """By their paths below the folder, as in addresses."""
        return {path.relative_to(self.folder).as_posix(): path for path in projects_below(self.folder)}

    def refresh(self) -> None:
        self.seen = self.changes()

    def changes(self) -> str:
        found = [f"{name} {changes(path)} {sentence(path)}" for name, path in self.projects().items()]
        return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]

    def progress(self) -> Row:
        return {}

    def titles(self) -> dict[str, str]:
        return {"overview": "Projects"}

    def data(self, name: str, chosen: Mapping[str, str]) -> Row:
        return {"projects": [self.summary(name, path) for name, path in self.projects().items()]}

    def summary(self, name: str, path: Path) -> Row:
        now = changes(path)
        if path not in self._summaries or self._summaries[path][0] != now:
            self._summaries[path] = now, summary(path)
        address = f"{PROJECTS[1:]}/{quote(name)}/"
        return self._summaries[path][1] | {"name": name, "address": address, "now": sentence(path)}


def sentence(path: Path) -> str:
    """How far the running job of a project is, or ""."""
    queue = Queue(path)
    try:
        jobs = queue.jobs()
        return told(queue, jobs).get("text", "begins") if any(job.state == "running" for job in jobs) else ""
    except ValueError:  # the summary has it
        return ""


def summary(path: Path) -> Row:
    """A picture's address, and the sentences run, next, lacks, "" each if there is none; or "error", one line."""
    try:
        site = Site(path)
        try:
            found = overview(site.project, site.query)
            lacks = [f"{site.query(sql)[0]['n']} {what}" for what, sql in site.project.pipeline.lacks.items()]
        finally:
            site.close()
    except (ValueError, OSError) as error:
        return {"error": one_line(error)}
    run = next((run for run in found["runs"] if run["current"]), None)
    steps = f"{run['steps']:,}{' of {:,}'.format(run['wanted_steps']) if run['wanted_steps'] else ''} steps" if run else ""
    return {
        "picture": found["pictures"][0]["picture"] if found["pictures"] else "",
        "run": steps,
        "next": "interrupted, with what was saved" if found.get("interrupted") else found["next"],
        "lacks": ", ".join(each for each in lacks if not each.startswith("0 ")),
    } | ({"error": found["error"]} if "error" in found else {})


class StudioAnswers(Answers[Studio]):
    def __init__(self, site: Studio, token: str) -> None:
        super().__init__(site, token)
        self.opened: dict[str, Router] = {}
        self.opening = threading.Lock()

    def routes(self) -> list[BaseRoute]:
        return [Mount(PROJECTS, app=self.project), *super().routes()]

    def filled(self, name: str, data: Row, seen: str) -> Response:
        shown = self.render("studio.html", page=name, picture=picture_address, **data)
        shown.headers["X-Seen"] = seen
        return shown

    async def project(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The pages of the project whose path begins the rest of the address."""
        rest = scope["path"].removeprefix(scope["root_path"]).lstrip("/")
        projects = self.site.projects()
        name = next((name for name in projects if f"{rest}/".startswith(f"{name}/")), "")
        if not name:
            await PlainTextResponse("there is no such project", 404)(scope, receive, send)
            return
        if rest == name:  # the addresses in its pages begin there
            await RedirectResponse(f"{quote(scope['path'])}/")(scope, receive, send)
            return
        try:
            answers = self.routed(name, projects[name])
        except (ValueError, OSError) as error:
            await PlainTextResponse(one_line(error), 400)(scope, receive, send)
            return
        await answers({**scope, "root_path": f"{scope['root_path']}/{name}"}, receive, send)

    def routed(self, name: str, path: Path) -> Router:
        with self.opening:
            if name not in self.opened:
                answers = ProjectAnswers(Site(path), self.token)
                answers.above = True
                self.opened[name] = Router(answers.routes())
            return self.opened[name]


def make_studio(studio: Studio, token: str) -> Starlette:
    return Starlette(routes=StudioAnswers(studio, token).routes(), middleware=[Middleware(Guard)])
