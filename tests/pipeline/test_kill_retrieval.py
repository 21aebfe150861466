"""Every stage of the pipeline retrieval is killed again and again; table, adapter and index equal those of an unbroken run."""

import functools
import json
import shutil
import wsgiref
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.project.project import Project
from stages.retrieval import PIPELINE
from stages.retrieval.index import in_order, numbers
from stages.retrieval.search.lexical import LexicalIndex
from tests import projects
from tests.pipeline.kill_loop import rebuild_under_kills
from tests.pipeline.killing import count_syncs
from tests.stages.retrieval import project as small

STAGE_NAMES = tuple(PIPELINE.stages)
ORDER = ("train", "index", "units", "vectors", *STAGE_NAMES)  # in `make test`, the first three
BATCHES = "".join(
    f"\n[{name}]\nbatch_size = 16\n" for name in ("units", "negatives", "vectors", "index", "ranks")
)  # several commits for each stage


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """A finished project over two real packages, and how often each stage called fsync when it ran in a new process."""
    place = tmp_path_factory.mktemp("retrieval")
    for package in (json, wsgiref):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, place / "code" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    folder = place / "project"
    folder.mkdir()
    settings = small.SPLIT.replace('split = "unit"', 'split = "unit"\nbatch_size = 16').replace("hard = true", "batch_size = 16")
    roots = f'\n[sources]\nroots = ["{place / "code"}"]\nbatch_size = 4\n'
    (folder / "project.toml").write_text(small.CONFIG + settings + roots + BATCHES)
    return folder, {
        name: count_syncs(functools.partial(projects.latentmill, folder, "run", name, "--only")) for name in STAGE_NAMES
    }


@pytest.mark.slow
@pytest.mark.proof("a stage of the pipeline retrieval that is killed ends where an unbroken run ends")
def test_a_stage_of_retrieval_killed_before_any_fsync_ends_where_an_unbroken_run_ends(
    unbroken: tuple[Path, dict[str, int]], tmp_path: Path, cases: Callable[[int, int], int]
):
    reference, syncs = unbroken
    for stage_name in list(dict.fromkeys(ORDER))[: cases(3, len(STAGE_NAMES))]:
        assert syncs[stage_name] > 3
        assert bool(artifacts(reference, stage_name)) == (stage_name in ("train", "index"))
        folder = tmp_path / stage_name / "project"
        shutil.copytree(reference, folder, copy_function=shutil.copy2, symlinks=True)
        rebuild_under_kills(folder, stage_name, syncs[stage_name], cases(1, 10))
        assert projects.content(folder, stage_name) == projects.content(reference, stage_name)
        assert artifacts(folder, stage_name) == artifacts(reference, stage_name)


def artifacts(folder: Path, stage_name: str) -> dict[str, object]:
    """What the artifacts of a stage hold, by name: the bytes of an adapter or a matrix, the scores of a full-text index."""
    table = Project(folder).current(stage_name)
    found: dict[str, object] = {}
    for path in sorted((table.folder / "artifacts").glob("*")):
        if path.suffix in (".safetensors", ".arrow"):
            found[path.name] = path.read_bytes()
        elif path.suffix == ".lance":
            rows = in_order(table.rows())
            index = LexicalIndex(path, rows.num_rows, numbers(rows))
            found[path.name] = [index.scores(query).tolist() for query in ("parse a header", "json decoder", "utc time")]
    return found
