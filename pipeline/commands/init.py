"""`latentmill init`: makes a new project. The pipeline's `Template` lists the options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

import stages
from pipeline.commands import own as own_of
from pipeline.project import config
from pipeline.terminal import tell
from stages.bundled import shell_path
from stages.pipelines import Template, load
from stages.settings import from_home

DEFAULT = next(iter(stages.PIPELINES))


class Init(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # The option --pipeline decides which other options there are, so it is read before click parses the words.
        named = [after for word, after in pairwise(args) if word == "--pipeline"]
        named += [word.removeprefix("--pipeline=") for word in args if word.startswith("--pipeline=")]
        own = [param for param in self.params if param.name in ("folder", "pipeline")]
        for option in template_of(named[0] if named else DEFAULT).options:
            given: dict[str, Any] = {"default": option.default, "required": option.default is None, "help": option.doc}
            own.append(click.Option([f"--{option.name}"], show_default=bool(option.default), **given))
        self.params = own
        return super().parse_args(ctx, args)


@click.command("init", cls=Init)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--pipeline", default=DEFAULT, show_default=True, help="The pipeline of the project. The other options depend on it."
)
def command(folder: Path, pipeline: str, **options: str) -> None:
    """Make a new project in FOLDER. Writes FOLDER/project.toml and tells what to do next. The option --pipeline names
    the kind of project. It decides which other options there are.
    """
    for line in new_project(folder, options, pipeline):
        tell(line)


def template_of(pipeline: str) -> Template:
    """Raises ValueError if there is no such pipeline, or if it has no template."""
    reference = own_of(pipeline).template
    if not reference:
        raise ValueError(f"the pipeline {pipeline} has no template; write {config.FILE} by hand")
    template: Template = load(reference)
    return template


def new_project(folder: Path, options: Mapping[str, str], pipeline: str = config.ProjectConfig.pipeline) -> list[str]:
    """Write project.toml and return lines for the user: what to do next. Raises ValueError."""
    folder = from_home(folder)
    file = folder / config.FILE
    if file.exists():
        raise ValueError(f"{file}: exists already; edit it, or choose another folder")
    template = template_of(pipeline)
    values: dict[str, str] = {}
    for option in template.options:
        value = options.get(option.name, option.default)
        if value is None:
            raise ValueError(f"init needs --{option.name}: {option.doc}")
        path = from_home(value)
        if option.kind == "folder or file" and path.is_file():
            values[option.name] = str(path.resolve())
            continue
        if option.kind in ("folder", "folder or file") and not path.is_dir():
            raise ValueError(f"{path}: no such folder (--{option.name})")
        is_folder = option.kind != "text" and value and path.is_dir()
        values[option.name] = relative(path, folder) if is_folder else value
    values["project"] = str(folder)
    if reference := own_of(pipeline).prepare:
        values = load(reference)(values)
    text = template.write(values)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    try:
        config.load(file)
    except ValueError:
        file.unlink()  # else the next try would find it in the way
        raise
    found = stages.pipeline(pipeline)
    lint = ["lint"] if "lint" in own_of(pipeline).commands else []
    targets = ["plan", *lint, [*found.results, *found.stages][0]]
    return [
        f"wrote {file}",
        *(f"  {line}" for line in template.told(values)),
        "read it through, then:",
        *(f"  make {target} PROJECT={shell_path(folder)}" for target in targets),
    ]


def relative(path: Path, folder: Path) -> str:
    """`path` for project.toml: relative, "../images", below the parent of `folder`, absolute elsewhere."""
    # A relative path lets the project and its files be moved together.
    found = Path(os.path.relpath(path.resolve(), folder.resolve()))
    return str(path.resolve()) if found.parts[:2] == ("..", "..") else found.as_posix()
