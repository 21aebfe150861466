"""Damage anywhere in a project of either pipeline is harmless, made good, or named in one line: no result is silently other."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.project.project import Project
from tests import projects
from tests.pipeline.forks import NEVER, Forks
from tests.pipeline.sweeps import life
from tests.stages.retrieval import project as small

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]

ROUNDS = {"tiny": 4, "retrieval": 4, "flux3-tiny": 1, "z-image-tiny": 1}  # of 50 damages each; one is a pipeline
INPUT = {"text_to_image": "picture0.png", "retrieval": "words.py"}  # of `follow`
QUERIES = ("count the words", "sort lines", "reverse_paths")
COMMON = {  # what a file is -> patterns below the project's folder
    "manifest": "tables/*/*/manifest.json",
    "checksums": "tables/*/*/checksums.jsonl",
    "rows": "tables/*/*/rows.lance/data/*",
    "versions": "tables/*/*/rows.lance/_versions/*",
    "transactions": "tables/*/*/rows.lance/_transactions/*",
    "lock": "tables/*/*/lock",
    "run": "tables/train/*/run.json",
    "adapter": "tables/train/*/artifacts/adapter*.safetensors",
    "checkpoint": "tables/train/*/artifacts/checkpoints/*/*",
    "hashes": "tables/weights.json",
    "queue": "queue/*",
    "settings": "project.toml",
    "export": "exports/**/*",
}
GROUPS = {
    "text_to_image": COMMON
    | {
        "latents": "tables/latents/*/shards/*",
        "embeddings": "tables/embeddings/*/shards/*",
        "preview": "tables/samples/*/artifacts/images/*",
        "grid": "tables/samples/*/artifacts/grid.png",
        "features": "tables/scores/*/artifacts/*",
        "edits": "captions.edits.jsonl",
        "sidecar": "images/*.txt",
        "image": "images/*.png",
    },
    "retrieval": COMMON
    | {
        "tokens": "tables/tokens/*/shards/*",
        "vectors": "tables/vectors/*/shards/*",
        "words": "tables/index/*/artifacts/words-*.lance/units.lance/*/*",
        "words' indices": "tables/index/*/artifacts/words-*.lance/units.lance/_indices/*/*",
        "pooled": "tables/index/*/artifacts/pooled-*.arrow",
        "source": "code/*/*.py",
    },
}
TENSORS = ("latents", "embeddings", "adapter", "checkpoint", "preview")
# What is computed from these is deleted, so that they are read again.
READ = ("rows", "latents", "embeddings", "tokens", "vectors")
COMPUTED = {"text_to_image": ("train", "samples", "scores"), "retrieval": ("train", "vectors", "index", "ranks")}
# The user's own: another content is another wish, and what it gives differs.
OWN = ("settings", "edits", "sidecar", "image", "source")


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(content))


def damage(path: Path, kind: str, draw: random.Random, victim: Path) -> None:
    """`victim`: a file outside of the project, which nothing may change."""
    content, before, at = path.read_bytes(), path.stat(), draw.randrange(path.stat().st_size)
    root = next(each for each in path.parents if (each / "tables").is_dir())
    if kind in ("flip", "rot"):
        flip(path, draw)
    elif kind in CONTENT:
        path.write_bytes(CONTENT[kind](content, at, draw))
    elif kind == "another":  # the content of another file of the project
        others = sorted(each for each in root.rglob("*") if each.is_file() and not each.is_symlink() and each != path)
        path.write_bytes(draw.choice(others).read_bytes())
    else:
        path.unlink()
    if kind == "rot":  # as on a disk that fails
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif kind == "folder":
        path.mkdir()
        (path / "inside").write_bytes(draw.randbytes(9))
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(victim)


CONTENT: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "zero": lambda content, at, draw: content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :],
    "cut": lambda content, at, draw: content[:at],
    "append": lambda content, at, draw: content + draw.randbytes(64),
    "empty": lambda content, at, draw: b"",
    "garbage": lambda content, at, draw: draw.randbytes(len(content)),
}
DAMAGE = ("flip", "zero", "cut", "append", "delete", "rot", "empty", "garbage", "another", "folder", "FIFO", "link")


# What runs in a fork


def results(path: str, pipeline: str, whole: bool) -> dict[str, str]:
    """Digests of what a user came for: adapters, previews and an export, or answers; `whole`: and of all tables."""
    found: dict[str, str] = {}

    def keep(name: str, make: Callable[[], object]) -> None:
        try:
            found[name] = hashlib.sha256(repr(make()).encode()).hexdigest()[:12]
        except ValueError as error:
            assert "\n" not in str(error) and str(error), error
            found[name] = f"error: {error}"

    folder = Path(path)
    for name, make in (_images if pipeline == "text_to_image" else _answers)(folder):
        keep(name, make)
    for name in Project(folder).stage_names if whole else ():
        keep(f"table {name}", lambda name=name: life.compared(folder, name).to_pylist())
    return found


def _images(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    from pipeline.commands.text_to_image.export import export_run

    yield "export", lambda: export_run(Project(folder), folder.with_name("out"), "diffusers", dtype="float32").read_bytes()
    yield "losses", lambda: projects.content(folder, "train").select(["step", "loss"]).to_pylist()
    yield "scores", lambda: life.compared(folder, "scores").to_pylist()
    for path in sorted(folder.glob("tables/samples/*/artifacts/images/*.png")):
        if path.is_file():
            yield path.name, path.read_bytes


def _answers(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    def answer(query: str) -> str:
        code, out, err = projects.said("search", query, "--project", str(folder))
        if code:
            raise ValueError(err.strip().splitlines()[-1].removeprefix("error: "))
        return out

    for query in QUERIES:
        yield query, functools.partial(answer, query)
    yield "ranks", lambda: life.compared(folder, "ranks").to_pylist()


def use(path: str, pipeline: str, group: str, expected: dict[str, str]) -> str:
    """Use a project with one damaged file in every way. Return what became of the damage, or raise AssertionError."""
    said: list[str] = []

    def run(*words: str) -> int:
        code, out, err = projects.said(*words, "--project", path)
        assert not any(each in out + err for each in NEVER), f"{words}: {(out + err)[-1500:]}"
        if code == 2:
            assert sum(line.startswith(("error: ", "Error: ")) for line in err.splitlines()) == 1, f"{words}: {err[-1500:]}"
            said.extend(err.splitlines()[-1:])
        return code

    def build() -> bool:
        """Whether all stages ran; with settings that were cut, which may ask for a long training, only the first."""
        try:
            projects.build(Path(path), *Project(Path(path)).stage_names[: group == "settings"])
        except ValueError as error:
            assert "\n" not in str(error) and str(error), error
            said.append(f"error: {error}")
            return False
        return True

    def differing(whole: bool) -> dict[str, str]:
        """The results that are neither those of the reference nor an error."""
        now = results(path, pipeline, whole)
        said.extend(value for value in now.values() if value.startswith("error: "))
        return {name: f"{expected.get(name)} -> {value}" for name, value in now.items() if value != expected.get(name)}

    counts = ", ".join(f"(select count(*) from {name.removeprefix('table ')})" for name in expected if name.startswith("table "))
    for words in (["status"], ["queue"], ["query", f"select {counts}"], ["follow", INPUT[pipeline]], ["clean", "--dry-run"]):
        run(*words)
    if group in READ:
        build()
    if group not in OWN:
        unlike = differing(whole=False).items()  # a preview is a file that the user opens with other programs
        silent = {name: value for name, value in unlike if "error: " not in value and not name.endswith(".png")}
        assert not silent, f"silent: {silent}"
    named = run("verify") == 1
    left = run("verify", "--repair")
    built = build()
    again = run("verify")
    if group in OWN:
        return "the user's own file"
    different = differing(whole=True)
    if not different and built:
        assert not again, f"verify still finds damage: {again}"
        return "named and made good" if named or said else "harmless or made good"
    assert left or not built, f"differs at the end: {json.dumps(different)}"
    # A preview that was made a link is refused by its name, and is left to the user.
    # A table may lack the rows that the damage cost.
    kept = {name: value for name, value in different.items() if not name.startswith("table ") and "error: " not in value}
    silent = {name: value for name, value in kept.items() if not any(name in each for each in said)}
    assert not silent, f"silent at the end: {silent}; {said}"
    return "named, to be mended by the user"


# The sweep


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, family_name: str, finished: Callable[[str], tuple[Path, dict[str, str]]]
) -> Path:
    """A finished project, with edits, exports and jobs."""
    path = tmp_path_factory.mktemp("reference") / "project"
    if family_name == "retrieval":
        path.mkdir()
        projects.build(small.make(path, small.SPLIT))
    else:
        projects.duplicate(finished(family_name)[0], path)
        (path / "captions.edits.jsonl").write_text("")
    projects.said("export", "--project", str(path))
    for words in (("pause",), ("add", "status")):
        assert projects.said("queue", "--project", str(path), *words)[0] == 0
    return path


@pytest.mark.proof("a damaged file of either pipeline is harmless, made good or named, and no result is silently other")
def test_a_damaged_file_anywhere_is_harmless_made_good_or_named(
    family_name: str,
    seed: int,
    reference: Path,
    forks: Forks,
    tmp_path: Path,
    cases: Callable[[int, int], int],
    request: pytest.FixtureRequest,
):
    pipeline = "retrieval" if family_name == "retrieval" else "text_to_image"
    groups = GROUPS[pipeline]
    drawn = [(group, kind) for group in groups for kind in DAMAGE]
    random.Random(family_name).shuffle(drawn)
    if not request.config.getoption("--prove"):  # test_every_architecture.py damages tensors
        drawn = [(group, "flip") for group in dict.fromkeys(group for group, _ in drawn) if group not in TENSORS]
    count = cases(4, 50)
    expected = forks.call(results, reference, pipeline, True).value
    outcomes, failures = Counter[str](), []
    for number in range(seed * count, (seed + 1) * count):
        group, kind = drawn[number % len(drawn)]
        generator = random.Random(f"{family_name} {number}")
        copy = tmp_path / str(number) / "project"
        shutil.copytree(reference, copy, copy_function=shutil.copy2, symlinks=True)
        victim = copy.with_name("victim")
        victim.write_text("untouched")
        path = generator.choice(sorted(path for path in copy.glob(groups[group]) if path.is_file()))
        if not path.stat().st_size:
            path.write_bytes(b"{")
        damage(path, kind, generator, victim)
        case = f"case {number}: {kind} {family_name} {path.relative_to(copy)}"
        for name in COMPUTED[pipeline] if group in READ else ():
            if not path.is_relative_to(copy / "tables" / name):
                shutil.rmtree(copy / "tables" / name, ignore_errors=True)
        try:
            outcomes[forks.call(use, copy, pipeline, group, expected).value] += 1
            assert victim.read_text() == "untouched", "a file outside of the project was changed"
        except Exception as error:  # noqa: BLE001  (all cases are tried)
            failures.append(f"{case}: {error}")
            logging.warning(failures[-1])
        shutil.rmtree(copy.parent, ignore_errors=True)
    request.node.user_properties.append(("of", dict(outcomes)))
    assert not failures, "\n\n".join(failures)
