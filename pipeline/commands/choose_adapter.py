"""Finds the adapters that a command line names: of the chosen run, of another run, or files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.project.project import Project

STRONGEST = 10.0


def find_adapter(project: Project, text: str, step: int | None = None) -> Path:
    """Return the path of the adapter file that `text` names. `text` is the path of an existing file, or "last", "best"
    or "average". These three words name adapters of the current training run of `project`, the opened project folder. A
    word followed by "@RUN", such as "best@RUN", names an adapter of another run. `step` is the training step of a
    checkpoint; None takes the end of the run. Raises ValueError if there is no such adapter.

    RUN is the name of the run or the beginning of its recipe (12 hex digits). With "best", `step` must be None.
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
    """Open the folder of `project` again and return it as a new `Project` that uses a recorded training run. The new
    `Project` has the settings and the table of that run. `run` is the name of the run, or its recipe (12 hex digits),
    or the beginning of its recipe. Raises ValueError if not exactly one run matches.
    """
    from pipeline.project import runs
    from pipeline.project.project import Project

    other = Project(project.path, fetch=project.fetch)
    runs.choose(other, run)
    return other


def pair_strengths(adapters: Sequence[str], strengths: Sequence[float], default: str = "last") -> list[tuple[str, float]]:
    """Return (adapter, strength) pairs, one for each of `adapters`. `strengths` holds one strength for each adapter in
    the same order, or none. Without strengths, every strength is 1. Without adapters, `default` is the only adapter.
    Raises ValueError if the numbers of adapters and strengths differ, or if a strength is not from -10 to 10.
    """
    names = list(adapters) or [default]
    if strengths and len(strengths) != len(names):
        raise ValueError(
            f"--strength must be given once for each --adapter, in their order: {len(names)} adapters, {len(strengths)} strengths"
        )
    for strength in strengths:
        if not -STRONGEST <= strength <= STRONGEST:
            raise ValueError(f"--strength must be from -10 to 10, got {strength}")
    return list(zip(names, strengths or [1.0] * len(names), strict=True))
