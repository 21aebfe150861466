"""The options --project, --set and --run, which the commands of every pipeline share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pipeline.terminal import hashing_of

if TYPE_CHECKING:
    from pipeline.project.project import Project

ENVIRONMENT = "LATENTMILL_PROJECT"
PROJECT = click.option(
    "--project", "-p", "path", default=".", envvar=ENVIRONMENT, show_default="the current folder", help="The project's folder."
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a setting of project.toml, such as train.steps=500. May be repeated. With make: SET='...'.",
)
RUN = click.option(
    "--run",
    "chosen_run",
    default="",
    envvar="LATENTMILL_RUN",
    metavar="NAME",
    help="Use a training run by its name or recipe, with the settings that it was made with. `latentmill runs` lists them.",
)


def with_project(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of a click command: add the options --project, --set and --run to the command. `function` gets the
    opened `Project` as the keyword argument `project`, and the command's other options unchanged.
    """

    @PROJECT
    @SET
    @RUN
    @functools.wraps(function)
    def opened(path: str, overrides: tuple[str, ...], chosen_run: str, **others: Any) -> Any:
        with hashing_of(click.get_current_context().info_name or function.__name__):
            return function(project=open_project(path, overrides, chosen_run), **others)

    return opened


def open_project(path: str, overrides: tuple[str, ...] = (), run: str = "") -> Project:
    """Open the project in the folder `path` and return it. `overrides` are texts such as "train.steps=500" that replace
    settings. `run` chooses a recorded training run by its name, its recipe (12 hex digits) or the beginning of its
    recipe. The settings of that run are then used. Raises ValueError if there is no such project or run, or if a
    setting is wrong.

    If there are no overrides, those in the environment variable `LATENTMILL_SET` are used. The message of the error is
    one line.
    """
    from pipeline.project.project import Project

    overrides = overrides or overrides_from_environment()
    project = Project(path, overrides)
    if run:
        from pipeline.project.runs import choose

        choose(project, run, overrides)
    return project


def overrides_from_environment() -> tuple[str, ...]:
    """Return the overrides in the environment variable LATENTMILL_SET, such as ("train.steps=500",). `make SET=...` sets it."""
    return split_overrides(os.environ.get("LATENTMILL_SET", ""))


def split_overrides(text: str) -> tuple[str, ...]:
    """Split a text with several overrides: "a.b=1 c.d=[64, 96]" becomes ("a.b=1", "c.d=[64, 96]"). A new override begins at each
    `section.key=`, so values may contain spaces. An empty text gives an empty tuple.
    """
    return tuple(re.split(r"\s+(?=[A-Za-z_]\w*(?:\.\w+)+\s*=)", text.strip())) if text.strip() else ()
