"""`latentmill init`: makes a new project. The pipeline's `Template` lists the options."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click

import stages
from pipeline.options import ENVIRONMENT
from stages.pipelines import Option

DEFAULT = next(iter(stages.PIPELINES))


class Init(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from pipeline.project.init import template_of

        # The option --pipeline decides which other options there are, so it is read before click parses the words.
        named = [after for word, after in pairwise(args) if word == "--pipeline"]
        named += [word.removeprefix("--pipeline=") for word in args if word.startswith("--pipeline=")]
        own = [param for param in self.params if param.name in ("folder", "pipeline")]
        self.params = [*own, *map(_click_option, template_of(named[0] if named else DEFAULT).options)]
        return super().parse_args(ctx, args)


def _click_option(option: Option) -> click.Option:
    return click.Option(
        [f"--{option.name}"],
        help=option.doc,
        required=option.default is None,
        default=option.default,
        show_default=bool(option.default),
        envvar=f"LATENTMILL_{option.name.upper()}",
    )


@click.command("init", cls=Init)
@click.argument("folder", type=click.Path(path_type=Path), envvar=ENVIRONMENT)
@click.option(
    "--pipeline", default=DEFAULT, show_default=True, help="The pipeline of the project. The other options depend on it."
)
def command(folder: Path, pipeline: str, **options: str) -> None:
    """Make a new project in FOLDER. Writes FOLDER/project.toml and tells what to do next. The option --pipeline names
    the kind of project. It decides which other options there are.
    """
    from pipeline.project.init import new_project

    for line in new_project(folder, options, pipeline):
        click.echo(line)
