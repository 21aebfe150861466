"""Makes new projects: a folder with a project.toml. The pipeline's Template lists the options and writes the text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import stages
from pipeline.project import config
from pipeline.project.paths import from_home, shell_path
from stages.pipelines import Template, load


def template_of(pipeline: str) -> Template:
    """Raises ValueError if there is no such pipeline, or if it has no template."""
    found = stages.pipeline(pipeline)
    if not found.template:
        raise ValueError(f"the pipeline {pipeline} has no template; write {config.FILE} by hand")
    template: Template = load(found.template)
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
    text = template.write(values)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    try:
        config.load(file)
    except ValueError:
        file.unlink()  # else the next try would find it in the way
        raise
    found = stages.pipeline(pipeline)
    target = [*found.results, *found.stages][0]
    return [f"wrote {file}; read it through, then:", f"  make {target} PROJECT={shell_path(folder)}"]


def relative(path: Path, folder: Path) -> str:
    """`path` for project.toml: relative, "../images", below the parent of `folder`, absolute elsewhere."""
    # A relative path lets the project and its files be moved together.
    found = Path(os.path.relpath(path.resolve(), folder.resolve()))
    return str(path.resolve()) if found.parts[:2] == ("..", "..") else found.as_posix()
