"""The web application behind `latentmill view`: pages, pictures, edits, and a text that changes when the project does.

It serves this machine alone. A request whose Host is not local is refused, and so is one that another site's page makes. An
edit needs the token that the page itself holds.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Route

from pipeline.errors import one_line
from pipeline.page import ADDED
from pipeline.page.actions import ACTIONS
from pipeline.page.door import Behind, Door
from pipeline.page.settings import answer_form
from pipeline.page.site import LONGEST, LeadsOut, Site
from stages.pipelines import Folder
from stages.untrusted import parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

HERE = Path(__file__).parent
HOSTS = ("127.0.0.1", "localhost", "[::1]")
LOOK_SECONDS = 0.3  # between two looks whether the reader of a query is still there
MOST_BYTES = 4_000_000  # of a request's body
MOST_FIELDS = 2000  # of a form
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h
NO_TOKEN = "an edit needs the token of this page: load it again"
EVENT_SECONDS = 0.5  # between two looks whether something has changed
ALIVE_SECONDS = 15.0
DAMAGED = (  # shown for a file that is no picture
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 90"><path d="M20 20 L70 70 M70 20 L20 70" stroke="#999" '
    'stroke-width="4"/></svg>'
)
LEADS_OUT = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 240 160" fill="#888" font-family="sans-serif" font-size="15">'
    '<text x="12" y="60">A link out of the folder:</text><text x="12" y="84">it is trained as it is, but</text>'
    '<text x="12" y="108">the page shows no other folder.</text></svg>'
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, the browser does not say that a form is of this page
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """ASGI middleware that refuses requests which the local page did not send, and adds HEADERS to the answers."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], scheme: str) -> None:
        self.app, self.hosts, self.scheme = app, hosts, scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := refused(headers, self.hosts, self.scheme):
            await PlainTextResponse(refusal[1], refusal[0])(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await self.app(scope, receive, send_with_headers)


def refused(headers: dict[str, str], hosts: Sequence[str], scheme: str) -> tuple[int, str] | None:
    """(status, reason), or None. The keys of `headers` are in lower case."""
    host = headers.get("host", "")
    # A site whose name was rebound to 127.0.0.1 sends its own name.
    if host.rpartition(":")[0] not in hosts and host not in hosts:
        return 403, f"this page answers to its own address alone: open {scheme}://{hosts[0]}"
    origin = headers.get("origin", f"{scheme}://{host}")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or origin != f"{scheme}://{host}":
        return 403, "a page of another site may not use this one"
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        return 413, f"at most {MOST_BYTES} bytes"
    return None


def templates() -> Environment:
    made = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.globals["addresses"] = addresses
    return made


def addresses(cell: list[tuple[int, str]], picture: Callable[[str], str]) -> str:
    """The addresses of a cell's pictures (step, name) as JSON: [common beginning, [step, rest], ...]."""
    found = [(step, picture(name)) for step, name in cell]
    folder = found[0][1].rpartition("/")[0]
    common = folder if all(address.startswith(folder) for _, address in found) else ""
    return json.dumps([common, *((step, address[len(common) :]) for step, address in found)], separators=(",", ":"))


def make_app(site: Site, token: str = "", hosts: Sequence[str] = HOSTS, door: Door | None = None) -> Starlette:
    return guarded(ProjectAnswers(site, token or secrets.token_urlsafe(24)).routes(), hosts, door)


def guarded(routes: Sequence[BaseRoute], hosts: Sequence[str], door: Door | None) -> Starlette:
    """With a door, over TLS."""
    middleware = [Middleware(Guard, hosts=hosts, scheme="https" if door else "http")]
    middleware += [Middleware(Behind, door=door)] if door else []
    return Starlette(routes=routes, middleware=middleware)


def spare_memory() -> None:
    """Load what the first page needs, by the choices of SPARING, which are not those of the processes that the page starts. With
    glibc, each thread of Lance, DuckDB and Starlette would keep memory of its own that it has freed, 20 to 30 MB, and blocks of
    less than 32 MB would be kept once one of them was freed, 5 MB.
    """
    import duckdb  # noqa: F401
    import lance  # noqa: F401
    import pyarrow as pa

    import pipeline.commands.rows_of_runs  # noqa: F401

    pa.default_memory_pool()  # chosen now
    for name in ADDED:
        os.environ.pop(name, None)
    if sys.platform.startswith("linux") and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_ARENA_MAX, 2)
        mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def release_memory() -> None:
    """Give back to the system what queries have used and freed: 10 to 40 MB after a page of a large project."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


class Shown(Protocol):
    """What pages are made of: a project, or the projects below a folder."""

    seen: str  # what `changes` returned at the last `refresh`

    @property
    def name(self) -> str: ...
    def refresh(self) -> None: ...
    def changes(self) -> str: ...
    def progress(self) -> dict[str, Any]: ...
    def titles(self) -> dict[str, str]: ...
    def data(self, name: str, chosen: Mapping[str, str]) -> dict[str, Any]: ...


S = TypeVar("S", bound=Shown)


class Answers(Generic[S]):
    """Starlette calls each method in a thread of its own; one thread at a time uses the tables."""

    above = False  # whether there is a page of several projects above this one

    def __init__(self, site: S, token: str) -> None:
        self.site, self.token = site, token
        self.environment = templates()
        self.lock, self.looking = threading.Lock(), threading.Lock()
        self.looked, self.latest = -EVENT_SECONDS, ("", "")

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/", self.shell),
            Route("/static/{name}", static),
            Route("/events", self.events),
            Route("/fragment/{page}", self.fragment),
            Route("/{page}", self.shell),
        ]

    @contextmanager
    def refreshed(self) -> Iterator[S]:
        with self.lock:
            self.site.refresh()
            yield self.site

    def render(self, template: str, **values: Any) -> HTMLResponse:
        text = self.environment.get_template(template).render(**values)
        return HTMLResponse(text, headers={"Cache-Control": "no-store"}, background=BackgroundTask(release_memory))

    def shell(self, request: Request) -> Response:
        with self.refreshed() as site:
            titles, project = site.titles(), site.name
        name = request.path_params.get("page", "overview")
        if name not in titles and name != "one":
            return PlainTextResponse("there is no such page", 404)
        return self.whole(project, titles, name)

    def whole(self, project: str, titles: dict[str, str], page: str, content: str = "") -> HTMLResponse:
        values: dict[str, Any] = {"project": project, "titles": titles, "page": page, "content": content}
        return self.render("shell.html", single=False, token=self.token, above=self.above, **values)

    def known(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())

    async def fragment(self, request: Request) -> Response:
        """The content of a page, for the user's choices in the address. The page "one" is that of the input "key"."""
        name, chosen, cancelled = request.path_params["page"], dict(request.query_params), threading.Event()
        work = asyncio.ensure_future(run_in_threadpool(self._fragment, name, chosen, cancelled))
        while name == "sql" and not work.done():
            await asyncio.wait({work}, timeout=LOOK_SECONDS)
            if not work.done() and await request.is_disconnected():  # the tab was closed: its query ends too
                cancelled.set()
        return await work

    def _fragment(self, name: str, chosen: dict[str, str], cancelled: threading.Event) -> Response:
        with self.refreshed() as site:
            if name == "settings" or name not in site.titles():  # the settings come whole
                return PlainTextResponse("there is no such page", 404)
            data, seen = site.data(name, chosen), site.seen
        return self.filled(name, data, seen)

    def filled(self, name: str, data: dict[str, Any], seen: str) -> Response:
        shown = self.render("fragment.html", page=name, single=False, picture=picture_address, **data)
        shown.headers["X-Seen"] = seen  # the page asks for changes since then
        return shown

    def changing(self, change: Callable[[Any, str, dict[str, Any]], Response]) -> Callable[[Request], Awaitable[Response]]:

        async def answer(request: Request) -> Response:
            if not self.known(request.headers.get("x-token", "")):
                return PlainTextResponse(NO_TOKEN, 403)
            body = await whole_body(request)
            if body is None:
                return PlainTextResponse(f"at most {MOST_BYTES} bytes", 413)
            try:
                asked = parse_json(body, "the body")
                if not isinstance(asked, dict):
                    raise ValueError("the body must be a JSON object")
                return await run_in_threadpool(change, self, request.path_params["page"], asked)
            except (ValueError, OSError) as error:
                return PlainTextResponse(one_line(error)[:300], 400)

        return answer

    def state(self) -> tuple[str, str]:
        """What `events` sends; looked up once for all who listen."""
        with self.looking:
            if time.monotonic() - self.looked >= EVENT_SECONDS:
                self.latest = self.site.changes(), json.dumps(self.site.progress())
                self.looked = time.monotonic()
            return self.latest

    async def events(self, request: Request) -> Response:
        """Server-sent events: "changes" (a hash of what the pages are made of) and "progress" (JSON), each when it differs."""

        async def lines() -> AsyncIterator[str]:
            sent, quiet = ("", ""), 0.0
            while True:
                now = await run_in_threadpool(self.state)
                changed = [(name, new) for name, new, old in zip(("changes", "progress"), now, sent, strict=True) if new != old]
                for name, text in changed:
                    yield f"event: {name}\ndata: {text}\n\n"
                quiet = 0.0 if changed else quiet + EVENT_SECONDS
                if quiet >= ALIVE_SECONDS:
                    yield ": still here\n\n"
                    quiet = 0.0
                sent = now
                await asyncio.sleep(EVENT_SECONDS)

        return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class ProjectAnswers(Answers[Site]):
    def routes(self) -> list[BaseRoute]:
        changes = [Route(f"/{name}/{{page}}", self.changing(change), methods=["POST"]) for name, change in CHANGES.items()]
        files = [Route("/export/{name:path}", self.export), Route("/picture/{name:path}", self.picture)]
        settings = Route("/settings", self.settings, methods=["GET", "POST"])
        return [*files, *changes, settings, *super().routes()]

    def _fragment(self, name: str, chosen: dict[str, str], cancelled: threading.Event) -> Response:
        if name == "one":
            with self.refreshed() as site:
                found, seen = site.detail(chosen.get("key", ""), chosen), site.seen
            if not found:
                return PlainTextResponse("there is no such row", 404)
            shown = self.render("detail.html", one=found, single=False, picture=picture_address)
            shown.headers["X-Seen"] = seen
            return shown
        if name != "sql":
            return super()._fragment(name, chosen, cancelled)
        answered = self.site.answer(chosen.get("sql", ""), self.lock, cancelled)
        with self.refreshed() as site:
            data, seen = site.data(name, chosen), site.seen
        data["sql"] |= answered
        return self.filled(name, data, seen)

    def picture(self, request: Request) -> Response:
        """WebP of the given "size" (the longer side), or with size=file the unchanged PNG that a stage wrote."""
        name, size = request.path_params["name"], request.query_params.get("size", "")
        try:
            path = self.site.file(name)
        except LeadsOut:
            return Response(LEADS_OUT, 404, media_type="image/svg+xml")
        except (ValueError, OSError):
            return PlainTextResponse("there is no such picture", 404)
        # A browser would lay the user's transparent PNG on its own colour, not on that which is trained.
        users = isinstance(self.site.project.pipeline.resources.get(name.partition("/")[0]), Folder)
        if size == "file" and path.suffix.lower() == ".png" and not users:
            return FileResponse(path, media_type="image/png", filename=path.name)
        longest = int(size) if size.isdecimal() and len(size) < 6 and int(size) in LONGEST else LONGEST[-1]
        try:
            content = self.site.picture(name, longest)
        except (ValueError, OSError):
            return Response(DAMAGED, media_type="image/svg+xml")
        return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=60"})

    def export(self, request: Request) -> Response:
        try:
            path = self.site.export(request.path_params["name"])
        except (ValueError, OSError):
            return PlainTextResponse("there is no such file", 404)
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    async def settings(self, request: Request) -> Response:
        """A page of its own, with a form that needs no script."""
        if request.method == "GET":
            return await run_in_threadpool(self._settings, dict(request.query_params), None)
        body = await whole_body(request)
        if body is None:
            return PlainTextResponse(f"at most {MOST_BYTES} bytes", 413)
        try:
            given = dict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS))
        except ValueError as error:
            return PlainTextResponse(one_line(error)[:300], 400)
        if not self.known(given.pop("token", "")):
            return PlainTextResponse(NO_TOKEN, 403)
        return await run_in_threadpool(self._settings, {}, given)

    def _settings(self, chosen: dict[str, str], given: dict[str, str] | None) -> Response:
        # Without the lock: a plan may take a second, and the other pages are answered meanwhile.
        try:
            form = answer_form(self.site.path, self.site.overrides, given, saved=chosen.get("saved", ""))
        except (ValueError, OSError) as error:
            return PlainTextResponse(one_line(error)[:300], 400)
        if form.saved:
            return RedirectResponse(f"settings?saved={form.saved}", 303)
        with self.lock:
            with suppress(ValueError):  # this page can mend it
                self.site.refresh()
            titles, project = self.site.titles(), self.site.name
        content = Markup(self.environment.get_template("settings.html").render(form=form, token=self.token))
        values: dict[str, Any] = {
            "project": project,
            "titles": titles,
            "page": "settings",
            "token": self.token,
            "above": self.above,
        }
        shown = self.render("shell.html", single=False, content=content, **values)
        shown.status_code = form.status
        return shown


async def whole_body(request: Request) -> bytes | None:
    """None if it is too large."""
    # A chunked request has no Content-Length, so Guard did not see its size.
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return body


# What a POST may do, by the first part of its path: change(answers, page, body), the body a JSON object


def _edit(answers: ProjectAnswers, page: str, body: dict[str, Any]) -> Response:
    """Body: {"KEY": {"before": text, "text": text or null}}. Status 409 with the present texts of edits in conflict."""
    with answers.refreshed() as site:
        conflicts = site.edit(page, body)
    return JSONResponse({"conflicts": conflicts}, 409 if conflicts else 200)


def _replace(answers: ProjectAnswers, page: str, body: dict[str, Any]) -> Response:
    if not isinstance(body.get("find"), str) or not isinstance(body.get("by"), str):
        raise ValueError('a replacement must be {"find": text, "by": text}')
    with answers.refreshed() as site:
        return JSONResponse({"edits": site.replace(page, body["find"], body["by"])})


def _write(answers: ProjectAnswers, page: str, body: dict[str, Any]) -> Response:
    """Body: {"undo": false} to write the edits into the user's files, true to take the last writing back."""
    if not isinstance(body.get("undo"), bool):
        raise ValueError('what to write must be {"undo": true or false}')
    with answers.refreshed() as site:
        said, stage = site.write_files(page, body["undo"])
    # Without the lock: pages are answered while the stage runs.
    return JSONResponse({"said": said + answers.site.update(stage)})


def _do(answers: ProjectAnswers, page: str, body: dict[str, Any]) -> Response:
    """The action of that name, see pipeline/page/actions.py."""
    if page not in ACTIONS:
        raise ValueError(f"there is no action {page[:40]!r}")
    with answers.refreshed() as site:
        return JSONResponse({"said": ACTIONS[page](site, body)})


Change = Callable[[ProjectAnswers, str, dict[str, Any]], Response]
CHANGES: dict[str, Change] = {"edit": _edit, "replace": _replace, "files": _write, "do": _do}


def picture_address(name: str, size: int | str = 384) -> str:
    """`size`: the longer side in pixels, or "file"."""
    from urllib.parse import quote

    return f"picture/{quote(name)}?size={size}"  # pages lie beside it, wherever the project is mounted


def script_of_charts() -> Path:
    """The script that comes with plotly's Python package, so nothing is loaded from elsewhere."""
    import plotly

    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


STATIC = {"page.css": "text/css", "page.js": "text/javascript", "plotly.js": "text/javascript"}


def static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return PlainTextResponse("there is no such file", 404)
    path = script_of_charts() if name == "plotly.js" else HERE / "static" / name
    return FileResponse(
        path, media_type=STATIC[name], headers={"Cache-Control": "max-age=3600" if name == "plotly.js" else "no-cache"}
    )
