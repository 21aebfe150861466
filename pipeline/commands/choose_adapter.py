"""Finds the adapters that a command line names: of the chosen run, of another run, or files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.project.project import Project

STRONGEST = 10.0


def find_adapter(project: Project, text: str, step: int | None = None) -> Path:
    """The file itself, or a word of `WHICH` for the chosen run, or "best@RUN" for another (a name or the start of its recipe).

    `step` is a checkpoint, None for the end of the run; must be None with "best". Raises ValueError if there is none.
    """
    from pipeline.commands.export import WHICH, adapter_of

    path = Path(text).expanduser()
    if path.is_file():
        return path
    which, at, run = text.partition("@")
    if which in WHICH:
        return adapter_of(project_of_run(project, run) if at else project, step, lambda line: None, which)
    raise ValueError(
        f"--adapter must be {', '.join(WHICH)}, one of these with @RUN, none or a file, got {text!r}: there is no such file"
    )


def project_of_run(project: Project, run: str) -> Project:
    from pipeline.project import runs
    from pipeline.project.project import Project

    # A project of its own, because `choose` changes which run it uses.
    other = Project(project.path, fetch=project.fetch)
    runs.choose(other, run)
    return other


def pair_strengths(adapters: Sequence[str], strengths: Sequence[float], default: str = "last") -> list[tuple[str, float]]:
    """(adapter, strength) pairs. Raises ValueError if the numbers differ or a strength is not from -10 to 10."""
    names = list(adapters) or [default]
    if strengths and len(strengths) != len(names):
        raise ValueError(
            f"--strength must be given once for each --adapter, in their order: {len(names)} adapters, {len(strengths)} strengths"
        )
    for strength in strengths:
        if not -STRONGEST <= strength <= STRONGEST:
            raise ValueError(f"--strength must be from -10 to 10, got {strength}")
    return list(zip(names, strengths or [1.0] * len(names), strict=True))
