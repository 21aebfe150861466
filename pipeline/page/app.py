"""The web application behind `latentmill view`: pages, pictures, edits, and a text that changes when the project does.

It serves this machine alone. A request whose Host is not local is refused, and so is one that another site's page makes. An
edit needs the token that the page itself holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipeline.page.site import LONGEST, Site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

HERE = Path(__file__).parent
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MOST_BYTES = 4_000_000  # of a request's body
DAMAGED = (  # shown for a file that is no picture
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 90"><path d="M20 20 L70 70 M70 20 L20 70" stroke="#999" '
    'stroke-width="4"/></svg>'
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """ASGI middleware that refuses requests which the local page did not send. It checks the host name, the site of the
    sender and the size of the body (see `refused`). `app` is the application that answers all other requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to the application, or refuse it. A refusal has status 403 if another host or site sent
        the request. It has status 413 if the body is too large. The parameters are those of an ASGI application.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = refused(headers)
        if refusal:
            await PlainTextResponse(refusal[1], refusal[0])(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await self.app(scope, receive, send_with_headers)


def refused(headers: dict[str, str]) -> tuple[int, str] | None:
    """Return (status, reason) if a request with these headers must be refused, else None. The keys of `headers` are in
    lower case. The status is 403 if the host is not this machine, or if a page of another site sent the request. It is
    413 if the body is larger than `MOST_BYTES`.
    """
    host = headers.get("host", "")
    if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
        return 403, "this page answers on this machine alone: open http://127.0.0.1"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "a page of another site may not use this one"
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        return 403, "a page of another site may not use this one"
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        return 413, f"at most {MOST_BYTES} bytes"
    return None


def templates() -> Environment:
    """Return the environment of the page's templates. Every value is escaped."""
    made = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.globals["addresses"] = addresses
    return made


def addresses(cell: list[tuple[int, str]], picture: Callable[[str], str]) -> str:
    """Return the addresses of some pictures as JSON, in a short form. The form is a list such as ["/a", [10, "/x.png"],
    [20, "/y.png"]]. Its first entry is the beginning of every address, or "". The other entries are pairs: a training
    step, and the rest of the address of its picture. `cell` lists pairs (step, picture's name). `picture` is a function
    that returns the address of a name.
    """
    import json

    found = [(step, picture(name)) for step, name in cell]
    folder = found[0][1].rpartition("/")[0]
    common = folder if all(address.startswith(folder) for _, address in found) else ""
    return json.dumps([common, *((step, address[len(common) :]) for step, address in found)], separators=(",", ":"))


def make_app(site: Site, token: str = "") -> Starlette:
    """Return the web application that shows `site`. Requests that edit a text must send `token` in the header
    `x-token`. If `token` is empty, a random one is used.
    """
    key = token or secrets.token_urlsafe(24)
    environment = templates()

    def render(template: str, **values: Any) -> HTMLResponse:
        return HTMLResponse(environment.get_template(template).render(**values), headers={"Cache-Control": "no-store"})

    async def shell(request: Request) -> Response:
        site.refresh()
        name = request.path_params.get("page", "overview")
        titles = site.titles()
        if name not in titles and name != "one":
            return PlainTextResponse("there is no such page", 404)
        return render("shell.html", project=site.project.name, titles=titles, page=name, token=key, single=False)

    async def fragment(request: Request) -> Response:
        site.refresh()
        name, chosen = request.path_params["page"], dict(request.query_params)
        if name == "one":
            found = site.detail(chosen.get("key", ""))
            return (
                render("detail.html", one=found, picture=picture_address)
                if found
                else PlainTextResponse("there is no such row", 404)
            )
        if name not in site.titles():
            return PlainTextResponse("there is no such page", 404)
        shown = render("fragment.html", page=name, single=False, picture=picture_address, **site.data(name, chosen))
        shown.headers["X-Seen"] = site.seen  # the page asks for changes since then
        return shown

    def changing(change: Callable[[Site, str, bytes], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not secrets.compare_digest(request.headers.get("x-token", "").encode(), key.encode()):
                return PlainTextResponse("an edit needs the token of this page: load it again", 403)
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return PlainTextResponse(f"at most {MOST_BYTES} bytes", 413)
            site.refresh()
            return change(site, request.path_params["page"], body)

        return answer

    def picture(request: Request) -> Response:
        size = request.query_params.get("size", "")
        try:
            if size == "file":
                path = site.file(request.path_params["name"])
                if path.suffix.lower() == ".png":
                    return FileResponse(path, media_type="image/png", filename=path.name)
            longest = int(size) if size.isdecimal() and len(size) < 6 and int(size) in LONGEST else LONGEST[-1]
            site.file(request.path_params["name"])
        except (ValueError, OSError):
            return PlainTextResponse("there is no such picture", 404)
        try:
            content = site.picture(request.path_params["name"], longest)
        except (ValueError, OSError):
            return Response(DAMAGED, media_type="image/svg+xml")
        return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=60"})

    async def changes(request: Request) -> Response:
        return PlainTextResponse(site.changes(), headers={"Cache-Control": "no-store"})

    routes = [
        Route("/", shell),
        Route("/static/{name}", static),
        Route("/changes", changes),
        Route("/picture/{name:path}", picture),
        Route("/fragment/{page}", fragment),
        *(Route(f"/{name}/{{page}}", changing(change), methods=["POST"]) for name, change in CHANGES.items()),
        Route("/{page}", shell),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard)])


def _edited(site: Site, page: str, body: bytes) -> Response:
    """Write the user's edits of texts, and return the response to the browser. `page` is the name of the page. `body`
    is JSON such as {"KEY": {"before": "a cat", "text": "a red cat"}}. An edit is not written if another browser tab has
    changed its text meanwhile. The response is JSON. Its entry "conflicts" has the present texts of these edits, by
    key. The status is 409 if there are conflicts, and 200 if there are none. Invalid edits get status 400.
    """
    import json

    try:
        edits = json.loads(body)
        if not isinstance(edits, dict):
            raise ValueError("the edits must be an object")
        conflicts = site.edit(page, edits)
    except ValueError as error:
        return PlainTextResponse(" ".join(str(error).split())[:300], 400)
    return JSONResponse({"conflicts": conflicts}, 409 if conflicts else 200)


def _replaced(site: Site, page: str, body: bytes) -> Response:
    """Replace a text in all texts of a page, and return the response to the browser. `page` is the name of the page.
    `body` is JSON such as {"find": "cat", "by": "dog"}. The response is JSON. Its entry "edits" has the edits that were
    written, by key. An invalid request gets status 400.
    """
    import json

    try:
        asked = json.loads(body)
        if not isinstance(asked, dict) or not isinstance(asked.get("find"), str) or not isinstance(asked.get("by"), str):
            raise ValueError('a replacement must be {"find": text, "by": text}')
        edits = site.replace(page, asked["find"], asked["by"])
    except ValueError as error:
        return PlainTextResponse(" ".join(str(error).split())[:300], 400)
    return JSONResponse({"edits": edits})


def _written(site: Site, page: str, body: bytes) -> Response:
    """Write the edits of a page into the user's files, or undo the last writing. Return the response to the browser.
    `page` is the name of the page. `body` is JSON: {"undo": false} to write, {"undo": true} to undo. The response is
    JSON. Its entry "said" is a sentence for the user. If there is nothing to do, or if a file fails, the status is 400.
    """
    import json

    try:
        asked = json.loads(body)
        if not isinstance(asked, dict) or not isinstance(asked.get("undo"), bool):
            raise ValueError('what to write must be {"undo": true or false}')
        return JSONResponse({"said": site.write_files(page, asked["undo"])})
    except (ValueError, OSError) as error:
        return PlainTextResponse(" ".join(str(error).split())[:300], 400)


CHANGES = {"edit": _edited, "replace": _replaced, "files": _written}  # what a POST may do, by the first part of its path


def picture_address(name: str, size: int | str = 384) -> str:
    """Return the address of a picture on the local page. `name` is "SOURCE/PATH", such as "samples/a.png". `size` is the
    longer side of the picture that is sent, in pixels, or "file" for the file as it is.
    """
    from urllib.parse import quote

    return f"/picture/{quote(name)}?size={size}"


def script_of_charts() -> Path:
    """Return the path of plotly's script. It is part of plotly's Python package, so nothing is loaded from elsewhere."""
    import plotly

    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


STATIC = {"page.css": "text/css", "page.js": "text/javascript", "plotly.js": "text/javascript"}


def static(request: Request) -> Response:
    """Answer a request for a static file of the page: "page.css", "page.js" or "plotly.js". The file's name is the path
    parameter "name" of `request`. Any other name gets status 404.
    """
    name = request.path_params["name"]
    if name not in STATIC:
        return PlainTextResponse("there is no such file", 404)
    path = script_of_charts() if name == "plotly.js" else HERE / "static" / name
    return FileResponse(
        path, media_type=STATIC[name], headers={"Cache-Control": "max-age=3600" if name == "plotly.js" else "no-cache"}
    )
