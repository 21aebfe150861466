"""An `mcp` process that is up answers `find` too, about the folders that it serves, over a socket that only this user can reach.
A connection holds one question and one answer, both JSON.
"""

# Imports nothing large, since `find` is to be quick.
from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.process import version
from stages.bundled import CHECKOUT
from stages.hashing import text_sha256

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

Row = dict[str, Any]
Reply = Callable[[Any, Callable[[], None]], Awaitable[Row]]  # reply(question, begin), which calls `begin` when it begins to work


def _folder() -> Path:
    # A socket's path has 104 bytes at most on macOS: a cache folder's may be longer.
    try:
        return Path(tempfile.gettempdir()) / f"latentmill-{os.geteuid()}-up"
    except FileNotFoundError:  # no folder can be written to: then there are no sockets
        return Path(os.devnull) / "up"


FOLDER = _folder()
TURN = 2.0  # seconds that a process which is up has to begin; longer, and `find` is as quick by itself
ANSWER = 10.0  # seconds that it then has for the answer; also the most that it waits for a question
LONGEST, LONGEST_ANSWER = 1_000_000, 100_000_000  # bytes


def ask(project: Path, question: Row) -> Row | None:
    """What a process of the same code that serves `project` replies; None if there is none, or if it fails in any way."""
    if not is_private(FOLDER):
        return None
    for path in sorted(FOLDER.glob(f"{name_of(project)}-*")):
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TURN)
            connection.connect(str(path))  # refused at once if the process was killed
            connection.sendall(json.dumps(question).encode() + b"\n")
            begun = connection.recv(1)
            connection.settimeout(ANSWER)
            with connection.makefile("rb") as stream:
                reply: Row = json.loads(begun + stream.read(LONGEST_ANSWER))
            if "error" not in reply:
                return reply
    return None


@asynccontextmanager
async def listening(replies: Mapping[Path, Reply]) -> AsyncIterator[None]:
    """Answer `ask` about these projects within the block; where there can be no socket, `find` does without."""
    import asyncio

    servers: dict[Path, asyncio.Server] = {}
    try:
        with suppress(OSError):
            FOLDER.mkdir(mode=0o700, exist_ok=True)
            if is_private(FOLDER):
                for path in filter(is_left, FOLDER.iterdir()):
                    path.unlink(missing_ok=True)
                for project, reply in replies.items():
                    path = FOLDER / f"{name_of(project)}-{os.getpid()}"
                    servers[path] = await asyncio.start_unix_server(partial(_answer, reply), path, limit=LONGEST)
                    path.chmod(0o600)
        yield
    finally:
        for path, server in servers.items():
            server.close()
            path.unlink(missing_ok=True)


async def _answer(reply: Reply, reader: StreamReader, writer: StreamWriter) -> None:
    import asyncio

    loop = asyncio.get_running_loop()

    def begin() -> None:
        if reader.at_eof():
            raise ConnectionError("who asked has gone")
        loop.call_soon_threadsafe(writer.write, b" ")

    try:
        async with asyncio.timeout(ANSWER):
            question = await reader.readline()
        found = await reply(json.loads(question), begin)
    except Exception as error:  # noqa: BLE001  (anybody's bytes; `find` meets the same error itself, and reports it)
        found = {"error": str(error) or type(error).__name__}
    writer.transport.set_write_buffer_limits(0)
    with suppress(OSError):
        async with asyncio.timeout(ANSWER):
            writer.write(json.dumps(found).encode())
            await writer.drain()
    writer.transport.abort()


def is_private(folder: Path) -> bool:
    """A folder of this user, which others can neither read nor change; no link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def is_left(path: Path) -> bool:
    """By a process that was killed."""
    try:
        os.kill(int(path.name.rpartition("-")[2]), 0)
    except (OSError, ValueError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)
    return False


def name_of(project: Path) -> str:
    """Of the project and of this program: another version's socket has another name."""
    return text_sha256(str(project.resolve()), version(), str(newest_code()))[:16]


def newest_code() -> int:
    """When the newest file of this program was changed, ns: a checkout that is pulled keeps its version."""
    return max(path.stat().st_mtime_ns for name in ("pipeline", "stages") for path in (CHECKOUT / name).rglob("*.py"))
