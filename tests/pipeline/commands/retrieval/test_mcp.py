"""`latentmill mcp` as a coding agent uses it: a process, the official SDK's client, real files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

CODE = {
    "mail.py": "def send_mail(address, text):\n    server = connect(address)\n    server.deliver(text)\n",
    "post.py": "def send_letter(address, text):\n    office = connect(address)\n    office.deliver(text)\n",
    "sums.py": "def add_prices(items):\n    total = sum(item.price for item in items)\n    return total\n",
}
EDITED = "def count_{0}(values):\n    found = [value for value in values if value.is_{0}]\n    return len(found)\n"
BIRDS = ("herons", "owls", "swifts", "wrens", "larks", "terns", "gulls", "crows")
HOSTILE = [
    ("read", {"path": "../secret.py"}, "is no file in"),
    ("read", {"path": "link.txt"}, "is no file in"),
    ("read", {"path": "/etc/passwd"}, "is no file in"),
    ("read", {"path": "sums.py\0.txt"}, "is no file"),
    ("read", {"path": "x" * 10_000}, "too long"),
    ("read", {"path": "sums.py", "first_line": 0}, "first_line and last_line must be"),
    ("read", {"path": "sums.py", "last_line": 10**12}, "first_line and last_line must be"),
    ("search", {"query": "x", "folder": "/"}, "folder must be one of"),
    ("search", {"query": " "}, "must have a word"),
    ("search", {"query": "x", "limit": 10**9}, "limit must be from 1 to 100"),
    ("related", {"path": "mail.py", "line": 99}, "has no function at line 99"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    for name, text in CODE.items():
        (tmp_path / "code" / name).write_text(text)
    (tmp_path / "secret.py").write_text("def password():\n    secret = 'hunter2'\n    return secret\n")
    (tmp_path / "code" / "link.txt").symlink_to(tmp_path / "secret.py")
    return tmp_path / "code"


def talk(folder: Path, work: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]]) -> None:
    """`work` gets a function that calls a tool by its name: what it answers, or "error: " and a line."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    words = ["-m", "pipeline", "mcp", str(folder)]
    env = os.environ | {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    parameters = StdioServerParameters(command=sys.executable, args=words, env=env, cwd=folder)

    async def main() -> None:
        async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
            server = await session.initialize()
            assert "by meaning" in (server.instructions or "") and server.server_info.version
            tools = [tool.name for tool in (await session.list_tools()).tools]
            assert tools == ["search", "related", "read", "status"]

            async def call(name: str, **given: Any) -> Any:
                answer = await session.call_tool(name, given)
                text = "\n".join(part.text for part in answer.content if part.type == "text")
                return f"error: {text}" if answer.is_error else text

            await work(call)

    anyio.run(main)


def paths(answer: str) -> list[str]:
    return [json.loads(each)["path"] for each in answer.replace("}\n{", "}\0{").split("\0")] if answer else []


@pytest.mark.proof("every answer to a coding agent is of the files as they are, and the server's memory stays flat")
def test_an_agent_gets_answers_of_the_files_as_they_are_one_line_for_a_hostile_wish_and_flat_memory(folder, cases):
    async def work(call):
        assert paths(await call("search", query="send a mail"))[0] == "mail.py"
        assert paths(await call("search", query="send a mail", path="s*.py", threshold=0)) == ["sums.py"]
        assert paths(await call("related", path="mail.py", line=2))[0] == "post.py"
        line = "2\t    total = sum(item.price for item in items)"
        assert (await call("read", path="sums.py", first_line=2, last_line=2)).endswith(line)
        assert '"functions": 3' in await call("status")
        for name, given, line in HOSTILE:
            said = await call(name, **given)
            assert said.startswith("error: ") and line in said and "\n" not in said and "hunter2" not in said, (given, said)
        server = psutil.Process().children(recursive=True)[-1]
        resident = []
        for number in range(cases(9, 1000)):
            bird = BIRDS[number % len(BIRDS)]
            if number % 3 == 0:
                (folder / "birds.py").write_text(EDITED.format(bird) + "\n" * number)
                kept = bird
            assert f"count_{kept}" in await call("search", query=f"how many {kept}", limit=1)
            resident.append(server.memory_info().rss)
        assert resident[-1] < 1.1 * resident[len(resident) // 3]

    talk(folder, work)
