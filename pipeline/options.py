"""The options --project and --set, which the commands of every pipeline share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pipeline.project.project import Project

ENVIRONMENT = "LATENTMILL_PROJECT"
PROJECT = click.option(
    "--project", "-p", "path", default=".", envvar=ENVIRONMENT, show_default="this folder", help="The project's folder."
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a setting, for instance train.steps=500; may be repeated. `make` passes SET on in LATENTMILL_SET.",
)


def with_project(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of a click command: add --project and --set, and pass the opened project as `project`."""

    @PROJECT
    @SET
    @functools.wraps(function)
    def opened(path: str, overrides: tuple[str, ...], **others: Any) -> Any:
        return function(project=open_project(path, overrides), **others)

    return opened


def open_project(path: str, overrides: tuple[str, ...] = ()) -> Project:
    """Open the project in a folder. Without overrides, those in the environment variable LATENTMILL_SET apply."""
    from pipeline.project.project import Project

    return Project(path, overrides or overrides_from_environment())


def overrides_from_environment() -> tuple[str, ...]:
    """Return the overrides that `make SET=...` passed on, such as ("train.steps=500",)."""
    return split_overrides(os.environ.get("LATENTMILL_SET", ""))


def split_overrides(text: str) -> tuple[str, ...]:
    """Split "a.b=1 c.d=[64, 96]" into its overrides. Each begins at a section.key=, so that values may contain spaces."""
    return tuple(re.split(r"\s+(?=[A-Za-z_]\w*(?:\.\w+)+\s*=)", text.strip())) if text.strip() else ()
