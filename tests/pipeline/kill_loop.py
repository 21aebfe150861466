"""Kills one stage of a finished project again and again, and then lets it end."""

import random
import shutil
from pathlib import Path

from pipeline.api import Project as ApiProject
from pipeline.commands.clean import clean
from pipeline.commands.status import states
from pipeline.project.project import Project
from tests import projects
from tests.pipeline.killing import KILLED, run_and_kill

CLI = "pipeline.cli"


def rebuild_under_kills(folder: Path, stage_name: str, syncs: int, kills: int) -> None:
    """Delete the table of a stage and build it again, while the stage is killed `kills` times, each time before a random one
    of its `syncs` calls of fsync. After each kill the project is cleaned, verified or shown. Nothing temporary may be left.
    """
    shutil.rmtree(folder / "tables" / stage_name)
    generator, left = random.Random(stage_name), kills
    while left:
        code, _ = run_and_kill(generator.randint(1, syncs), CLI, "run", stage_name, "--only", "--project", str(folder))
        left -= code == KILLED
        _use(folder, generator)
        if Project(folder).current(stage_name).exists:  # nothing is left to kill: begin again
            shutil.rmtree(folder / "tables" / stage_name)
    projects.latentmill(folder, "run", stage_name, "--only")
    assert not list((folder / "tables" / stage_name).rglob(".tmp-*"))


def _use(folder: Path, generator: random.Random) -> None:
    """Clean, verify or show a project that was killed: none may fail, and none finds damage."""
    use = generator.choice(("clean", "verify", "status"))
    if use == "clean":
        list(clean(Project(folder), runs=False, dry_run=False))
    elif use == "verify":
        assert not ApiProject(folder).verify()
    else:
        states(Project(folder))
