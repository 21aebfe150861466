"""Generated hostile files, read by a process of its own: one line, no crash, no hang, little memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 10  # that reading one input may take
HANG = 500  # seconds for an honest file, with which the libraries are imported
FACTOR = 2  # times the memory of the honest files that an input may take

# Reads inputs and prints, for each, its peak memory so far in MB and what happened. A traceback or a crash ends it.
CHILD = r"""
import resource, sys
from pathlib import Path
import stages
from stages.text_to_image.families import family
from stages.models.text.encoder import TextEncoder
from stages.text_to_image.caption_files import read_metadata
from stages.text_to_image.imaging.decode import open_image
from pipeline.cli import one_line
from pipeline.project import config
TINY = family("tiny")
WEIGHTS = Path(sys.argv[1])
READ = {
    "transformer": lambda at: TINY.architecture.load_transformer(at, TINY),
    "vae": lambda at: TINY.architecture.load_autoencoder(at, TINY),
    "text_encoder": lambda at: list(TextEncoder(at, WEIGHTS / "tokenizer", TINY, "float32").encode(["a cat"])),
    "tokenizer": lambda at: list(TextEncoder(WEIGHTS / "text_encoder", at, TINY, "float32").encode(["a cat"])),
    "captions": lambda at: read_metadata(at, ["a.png"]),
    "toml": lambda at: config.load(at / "project.toml"),
    "image": lambda at: open_image(at / "a.png"),
}
for line in sys.stdin:
    kind, at = line.split()
    print("begin", flush=True)
    try:
        READ[kind](Path(at))
        said = "accepted"
    except ValueError as error:
        said = "refused" if "\n" not in str(error) and len(one_line(error)) < 2000 else f"long {str(error)!r}"
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, said, flush=True)
"""

ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 10**9, 2**63, 10**400, 1e308, 1e-308, "x", "", [], [[]], {}, True, "../x", "\ud800", [10**9] * 9
)  # fmt: skip


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, insert or repeat bytes at a few places, most of them near the start."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(made) + 1) if draw.random() < 0.5 else draw.randrange(min(400, len(made)) + 1)
        choice = draw.randrange(4)
        if choice == 0:
            made[at : at + 1] = bytes([draw.randrange(256)])
        elif choice == 1:
            del made[at : at + draw.choice((1, 8, 1000))]
        elif choice == 2:
            made[at:at] = draw.choice((b"[" * 5000, b"\0" * 64, b"\xff" * 9, b'"', b"{", b"9" * 5000, b"-", b","))
        else:
            made[at:at] = made[at : at + draw.choice((1, 16, 256))]
    return bytes(made)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """Replace, delete or double one value somewhere in parsed JSON."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        key: Any = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        made = value.copy()
        choice = draw.randrange(6)
        if choice == 0:
            del made[key]
        elif choice == 1 and isinstance(made, dict):
            made[draw.choice((f"../{key}", "x", ""))] = made[key]
        else:
            made[key] = mutated_json(made[key], draw)
        return made
    if isinstance(value, int | float) and draw.random() < 0.5:
        return draw.choice((value + 1, value - 1, value * 2, -value, value / 2, float(value), str(value), value * 10**6))
    return draw.choice(ODD)


def mutate(file: Path, draw: random.Random) -> None:
    """As JSON, its content or the header of safetensors, with a right or a wrong length before it; or as bytes."""
    data = file.read_bytes()
    if file.suffix == ".safetensors" and draw.random() < 0.7:
        length = int.from_bytes(data[:8], "little")
        text = json.dumps(mutated_json(json.loads(data[8 : 8 + length]), draw)).encode()
        said = len(text) if draw.random() < 0.9 else draw.choice((0, 1, len(text) + 1, 2**40, 2**63))
        file.write_bytes(said.to_bytes(8, "little") + text + data[8 + length :])
    elif file.suffix == ".json" and draw.random() < 0.7:
        file.write_text(json.dumps(mutated_json(json.loads(data), draw)))
    else:
        file.write_bytes(mutated_bytes(data, draw))


@pytest.fixture
def honest(tmp_path: Path, tiny_weights: Path) -> dict[str, Path]:
    """An honest folder of each kind of input."""
    found = {name: tiny_weights / name for name in ("transformer", "vae", "text_encoder", "tokenizer")}
    for name in ("captions", "toml", "image"):
        found[name] = tmp_path / "honest" / name
        found[name].mkdir(parents=True)
    (found["captions"] / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}\n' * 3)
    (found["captions"] / "metadata.csv").write_text('file_name,text\na.png,"a red, round thing"\n')
    material = ROOT / "tests" / "material"
    shutil.copy(material / "project.toml", found["toml"] / "project.toml")
    shutil.copy(min(material.joinpath("images").rglob("*.png")), found["image"] / "a.png")
    return found


class Child:
    """A process that reads one input after another."""

    def __init__(self, weights: Path) -> None:
        words = [sys.executable, "-c", CHILD, str(weights)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(words, cwd=ROOT, text=True, env=environment, **pipes)

    def read(self, kind: str, folder: Path, seconds: float = SECONDS) -> tuple[int, str]:
        """(peak memory in MB, what happened). AssertionError if the process ends or hangs."""
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin and stdout and stderr
        stdin.write(f"{kind} {folder}\n")
        stdin.flush()
        assert stdout.readline() == "begin\n", f"{folder}: {stderr.read()}"
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = stdout.readline()
        timer.cancel()
        assert line, f"{folder}: ended with {self.process.wait()}\n{stderr.read()}"
        peak, said = line.strip().split(" ", 1)
        return int(peak), said


@pytest.mark.slow
@pytest.mark.proof("a generated hostile file is refused in one line: no traceback, crash or hang, at most twice the memory")
def test_a_generated_hostile_file_is_one_line_in_little_memory_and_time(
    honest: dict[str, Path], tmp_path: Path, tiny_weights: Path, cases: Callable[[int, int], int]
) -> None:
    draw, child = random.Random(2026), Child(tiny_weights)
    normal = max(child.read(kind, folder, HANG)[0] for kind, folder in honest.items())
    counts: Counter[str] = Counter()
    for number in range(cases(70, 2100)):
        kind = list(honest)[number % len(honest)]
        folder = tmp_path / f"{number}-{kind}"
        shutil.copytree(honest[kind], folder)
        mutate(draw.choice(sorted(path for path in folder.rglob("*") if path.is_file())), draw)
        peak, said = child.read(kind, folder)
        assert said in ("accepted", "refused"), (folder, said)
        assert peak < FACTOR * normal, (folder, peak, normal)
        counts[said] += 1
        shutil.rmtree(folder)
    child.process.kill()
    print(dict(counts), f"peak {peak} MB, honest {normal} MB")  # noqa: T201
    assert counts["refused"] > counts.total() / 4
