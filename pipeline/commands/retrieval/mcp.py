"""`latentmill mcp`: code search for coding agents, over the Model Context Protocol on standard input and output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.commands.retrieval import resident
from pipeline.commands.retrieval.find import LEAST, MODEL, CodeFolder, as_dict, checked, plain
from pipeline.process import version

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

T = TypeVar("T")
INSTRUCTIONS = """\
Searches the code of {folders} by meaning. Ask `search` in a sentence or some words before you grep: it finds functions whose \
names you do not know, in the files as they are now. `related` finds code that resembles a place, `read` shows lines of a file."""
MOST_LINES, MOST_BYTES = 2000, 5_000_000  # lines of an answer of `read`; bytes of a file that it opens
MOST_ANSWERS = 100


@click.command("mcp")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help=MODEL)
def command(folders: tuple[Path, ...], model: Path | None) -> None:
    """Serve code search to coding agents, over the Model Context Protocol on standard input and output. FOLDERS, by
    default the current one, are all that it reads. While it is up, `latentmill find` in one of them asks it.
    """
    try:
        server = make_server(folders or (Path(),), model)
    except ModuleNotFoundError:
        raise ValueError('the server for coding agents needs the package mcp: pip install "latentmill[mcp]"') from None
    server.run("stdio")


def make_server(folders: Sequence[Path], model: Path | None = None) -> MCPServer:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    from stages.retrieval.texts import decode, split_lines

    served = {str(root): CodeFolder(root, model=model) for root in dict.fromkeys(each.resolve() for each in folders)}
    instructions = INSTRUCTIONS.format(folders=", ".join(served))
    worker = ThreadPoolExecutor(1)  # one answer after another: all use one index and one encoder

    async def reply(code: CodeFolder, question: object, begin: Callable[[], None]) -> resident.Row:
        arguments, said = checked(question), list[str]()

        def work() -> list[resident.Row]:
            begin()
            with code.current(said.append):
                return [plain(each) for each in code.search(**arguments)]

        return {"answers": await asyncio.get_running_loop().run_in_executor(worker, work), "said": said}

    replies = {code.project.path: partial(reply, code) for code in served.values()}
    server = MCPServer(
        "latentmill",
        instructions=instructions,
        version=version(),
        log_level="CRITICAL",
        lifespan=lambda server: resident.listening(replies),
    )

    async def answer(work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(worker, work)
        except (ValueError, OSError) as error:
            raise ToolError(str(error)) from None

    async def search(
        query: str, folder: str = "", path: str = "", limit: int = 5, threshold: float = LEAST
    ) -> list[dict[str, Any]]:
        """Find functions, classes and passages of code by what they do.

        query: a sentence or some words, such as "where are retries counted". folder: one of the served folders; may be left
        out if there is one. path: only files whose path in the folder matches, such as "src/*.py". limit: answers at most.
        threshold: least match of an answer, 0 to 1; an empty answer says that nothing resembles the query.
        """

        def work() -> list[dict[str, Any]]:
            if folder or len(served) > 1:
                code = served.get(str(Path(folder).expanduser().resolve())) if folder else None
            else:
                [code] = served.values()
            if code is None:
                raise ValueError(f"folder must be one of {', '.join(served)}, got {folder!r}")
            with code.current():
                answers = code.search(query, within(limit), [path] if path else (), threshold=threshold)
                return [as_dict(plain(each)) for each in answers]

        return await answer(work)

    async def related(path: str, line: int, limit: int = 5) -> list[dict[str, Any]]:
        """Find code that resembles the function at a line of a file. path: as `search` names it. line: from 1."""

        def work() -> list[dict[str, Any]]:
            file, code = locate(path, served.values())
            with code.current():
                place = code.searcher.place_at(file, line)
                if place is None:
                    raise ValueError(f"{path} has no function at line {line}")
                return [as_dict(plain(each)) for each in code.searcher.related(place, within(limit))]

        return await answer(work)

    async def read(path: str, first_line: int = 1, last_line: int = 200) -> str:
        """Show lines of a file of the served folders, each with its number. path: as `search` names it."""

        def work() -> str:
            file, _ = locate(path, served.values())
            if not 1 <= first_line <= last_line < first_line + MOST_LINES:
                raise ValueError(f"first_line and last_line must be at least 1, in order, and at most {MOST_LINES} lines")
            if file.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path} has more than {MOST_BYTES // 1_000_000} MB")
            lines = split_lines(decode(file.read_bytes()))[first_line - 1 : last_line]
            return "\n".join(f"{number}\t{text}" for number, text in enumerate(lines, first_line))

        return await answer(work)

    async def status() -> list[dict[str, Any]]:
        """List the served folders, with the numbers of files and functions that a search covers now."""

        def work() -> list[dict[str, Any]]:
            rows = []
            for name, code in served.items():
                with code.current():
                    found = code.searcher.rows
                    rows.append({"folder": name, "files": len(found["path"].unique()), "functions": len(found)})
            return rows

        return await answer(work)

    for tool in (search, related, read, status):
        server.add_tool(tool)
    return server


def within(limit: int) -> int:
    if not 1 <= limit <= MOST_ANSWERS:
        raise ValueError(f"limit must be from 1 to {MOST_ANSWERS}, got {limit}")
    return limit


def locate(path: str, served: Collection[CodeFolder]) -> tuple[Path, CodeFolder]:
    """The file, and the served folder that it lies in. Raises ValueError if it lies in none; a link counts as where it leads."""
    for code in served if "\0" not in path else ():
        for file in (code.root / path, Path(path)):
            found = file.resolve()
            if found.is_relative_to(code.root) and found.is_file():
                return found, code
    raise ValueError(f"{path!r} is no file in {', '.join(str(code.root) for code in served)}")
