"""Damage anywhere in a project is harmless, made good, or named in one line: it never reaches an adapter or a preview."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.api import Project
from pipeline.commands.clean import clean
from pipeline.commands.follow import follow
from pipeline.commands.status import states
from pipeline.commands.text_to_image.export import export_run
from tests import projects
from tests.pipeline.test_kill import artifacts

UPSTREAM = ("images", "captions", "buckets", "latents", "embeddings")
SAMPLED = ("train", "samples")
SMALL = (
    ('"a red thing"', '"a"'),
    ("[64, 96]", "[64]"),
    ("steps = 6", "steps = 4"),
    ("width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1\nbase = false"),
    ("caption_dropout = 0.2", "caption_dropout = 0.2\n\n[train.ema]"),
)
ROUNDS = {"tiny": 10, "flux3-tiny": 2, "z-image-tiny": 2}  # of 50 damages each
GROUPS = {  # what a file is -> patterns below tables/
    "manifest": "*/*/manifest.json",
    "checksums": "*/*/checksums.jsonl",
    "rows": "*/*/rows.lance/data/*",
    "versions": "*/*/rows.lance/_versions/*",
    "transactions": "*/*/rows.lance/_transactions/*",
    "latents": "latents/*/shards/*",
    "embeddings": "embeddings/*/shards/*",
    "adapter": "train/*/artifacts/adapter*.safetensors",
    "checkpoint": "train/*/artifacts/checkpoints/*/*",
    "preview": "samples/*/artifacts/images/*",
    "grid": "samples/*/artifacts/grid.png",
    "features": "scores/*/artifacts/*",
    "hashes": "weights.json",
}
TENSORS = ("latents", "embeddings", "adapter", "checkpoint", "preview")


def flip(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(bytes(content))


def zero(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = generator.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(bytes(content))


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": flip,
    "zero": zero,
    "cut": lambda path, generator: path.write_bytes(path.read_bytes()[: generator.randrange(path.stat().st_size)]),
    "append": lambda path, generator: path.write_bytes(path.read_bytes() + generator.randbytes(64)),
    "delete": lambda path, generator: path.unlink(),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, family_name: str, seeded_weights: Callable[[str], Path]) -> Path:
    weights = seeded_weights(family_name)
    folder = projects.make(tmp_path_factory.mktemp("reference") / "project", weights, images=2, family=family_name)
    for old, new in SMALL:
        projects.edit(folder, old, new)
    projects.build(folder)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    """The bytes of all adapters and previews by name, and of the export."""
    found = {name: content for stage in SAMPLED for name, content in artifacts(folder, stage).items() if content}
    out = export_run(Project(folder), folder / "exports", "diffusers", dtype="float32")
    return found | {"export": out.read_bytes()}


def chain(folder: Path) -> list[str]:
    """Use a project in every way, and return the errors that the user sees. Raises AssertionError for an error that is not
    one line.
    """
    said = []

    def attempt(use: Callable[[], object]) -> None:
        try:
            use()
        except ValueError as error:
            assert "\n" not in str(error) and str(error), error
            said.append(str(error))

    states(Project(folder))  # must not fail at all
    counts = ", ".join(f"(select count(*) from {name})" for name in Project(folder).stage_names)
    attempt(lambda: Project(folder).sql(f"select {counts}"))  # one query, as each reads all rows of all tables
    attempt(lambda: list(follow(Project(folder), "picture0.png")))
    attempt(lambda: list(clean(Project(folder), runs=False, dry_run=True)))
    attempt(lambda: results(folder))
    attempt(lambda: projects.build(folder))
    return said


def check_results(folder: Path, expected: dict[str, bytes], kept: set[str]) -> None:
    """Every adapter, preview and export that is there has the bytes of the reference; those in `kept` are there."""
    found = results(folder)
    assert kept <= found.keys()
    assert {name for name in found if found[name] != expected.get(name)} == set()


@pytest.mark.slow
@pytest.mark.proof("a damaged file is harmless, made good or named, and never reaches a result")
def test_a_damaged_file_anywhere_is_harmless_made_good_or_named(seed: int, reference: Path, tmp_path: Path, cases, capfd):
    expected, generator = results(reference), random.Random(12 + seed)
    published = {"adapter.safetensors", "adapter_ema.safetensors", "export", *(n for n in expected if n.endswith(".png"))}
    drawn = [(group, kind) for group in GROUPS for kind in DAMAGE] * 8
    generator.shuffle(drawn)
    # A flipped bit in every kind of file first, and last in those that test_every_architecture.py damages too.
    drawn = [(group, "flip") for group in sorted(GROUPS, key=lambda group: group in TENSORS)] + drawn
    outcomes: dict[str, int] = {}
    failures: list[str] = []
    for number in range(cases(len(GROUPS) - len(TENSORS), 50)):
        group, kind = drawn[number]
        folder = tmp_path / str(number) / "project"  # the name is in the export
        shutil.copytree(reference, folder, copy_function=shutil.copy2, symlinks=True)
        path = generator.choice(sorted(path for path in (folder / "tables").glob(GROUPS[group]) if path.is_file()))
        DAMAGE[kind](path, generator)
        case = f"case {number}: {kind} {path.relative_to(folder)}"
        used_again = group in ("latents", "embeddings", "rows")
        if used_again:  # what is damaged is read again, not only up to date
            for name in SAMPLED:
                shutil.rmtree(folder / "tables" / name, ignore_errors=path.is_relative_to(folder / "tables" / name))
        try:
            said = chain(folder)
            named = bool(said) or bool(Project(folder).verify())
            if named:
                left = Project(folder).verify(repair=True)
                assert not left, [str(each) for each in left]
                projects.build(folder)
            check_results(folder, expected, published)
            for name in UPSTREAM:
                found, wanted = projects.content(folder, name), projects.content(reference, name)
                columns = [column for column in wanted.column_names if column != "inode"]
                assert found.select(columns) == wanted.select(columns)
        except Exception as error:  # noqa: BLE001  (all cases are tried)
            failures.append(f"{case}: {type(error).__name__}: {error}")
            continue
        outcomes["named" if named else "harmless or made good"] = (
            outcomes.get("named" if named else "harmless or made good", 0) + 1
        )
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)
    assert "panicked" not in capfd.readouterr().err
    assert len(outcomes) == 2, outcomes
