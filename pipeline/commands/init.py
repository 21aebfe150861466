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
    """The click command `init`, which makes a new project. Its option --pipeline decides which other options it has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the options of a pipeline to this command, then parse `args` with click and return click's result. `args`
        holds the words of the command line after the command's name. The option --pipeline in `args` names the
        pipeline. Without it, the default pipeline is used. `ctx` is click's context.
        """
        from pipeline.project.init import template_of

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
