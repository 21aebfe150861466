"""The console command. Its subcommands are imported when they are called, so that --help answers at once."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pipeline.errors import Stopped, one_line
from pipeline.options import FOLDER, NAMES
from pipeline.process import explain, open_streams, use_utf8
from pipeline.terminal import hints, say_aside

SHOWN = 20  # lines of one error
STOPPED = 130  # the shell's code for Ctrl-C
GENERIC = {
    name: f"pipeline.commands.{name}:command"
    for name in ("init", "doctor", "plan", "run", "status", "query", "runs", "follow", "verify", "clean", "families", "settings")
} | {
    "queue": "pipeline.commands.queue:command",
    "launch": "pipeline.commands.run:launch_command",
    "panel": "pipeline.commands.query:panel_command",
    "compare": "pipeline.commands.runs:compare_command",
    "best": "pipeline.commands.runs:best_command",
    "view": "pipeline.page.command:command",
    "report": "pipeline.page.command:report_command",
}

WITHOUT_PROJECT = {"init", "families", "settings", "adapter", "find", "mcp"}


class Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        from stages.settings import nearest

        # They choose the project, which may bring a pipeline with commands of its own.
        ctx.meta["arguments"] = args
        hints.options = {}
        hints.commands = lambda: {*self.list_commands(ctx), *stage_names(args)} - WITHOUT_PROJECT
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"there is no command {name!r}{nearest(name, [*self.list_commands(ctx), *stage_names(args)])}")
        if not set(args) & set(ctx.help_option_names):
            require_own(name, args)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from stages.pipelines import load

        arguments = ctx.meta.get("arguments", ())
        # The project's own pipeline first: its command counts where two pipelines have one of that name.
        for commands in (own_commands(arguments), *(commands for _, commands in command_groups(arguments))):
            if cmd_name in commands:
                command: click.Command = load(commands[cmd_name])
                return command
        return stage_command(cmd_name, arguments)

    def list_commands(self, ctx: click.Context) -> list[str]:
        groups = command_groups(ctx.meta.get("arguments", ()))
        return list(dict.fromkeys(name for _, commands in groups for name in commands))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown: set[str] = set()
        for title, commands in command_groups(ctx.meta.get("arguments", ())):
            # A command that two pipelines have is explained once; the project decides which it is.
            new = {name: summary(reference) for name, reference in commands.items() if name not in shown}
            again = [name for name in commands if name in shown]
            shown.update(new)
            if new:
                with formatter.section(f"{title}; also {' and '.join(again)}" if again else title):
                    formatter.write_dl(list(new.items()))


def require_own(name: str, arguments: Sequence[str]) -> None:
    """ValueError if the command needs a project, and is one of other pipelines than the chosen project's alone."""
    import stages
    from pipeline.commands import own

    chosen = own_pipeline(arguments)
    others = [each for each in sorted(stages.PIPELINES) if name in own(each).commands]
    if chosen and others and name not in {*own_commands(arguments), *WITHOUT_PROJECT}:
        raise ValueError(f"{name} is a command of {' and '.join(others)}; the project is one of {chosen}")


def stage_command(name: str, arguments: Sequence[str]) -> click.Command | None:
    """`latentmill NAME`, short for `latentmill run NAME`; None if no pipeline has such a stage."""
    from stages.pipelines import load

    if name not in stage_names(arguments):
        return None
    run: click.Command = load(GENERIC["run"])
    assert run.callback
    options = [param for param in run.params if param.name != "stage"]
    text = f"Run the stage {name}, which brings its table up to date. Short for `latentmill run {name}`."
    return click.Command(name, callback=functools.partial(run.callback, stage=name), params=options, help=text)


def stage_names(arguments: Sequence[str]) -> list[str]:
    import stages

    names: list[str] = []
    for each in dict.fromkeys([*stages.PIPELINES, *filter(None, [own_pipeline(arguments)])]):
        with contextlib.suppress(ValueError):
            names += stages.pipeline(each).stages
    return names


def command_groups(arguments: Sequence[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(title, name -> "module:attribute"); last the group of the project's pipeline, if it is not built in."""
    import stages
    from pipeline.commands import own

    yield "Commands", GENERIC
    chosen = own_pipeline(arguments)
    for name in sorted(stages.PIPELINES, key=lambda name: name != chosen):
        yield f"Commands of {name}: {stages.pipeline(name).doc}", own(name).commands
    if chosen and chosen not in stages.PIPELINES:
        yield f"Commands of {chosen}", own_commands(arguments)


def own_commands(arguments: Sequence[str]) -> Mapping[str, str]:
    from pipeline.commands import own

    chosen = own_pipeline(arguments)
    with contextlib.suppress(ValueError):  # opening the project reports it
        return own(chosen).commands if chosen else {}
    return {}


def own_pipeline(arguments: Sequence[str]) -> str:
    """The pipeline that the chosen project.toml names; "" if there is none or it cannot be read."""
    # --project belongs to the commands, but which commands there are depends on it.
    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    option = click.Option(NAMES, default=FOLDER)
    reader = click.Command("latentmill", params=[option], context_settings=lenient, add_help_option=False)
    file = Path(reader.make_context("latentmill", list(arguments), resilient_parsing=True).params["project"], "project.toml")
    if file.is_file():  # not in the usual case for --help; saves the import
        from pipeline.project.config import pipeline_name, read_text
        from stages.untrusted import parse_toml

        with contextlib.suppress(ValueError):
            return pipeline_name(parse_toml(read_text(file), str(file.parent)))
    return ""


def summary(reference: str) -> str:
    """First sentence of a command's docstring. The source is parsed, not imported: --help must start quickly."""
    import ast
    from importlib.util import find_spec

    module, _, attribute = reference.partition(":")
    spec = find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == attribute]
    text = (ast.get_docstring(functions[0]) or "") if functions else ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="latentmill")
def cli() -> None:
    """Run training pipelines stage by stage; every stage writes a table that you can query. `latentmill COMMAND --help` explains
    a command and its options.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command and end the process; exit code 2 for a user's mistake, 130 for an interrupt."""
    gc.set_threshold(10_000)  # at 700, a twentieth of the start goes into searches of what is just loaded
    open_streams()
    use_utf8()
    if not sys.warnoptions:  # those of libraries are for who writes code
        warnings.simplefilter("ignore")
    job = os.environ.pop("LATENTMILL_JOB", None)  # not for the processes that this one starts
    code = exit_code(functools.partial(cli.main, arguments, prog_name="latentmill", standalone_mode=False))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe whose reader has ended
            stream.flush()
    if job:
        from pipeline.queue import job_ended

        job_ended(job, code)
    # The interpreter is not finalised: all files are written, and native threads of MLX, Lance and DuckDB can block it.
    os._exit(code)


def exit_code(command: Callable[[], Any]) -> int:
    """The integer that `command` returns, or else 0. An error that the user can correct becomes one line and 2."""
    from stages.run import Problems

    try:
        code = command()
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        say_aside(text.getvalue().rstrip())
        return error.exit_code
    except Stopped as stop:
        say_aside(str(stop))
        return STOPPED
    except (KeyboardInterrupt, click.Abort):
        say_aside("interrupted; what was saved is kept. Run the same command to go on.")
        return STOPPED
    except Problems as error:
        left = len(error.lines) - SHOWN
        for problem in [*error.lines[:SHOWN], *([f"and {left} more"] if left > 0 else [])]:
            say_aside(f"error: {one_line(ValueError(problem))}")
        return 2
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # MLX raises a RuntimeError for errors of the device; any other one is a bug.
        line = explain(str(error)) if isinstance(error, RuntimeError) else one_line(error)
        if os.environ.get("LATENTMILL_TRACEBACK") or line is None:
            raise
        say_aside(f"error: {line}")
        return 2
    return code if isinstance(code, int) else 0
