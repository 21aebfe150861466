"""`latentmill view --listen`: the page for the own network, behind TLS and a password."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from pipeline.process import strangers_reach
from stages.untrusted import read_utf8

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LEAST_LETTERS = 12
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 100
MOST_WAIT = 60.0  # seconds after a wrong password
FORM_BYTES = 10_000
COOKIE = "__Host-session"  # by its prefix, browsers take it over TLS alone, and from no other host
LOGIN = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<meta name="color-scheme" content="light dark"><title>latentmill</title><main><h1>latentmill</h1>'
    '<p role="alert">{}</p><form method="post" action="/login"><label>Password <input type="password" name="password" '
    'autocomplete="current-password" required autofocus></label> <button>Enter</button></form></main></html>'
)


def address_of(listen: str) -> str:
    """The address to bind. Raises ValueError unless every address of the name is one of an own network."""
    try:
        found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(listen, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise ValueError(f"--listen {listen}: no such address; give this machine's own, such as 192.168.1.20") from None
    for each in found:
        if strangers_reach(each):
            raise ValueError(f"--listen {listen}: must be one address of your own network, such as 192.168.1.20, got {each}")
    return min(found, key=lambda each: (":" in each, each))  # IPv4 before IPv6


def password_of(file: Path) -> str:
    """Raises ValueError for a file that others may read, or a short password."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ValueError(f"--password-file {file}: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"--password-file {file}: others may read it: chmod 600 {file}")
    found = read_utf8(file, 1000).strip()
    if len(found) < LEAST_LETTERS:
        raise ValueError(f"--password-file {file}: the password must have {LEAST_LETTERS} characters or more, got {len(found)}")
    return found


def check_certificate(certificate: Path, key: Path) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"--certificate {certificate}, --key {key}: no PEM files of a certificate and its key: {reason}"
        ) from None


class Door:
    """The password, and who has given it. A wrong one makes all wait, longer each time; who is in stays in."""

    def __init__(self, password: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.salt, self.clock = secrets.token_bytes(16), clock
        self.digest = self._digest(password)
        self.sessions: dict[str, float] = {}  # sha256 of the cookie -> when it ends
        self.failures, self.until = 0, 0.0
        self.turn = threading.Lock()  # one guess at a time

    def _digest(self, password: str) -> bytes:
        return hashlib.scrypt(password.encode(errors="replace"), salt=self.salt, n=2**15, r=8, p=1, maxmem=2**26)

    def enter(self, password: str) -> str:
        """The cookie's value. Raises ValueError for a wrong password, or while none is taken."""
        with self.turn:
            if (wait := self.until - self.clock()) > 0:
                raise ValueError(f"wait {math.ceil(wait)} seconds")
            if not hmac.compare_digest(self._digest(password), self.digest):
                self.failures += 1
                self.until = self.clock() + min(MOST_WAIT, 2.0 ** min(self.failures - 1, 10))
                raise ValueError("wrong password")
            self.failures = 0
            now, cookie = self.clock(), secrets.token_urlsafe(32)
            kept = [(key, ends) for key, ends in self.sessions.items() if ends > now][-MOST_SESSIONS + 1 :]
            self.sessions = {**dict(kept), _sha256(cookie): now + SESSION_SECONDS}
            return cookie

    def knows(self, header: str) -> bool:
        """Whether the header Cookie has the cookie of a session."""
        try:
            cookie = SimpleCookie(header).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self.sessions.get(_sha256(cookie.value), 0.0) > self.clock()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Behind:
    """ASGI middleware: answers nothing but the form to those who have not given the password."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive)
            if self.door.knows(request.headers.get("cookie", "")) and request.url.path != "/login":
                await self.app(scope, receive, send)
            else:
                await (await self._answer(request))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.url.path != "/login" or request.method != "POST":
            return HTMLResponse(LOGIN.format(""), 401, {"Cache-Control": "no-store"})
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > FORM_BYTES:
                return PlainTextResponse(f"at most {FORM_BYTES} bytes", 413)
        given = parse_qs(body.decode(errors="replace"), max_num_fields=5).get("password", [""])[0]
        try:
            cookie = await run_in_threadpool(self.door.enter, given)
        except ValueError as error:
            return HTMLResponse(LOGIN.format(error), 401, {"Cache-Control": "no-store"})
        answer: Response = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, cookie, SESSION_SECONDS, path="/", secure=True, httponly=True, samesite="strict")
        return answer
