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
    """Add --project, --set and --run to a click command, which gets the opened `Project` as the argument `project`."""

    @PROJECT
    @SET
    @RUN
    @functools.wraps(function)
    def opened(path: str, overrides: tuple[str, ...], chosen_run: str, **others: Any) -> Any:
        with hashing_of(click.get_current_context().info_name or function.__name__):
            return function(project=open_project(path, overrides, chosen_run), **others)

    return opened


def open_project(path: str, overrides: tuple[str, ...] = (), run: str = "") -> Project:
    """`run`: name, or beginning of the recipe, of a training run. ValueError for a wrong setting, project or run."""
    from pipeline.project.project import Project

    overrides = overrides or overrides_from_environment()
    project = Project(path, overrides)
    if run:
        from pipeline.project.runs import choose

        choose(project, run, overrides)
    return project


def overrides_from_environment() -> tuple[str, ...]:
    return split_overrides(os.environ.get("LATENTMILL_SET", ""))


def split_overrides(text: str) -> tuple[str, ...]:
    """Split "a.b=1 c.d=[64, 96]" into ("a.b=1", "c.d=[64, 96]")."""
    # Only where `section.key=` begins: values may contain spaces.
    return tuple(re.split(r"\s+(?=[A-Za-z_]\w*(?:\.\w+)+\s*=)", text.strip())) if text.strip() else ()
