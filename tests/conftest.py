"""What all tests share: the BLAS before MLX, no network, tiny weights, and the two sizes of a test.

A test is fast unless it is marked `slow` or lies in one of SLOW; `pytest -m fast` runs in less than a minute. A test marked
`proof("what it proves")` asks the fixture `cases` how many cases to try: few in `make test`, many under `make prove`
(`pytest -m proof --prove`), which adds a row per test to data/measurements/proofs.jsonl. With `long=True`, it runs there alone.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # that of selenium's trio takes long to import
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the processes that tests start need not compile the code again
os.environ["OMP_NUM_THREADS"] = "1"  # other numbers round differently, and threads wait for each other on a busy machine

import stages  # noqa: F401  (before mlx.core)

gc.disable()  # until the first test: what is imported for thousands of tests is no garbage, and to look for it takes a seventh

ROOT = Path(__file__).parents[1]
FROZEN = pytest.StashKey[int]()  # how many modules were imported when garbage collections last excluded them
PROOFS = ROOT / "data" / "measurements" / "proofs.jsonl"
SLOW = (  # files and folders whose tests train, draw, start processes, or compare with diffusers
    "tests/bench",
    "tests/data",
    "tests/pipeline/commands",
    "tests/pipeline/page/test_app",
    "tests/pipeline/page/test_large",
    "tests/pipeline/store/test_catalog",
    "tests/pipeline/test_",
    "tests/stages/models/flux2",
    "tests/stages/models/test_attention",
    "tests/stages/models/text",
    "tests/stages/retrieval/search",
    "tests/stages/retrieval/test_index",
    "tests/stages/retrieval/test_negatives",
    "tests/stages/retrieval/test_pairs",
    "tests/stages/retrieval/test_ranks",
    "tests/stages/retrieval/test_sources",
    "tests/stages/retrieval/test_units",
    "tests/stages/retrieval/test_vectors",
    "tests/stages/retrieval/train",
    "tests/stages/text_to_image/checks",
    "tests/stages/text_to_image/samples",
    "tests/stages/text_to_image/test_embeddings",
    "tests/stages/text_to_image/test_latents",
    "tests/stages/text_to_image/test_memory",
    "tests/stages/text_to_image/test_scores",
    "tests/stages/text_to_image/train",
    "tests/stages/tuner/adapters",
    "tests/stages/tuner/blockwise",
    "tests/stages/tuner/test_loop",
    "tests/stages/tuner/test_memory",
    "tests/test_end_to_end",
    "tests/test_laws",
    "tests/test_readme",
    "tests/test_toy",
)


# Files in memory take a fifth less CPU in all. Not on small machines, nor where libraries that tests compile could not be loaded.
SHM, ENOUGH = Path("/dev/shm"), 8 << 30
if (
    SHM.is_dir()
    and not os.statvfs(SHM).f_flag & getattr(os, "ST_NOEXEC", 0)
    and min(shutil.disk_usage(SHM).free, psutil.virtual_memory().available) > ENOUGH
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHM))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Some stages set variables for the rest of their process."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def seeded_weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function family -> the folder of its weights, for a family of random weights from a seed."""
    from stages.text_to_image.families import family

    @functools.cache
    def write(name: str) -> Path:
        folder, record = tmp_path_factory.mktemp(name) / "weights", family(name)
        record.architecture.write_random_weights(folder, record, 0)
        return folder

    return write


@pytest.fixture(scope="session")
def tiny_weights(seeded_weights: Callable[[str], Path]) -> Path:
    return seeded_weights("tiny")


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Callable[[Any, Any], Any]:
    """A function (small, full) -> how many cases to try: `small`, or `full` under --prove. The number is recorded."""

    def choose(small: Any, full: Any) -> Any:
        count, most = full if request.config.getoption("--prove") else small, request.config.getoption("--most")
        if most and isinstance(count, int):  # else sizes
            count = max(small, min(count, most))
        request.node.user_properties.append(("cases", count))
        return count

    return choose


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prove", action="store_true", help="run proofs in their full form and record them in data/measurements/proofs.jsonl"
    )
    parser.addoption("--most", type=int, help="under --prove, the most cases that a proof tries, but not fewer than in make test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sweep's rounds, each a family and a seed: one in `make test`; with --prove, `ROUNDS` of its module, by family."""
    if {"family_name", "seed"} <= set(metafunc.fixturenames):
        rounds = metafunc.module.ROUNDS if metafunc.config.getoption("--prove") else {"tiny": 1}
        every = [(name, seed) for name, count in rounds.items() for seed in range(count)]
        metafunc.parametrize(("family_name", "seed"), every, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test fast that is not slow, and leave proofs that are `long` to --prove."""
    if not config.getoption("--prove"):
        items[:] = [item for item in items if not any(mark.kwargs.get("long") for mark in item.iter_markers("proof"))]
    for item in items:
        if not item.get_closest_marker("slow") and not item.nodeid.startswith(SLOW):
            item.add_marker("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude imported modules from later garbage collections: stages collect at their end, which would take 0.3 s each."""
    if len(sys.modules) > item.session.stash.get(FROZEN, 0):
        gc.collect()
        gc.freeze()
        item.session.stash[FROZEN] = len(sys.modules)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add a row to data/measurements/proofs.jsonl after a proof has run in its full form."""
    report = yield
    proof = item.get_closest_marker("proof")
    if proof and report.when == "call" and item.config.getoption("--prove"):
        row = {
            "proof": proof.args[0],
            "test": item.nodeid,
            "cases": None,
            **dict(item.user_properties),
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "date": datetime.date.today().isoformat(),
            "commit": _commit(),
            "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        }
        with PROOFS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return report


def _commit() -> str:
    """With "-dirty" if tracked files differ from it, but for data/measurements/proofs.jsonl; "" without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){PROOFS.relative_to(ROOT)}")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
