"""The options --project, --set and --run, which the commands of every pipeline share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.terminal import give, hashing_of, hints
from stages.bundled import CHECKOUT

if TYPE_CHECKING:
    from pipeline.project.project import Project

NAMES = ("--project", "-p")
EXAMPLE = "data/projects/example"  # the project of make, unless PROJECT names another
SETTING = r"[A-Za-z_]\w*(?:\.\w+)+\s*="
FOLDER = "."  # the project, unless --project names another


FOLDER_OF_PROJECTS = f"{__name__}.folder"


def instead_of_project(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Callback of an eager argument that names a project, or a folder that is none: then the argument `project` is None."""
    context.meta[FOLDER_OF_PROJECTS] = value
    return value


# For a script. Not of `query`, whose --json may take a FILE.
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def with_project(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --project, --set and --run to a click command; its argument `project` is opened while click reads the options."""

    def keep(context: click.Context, param: click.Parameter, value: Any) -> None:
        context.meta[f"{__name__}.{param.name}"] = value

    def opened(context: click.Context, param: click.Parameter, path: str) -> Project | None:
        if context.resilient_parsing:  # the shell asks for completions
            return None
        from pipeline.project import config, project, runs
        from stages.settings import from_home

        if folder := context.meta.get(FOLDER_OF_PROJECTS):
            if not (from_home(folder) / config.FILE).exists():
                return None
            path = folder
        context.with_resource(hashing_of(context.info_name or ""))
        words = context.meta.get("arguments", ())
        for before, given, word in zip(words, words[1:], words[2:], strict=False):
            # Else the command would take it for something of its own.
            if re.match(SETTING, word) and (before == "--set" or given.startswith("--set=")):
                raise ValueError(f"--set takes one word, or several in quotes: --set '{given.removeprefix('--set=')} {word}'")
        overrides = split_overrides(context.meta[f"{__name__}.overrides"])
        run = context.meta[f"{__name__}.training_run"]
        hints.about(Path(path), CHECKOUT / EXAMPLE, overrides, run)
        found = project.Project(path, overrides)
        if run:
            runs.choose(found, run, overrides)
        return found

    # Options that are eager come first, wherever they stand.
    early: dict[str, Any] = {"callback": keep, "expose_value": False, "is_eager": True}
    for option in (
        click.option(
            "--run",
            "training_run",
            default="",
            metavar="NAME",
            help="Use a training run by its name or recipe, with the settings it was made with. `latentmill runs` lists them.",
            **early,
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Override a setting of project.toml, such as train.steps=500. May be repeated; several in one: 'a.b=1 c.d=2'. "
            "With make: SET='...'.",
            **early,
        ),
        click.option(*NAMES, default=FOLDER, show_default="the current folder", help="The project's folder.", callback=opened),
    ):
        function = option(function)
    return function


def split_overrides(texts: Iterable[str]) -> tuple[str, ...]:
    """("a.b=1 c.d=[64, 96]",) gives ("a.b=1", "c.d=[64, 96]")."""
    # Only where `section.key=` begins: values may contain spaces.
    return tuple(each for text in texts for each in re.split(rf"\s+(?={SETTING})", text.strip()))


def give_json(value: Any) -> None:
    give(json.dumps(value, ensure_ascii=False, indent=1, default=str))
