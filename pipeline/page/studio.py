"""The page of `latentmill view FOLDER`: the projects below a folder, and each project's own pages below its path."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router

import stages
from pipeline.errors import one_line
from pipeline.page.app import HOSTS, MOST_BYTES, NO_TOKEN, Answers, ProjectAnswers, guarded, picture_address, whole_body
from pipeline.page.blocks import errors_as_text, overview, told
from pipeline.page.door import Door
from pipeline.page.draft import Draft
from pipeline.page.site import Site, changes
from pipeline.project.config import FILE
from pipeline.project.weights import cache_folder
from pipeline.queue import Queue
from pipeline.store.disk import format_bytes, free_bytes, size_of
from stages.pipelines import load
from stages.settings import from_home

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

Row = dict[str, Any]
DEPTH = 2  # folders between the folder of the page and a project, itself included
PROJECTS = "/p"
KINDS = ("subject", "character", "style", "edit")
NAMES_SHOWN = 12
LONGEST = 200  # characters of a field
PIPELINE = stages.pipeline(next(iter(stages.PIPELINES)))


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
        self.draft = Draft(self.folder)
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
        found = [self.draft.seen]
        found += [f"{name} {changes(path)} {sentence(path)}" for name, path in self.projects().items()]
        return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]

    def progress(self) -> Row:
        return {}

    def titles(self) -> dict[str, str]:
        return {"overview": "Projects", "new": "New project"}

    def data(self, name: str, chosen: Mapping[str, str]) -> Row:
        if name == "new":
            return {
                "draft": self.drafted(),
                "models": self.models(),
                "kinds": KINDS,
                "disk": format_bytes(free_bytes(self.folder)),
            }
        return {"projects": [self.summary(name, path) for name, path in self.projects().items()]}

    def drafted(self) -> Row:
        found: Row = {}
        with errors_as_text(found):
            files, missing = self.draft.files().values(), self.draft.missing()
            size = format_bytes(sum(file.size for file in files))
            found |= {"count": len(files), "size": size, "missing": len(missing), "names": [f.name for f in files][-NAMES_SHOWN:]}
        return found

    @functools.cached_property
    def budget(self) -> int:
        from stages.tuner.blockwise.device import memory_budget

        return memory_budget()

    @functools.cached_property
    def computed(self) -> list[Row]:
        return list(load(PIPELINE.models)(self.budget))

    def models(self) -> list[Row]:
        """With "download": what is left to fetch, and whether the disk has room for it."""
        found = []
        for each in self.computed:
            left = max(0, each["bytes"] - arrived(each["hub"]))
            room = "" if left <= free_bytes(cache_folder(each["hub"])) else ", more than the disk has room for"
            found.append(each | {"download": f"{format_bytes(left)} to download{room}" if left else "is here"})
        return found

    def announce(self, body: Row) -> Row:
        return self.draft.announce(body.get("files"))

    def discard(self, body: Row) -> Row:
        self.draft.discard()
        return {"said": "all files are taken out"}

    def create(self, body: Row) -> Row:
        """Body: name, trigger, preset, family."""
        given = {key: body.get(key, "") for key in ("name", "trigger", "preset", "family")}
        if not all(isinstance(value, str) and value.isprintable() and len(value) <= LONGEST for value in given.values()):
            raise ValueError(f"each field must be one line of at most {LONGEST} characters")
        name = given.pop("name").strip()
        options = {key: value.strip() for key, value in given.items()}
        told = self.draft.create(name, options, load(PIPELINE.fitting)(options, self.budget))
        return {"said": "; ".join(line.strip() for line in told[1:-4]), "go": f"{PROJECTS[1:]}/{quote(name)}/"}

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
            lacks = list(lacking(site))
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
        "lacks": ", ".join(lacks),
    } | ({"error": found["error"]} if "error" in found else {})


def lacking(site: Site) -> Iterator[str]:
    for what, sql in site.project.pipeline.lacks.items():
        with errors_as_text({}):  # its tables are not built yet
            if count := site.query(sql)[0]["n"]:
                yield f"{count} {what}"


class StudioAnswers(Answers[Studio]):
    def __init__(self, site: Studio, token: str) -> None:
        super().__init__(site, token)
        self.opened: dict[str, Router] = {}
        self.opening = threading.Lock()

    def routes(self) -> list[BaseRoute]:
        do = Route("/do/{page}", self.changing(_do), methods=["POST"])
        return [Mount(PROJECTS, app=self.project), do, Route("/part/{key}", self.part, methods=["POST"]), *super().routes()]

    async def part(self, request: Request) -> Response:
        """Bytes of an announced file, from the parameter "at" on."""
        if not self.known(request.headers.get("x-token", "")):
            return PlainTextResponse(NO_TOKEN, 403)
        at, body = request.query_params.get("at", ""), await whole_body(request)
        if body is None or not at.isdecimal() or len(at) > 15:
            return PlainTextResponse(f"a part must say where it begins, and have at most {MOST_BYTES} bytes", 400)
        try:
            have = await run_in_threadpool(self.site.draft.receive, request.path_params["key"], int(at), body)
        except (ValueError, OSError) as error:
            return PlainTextResponse(one_line(error)[:300], 400)
        return JSONResponse({"have": have})

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


def _do(answers: StudioAnswers, page: str, body: Row) -> Response:
    if page not in ("announce", "create", "discard"):
        raise ValueError(f"there is no action {page[:40]!r}")
    return JSONResponse(getattr(answers.site, page)(body))


def arrived(hub: str) -> int:
    """Bytes of a family's weights in the hub's cache."""
    return size_of(cache_folder(hub)) if hub else 0


def make_studio(studio: Studio, token: str, hosts: Sequence[str] = HOSTS, door: Door | None = None) -> Starlette:
    return guarded(StudioAnswers(studio, token).routes(), hosts, door)
