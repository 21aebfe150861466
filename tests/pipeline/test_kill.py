"""Every stage is killed again and again; in the end its table and artifacts equal those of an unbroken run."""

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from pipeline.api import Project as ApiProject
from pipeline.commands.clean import clean
from pipeline.commands.status import state, states
from pipeline.project.project import Project
from stages.retrieval.index import in_order, numbers
from stages.retrieval.search.lexical import LexicalIndex
from tests import projects
from tests.pipeline.killing import KILLED, count_syncs, run_and_kill
from tests.stages.retrieval import project as small

pytestmark = pytest.mark.slow
CLI = "pipeline.cli"
KILLED_STAGES = {
    "text_to_image": ("drawings", "samples", "latents", "images", "captions", "buckets", "embeddings", "train"),
    "retrieval": ("train", "index", "units", "vectors", "sources", "pairs", "tokens", "negatives", "ranks"),
}
FIRST = {"text_to_image": 1, "retrieval": 3}  # stages in `make test`: sweeps/test_kills.py kills all others of text_to_image
KILLS = {"text_to_image": 20, "retrieval": 10}  # of each stage, under --prove
BATCHES = "".join(
    f"\n[{name}]\nbatch_size = 16\n" for name in ("units", "negatives", "vectors", "index", "ranks")
)  # several commits for each stage


def answers(folder: Path) -> list[list[float]]:
    """The scores of a full-text index."""
    table = Project(folder).current("index")
    (path,), rows = table.folder.glob("artifacts/*.lance"), in_order(table.rows())
    index = LexicalIndex(path, rows.num_rows, numbers(rows))
    return [index.scores(query).tolist() for query in ("parse a header", "json decoder", "utc time")]


def make_text_to_image(folder: Path, weights: Path) -> None:
    projects.make(folder, weights, images=5)
    projects.edit(folder, "[buckets]", projects.PROMPTS + "[buckets]")


def make_retrieval(folder: Path, _: Path) -> None:
    """Over a real package."""
    folder.mkdir(parents=True)
    package = Path(str(json.__file__)).parent
    shutil.copytree(package, folder.parent / "code" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = small.SPLIT.replace('split = "unit"', 'split = "unit"\nbatch_size = 16').replace("hard = true", "batch_size = 16")
    roots = f'\n[sources]\nroots = ["{folder.parent / "code"}"]\nbatch_size = 4\n'
    (folder / "project.toml").write_text(small.CONFIG + settings + roots + BATCHES)


MAKE = {"text_to_image": make_text_to_image, "retrieval": make_retrieval}


@pytest.mark.proof("a stage of either pipeline that is killed ends where an unbroken run ends")
@pytest.mark.parametrize("pipeline", MAKE)
def test_a_stage_killed_before_any_fsync_ends_where_an_unbroken_run_ends(
    pipeline: str, tiny_weights: Path, tmp_path: Path, cases: Callable[[int, int], int]
):
    reference, stage_names = tmp_path / "reference" / "project", KILLED_STAGES[pipeline]
    MAKE[pipeline](reference, tiny_weights)
    killed = stage_names[: cases(FIRST[pipeline], len(stage_names))]
    built = [name for name in Project(reference).stage_names if name in stage_names]
    syncs = {
        name: count_syncs(functools.partial(projects.latentmill, reference, "run", name, "--only"))
        for name in built[: 1 + max(map(built.index, killed))]
    }
    for stage_name in killed:
        folder = tmp_path / stage_name / "project"
        shutil.copytree(reference, folder, copy_function=shutil.copy2, symlinks=True)
        if pipeline == "text_to_image":  # copied files have other inodes, so images runs once more
            projects.build(folder, "images")
        rebuild_under_kills(folder, stage_name, syncs[stage_name], cases(1, KILLS[pipeline]))
        found, expected = projects.content(folder, stage_name), projects.content(reference, stage_name)
        columns = [name for name in expected.column_names if name != "inode"]
        assert expected.num_rows and found.select(columns) == expected.select(columns)
        assert projects.artifacts(folder, stage_name) == projects.artifacts(reference, stage_name)
        assert stage_name != "index" or answers(folder) == answers(reference)


def rebuild_under_kills(folder: Path, stage_name: str, syncs: int, kills: int) -> None:
    """Delete the table of a stage and build it again, while the stage is killed `kills` times, each time before a random one
    of its `syncs` calls of fsync. After each kill the project is cleaned, verified or shown. Nothing temporary may be left.
    """
    shutil.rmtree(folder / "tables" / stage_name)
    generator, left = random.Random(stage_name), kills
    while left:
        code, _ = run_and_kill(generator.randint(1, syncs), CLI, "run", stage_name, "--only", "--project", str(folder))
        left -= code == KILLED
        use = generator.choice(("clean", "verify", "status"))  # none may fail, and none finds damage
        if use == "clean":
            list(clean(Project(folder), runs=False, dry_run=False))
        elif use == "verify":
            assert not ApiProject(folder).verify()
        else:
            states(Project(folder))
        if Project(folder).current(stage_name).exists:  # nothing is left to kill: begin again
            shutil.rmtree(folder / "tables" / stage_name)
    projects.latentmill(folder, "run", stage_name, "--only")
    assert not list((folder / "tables" / stage_name).rglob(".tmp-*"))


FEATURES = """
accumulate = 2
base_bits = 8

[train.optimizer]
kind = "adamw8bit"

[train.loss]
kind = "pseudo_huber"
weight = "bell"

[train.noise]
strata = 4

[train.data]
dropped = "trigger"
resolutions = {64 = 2, 96 = 1}

[train.validation]
every = 4
sigmas = [0.3, 0.7]

[train.preservation]
every = 2

[train.mask]
floor = 0.2

[train.ema]

[samples]
"""


def prepared(folder: Path, weights: Path) -> Path:
    """A project with every feature on, ready to train. Two of its four images have a mask: their right side."""
    projects.make(folder, weights, images=4)
    for path in sorted((folder / "images").glob("*.png"))[:2]:
        image = Image.open(path)
        alpha = Image.linear_gradient("L").rotate(90).resize(image.size)
        image.putalpha(alpha)
        image.save(path)
    words = 'preview_prompts = ["a red thing"]\ntrigger = "sks cup"\nclass_word = "cup"\ntemplate = "{trigger}, {caption}"'
    projects.edit(folder, 'preview_prompts = ["a red thing"]', words)
    projects.edit(folder, "\n[train]\n", '\n[latents]\nmask = "alpha"\n\n[train]\n')
    projects.edit(folder, "steps = 6", "steps = 8")
    projects.edit(folder, "\n[samples]\n", FEATURES)
    projects.edit(folder, "width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    return folder


def missing(folder: Path) -> int:
    """Rows of `train` that were never committed."""
    return state(Project(folder), "train").missing or 0


@pytest.mark.proof("training with every feature on that is killed ends where an unbroken run ends")
def test_training_with_every_feature_on_and_killed_before_any_fsync_ends_where_an_unbroken_run_ends(
    tmp_path: Path, tiny_weights: Path, cases: Callable[[int, int], int]
):
    unbroken = prepared(tmp_path / "unbroken" / "project", tiny_weights)
    killed = projects.duplicate(unbroken, tmp_path / "killed" / "project")
    syncs = count_syncs(lambda: projects.latentmill(unbroken, "run", "train", "--only"))
    projects.latentmill(killed, "run", "train", "--only", "--set", "train.stop_after_steps=4")
    projects.latentmill(killed, "run", "samples", "--only")  # previews between the kills
    generator, left, rows = random.Random(7), cases(1, 20), missing(killed)
    while left:
        code, _ = run_and_kill(generator.randint(1, syncs), CLI, "run", "train", "--only", "--project", str(killed))
        before, rows = rows, missing(killed)
        left -= code == KILLED and rows < before  # a kill before the first new row tests nothing of training
        if not rows:
            shutil.rmtree(Project(killed).current("train").folder)  # nothing is left to kill: begin again
            rows = missing(killed)
    projects.latentmill(killed, "run", "train", "--only")
    assert missing(killed) == 0
    projects.latentmill(unbroken, "run", "samples", "--only")
    projects.latentmill(killed, "run", "samples", "--only")
    for stage_name in ("train", "samples"):
        assert projects.content(killed, stage_name) == projects.content(unbroken, stage_name)
        assert projects.artifacts(killed, stage_name) == projects.artifacts(unbroken, stage_name)
    assert "to the bit" in projects.latentmill(killed, "replay", "8")
