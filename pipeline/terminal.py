"""Text for the terminal: the progress of a stage, aligned tables, and numbers with units."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import click
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stages.bundled import shell_path
from stages.hashing import hashing_shown

WAIT_SECONDS = 1.0  # the bar appears after this time, since a stage that has nothing to do is over by then
QUIET_SECONDS = 15.0  # without a terminal, seconds from one progress line to the next
PROGRESS = "LATENTMILL_PROGRESS"  # environment variable: a file in which a command tells how far it is, for the page
TELL_SECONDS = 0.5
NARROWEST = 12  # characters; text columns are not folded below this width

# What moves a terminal's cursor, changes its colours or the order of letters, or breaks a line; halves of surrogate pairs.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

ProgressCallback = Callable[[str, int, int, str], None]  # (stage, done, total, unit)
Say = Callable[[str], None]


def silent(line: str) -> None:
    """The default of `say`."""


def shown(text: str) -> str:
    r"""Text from anywhere (names of files, captions, errors of libraries) for a terminal: the escape character becomes \x1b."""
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


class Hints:
    """Adds project, --set and --run to the commands in what is said, so that they mean the same when they are pasted."""

    def __init__(self) -> None:
        self.options: dict[str, list[tuple[str, str]]] = {}  # program -> (the options that say the same, what is added)
        self.commands: Callable[[], Iterable[str]] = tuple  # those that take a project

    def about(self, project: Path, made: Path, overrides: Sequence[str] = (), run: str = "") -> None:
        """`made`: the project of make without PROJECT."""
        here = project.resolve()
        near = here.relative_to(Path.cwd()) if Path.cwd() in here.parents else here
        quoted, given, chosen = shlex.quote(str(near)), shlex.quote(" ".join(overrides)), shlex.quote(run)
        own = [] if here == Path.cwd() else [(" PROJECT=| -p | --project ", f" -p {quoted}")]
        made_by = [] if here == made.resolve() else [(" PROJECT=| -p | --project ", f" PROJECT={shell_path(near)}")]
        own += [(" --set ", f" --set {given}")] * bool(overrides) + [(" --run ", f" --run {chosen}")] * bool(run)
        made_by += [(" SET=", f" SET={given}")] * bool(overrides) + [(" RUN=", f" RUN={chosen}")] * bool(run)
        self.options = {program: added for program, added in (("latentmill", own), ("make", made_by)) if added}

    def __call__(self, text: str) -> str:
        if not self.options or not any(program in text for program in self.options):
            return text
        names = "|".join(map(re.escape, sorted(self.commands(), key=len, reverse=True)))
        found = rf"(?<![\w/.-])({'|'.join(self.options)}) ({names})(?![\w/-])(?=([^`;\n]*))"

        def added(each: re.Match[str]) -> str:
            return each[0] + "".join(more for given, more in self.options[each[1]] if not re.search(given, each[3]))

        return re.sub(found, added, text) if names else text


hints = Hints()


def tell(text: str, aside: bool = False) -> None:
    """Everything that a command says goes through here, or through `Terminal` or `give`."""
    click.echo(shown(hints(text)), err=aside)


def say_aside(line: str) -> None:
    tell(line, aside=True)


def tell_code(head: str, code: str, file: str) -> None:
    """A line, and lines of `file` below it; on a terminal in bold, and in the colours of the language."""
    if not sys.stdout.isatty():
        tell(head)
        tell(code)
        return
    from rich.syntax import Syntax

    console = Console(highlight=False)
    console.print(Text(shown(head), style="bold"), soft_wrap=True)
    console.print(Syntax(shown(code), Syntax.guess_lexer(file), theme="ansi_dark", background_color="default"))


def give(data: str) -> None:
    """CSV or JSON for another program: UTF-8, whatever the locale, and unchanged unless a terminal shows it."""
    if sys.stdout.isatty() or not hasattr(sys.stdout, "buffer"):
        click.echo(shown(data))
        return
    sys.stdout.flush()
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(f"{data}\n".encode(errors="backslashreplace"))
    sys.stdout.flush()


class Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = str(task.fields.get("unit", "row"))
        return Text(format_rate(speed, unit) if speed else "")


class Bar(Progress):
    facts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.facts:
            yield Text(self.facts, style="dim", overflow="ellipsis", no_wrap=True)


class Quiet:
    """Shows nothing; calls of `progress` go to `report`."""

    def __init__(self, stage_name: str = "", report: ProgressCallback | None = None) -> None:
        self.stage_name, self.report = stage_name, report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int, unit: str) -> None:
        if self.report:
            self.report(self.stage_name, done, total, unit)


class Terminal(Quiet):
    """Messages and progress of a stage on standard error; a line every `QUIET_SECONDS` if that is no terminal."""

    def __init__(self, stage_name: str) -> None:
        super().__init__(stage_name)
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        self.bar = Bar(*columns, console=self.console, transient=True) if sys.stderr.isatty() else None
        self.task = self.bar.add_task(stage_name, total=None, visible=False) if self.bar else None
        self.facts = ""
        self.last_line = time.monotonic()
        self.first: tuple[float, int] | None = None  # time and count of the first report: a resumed run does not begin at 0
        self.closing = ExitStack()
        self.begun: tuple[float, int] | None = None
        self.told, self.told_at = os.environ.get(PROGRESS), -TELL_SECONDS

    def __enter__(self) -> Self:
        self.closing.enter_context(hashing_shown(self.note))
        if self.bar and self.task is not None:
            waiting = threading.Timer(WAIT_SECONDS, self.bar.update, [self.task], {"visible": True})
            waiting.daemon = True
            self.closing.enter_context(self.bar)
            self.closing.callback(waiting.cancel)
            waiting.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.close()

    def say(self, line: str) -> None:
        self.console.print(shown(hints(f"{self.stage_name}: {line}")), markup=False)

    def note(self, text: str) -> None:
        """Replaces the previous text. Without a terminal it ends the lines of progress, or is a line itself before the first."""
        self.facts = text = shown(text)
        if self.bar:
            self.bar.facts = text
        elif text and self.first is None and (now := time.monotonic()) - self.last_line >= QUIET_SECONDS:
            self.last_line = now
            self.say(text)

    def progress(self, done: int, total: int, unit: str) -> None:
        if self.told and (done == total or time.monotonic() - self.told_at >= TELL_SECONDS):
            self._tell({"stage": self.stage_name, "done": done, "total": total, "unit": unit})
        unit = unit.removesuffix("s")
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, total=total, visible=True, unit=unit)
            return
        now = time.monotonic()
        if self.first is None:
            self.first = (now, done)
        since, before = self.first
        if done > before and now - self.last_line >= QUIET_SECONDS:
            self.last_line = now
            speed = (done - before) / (now - since)
            left = f"{done} of {total} {unit}s, {format_rate(speed, unit)}, {format_seconds((total - done) / speed)} left"
            self.say(f"{left}; {self.facts}" if self.facts else left)

    def _tell(self, facts: dict[str, str | int]) -> None:
        self.told_at = time.monotonic()
        began, before = self.begun = self.begun or (time.time(), int(facts["done"]))
        path = Path(str(self.told))
        with suppress(OSError):  # the stage goes on without
            path.with_suffix(".new").write_text(json.dumps(facts | {"began": began, "before": before, "at": time.time()}))
            path.with_suffix(".new").replace(path)


@contextmanager
def hashing_of(command: str) -> Iterator[None]:
    """Show how far the hashing of a large file is, for a command without progress of its own."""
    shown: Terminal | None = None
    since = time.monotonic()  # of the last line, whatever the number of files

    def note(text: str) -> None:
        nonlocal shown, since
        if text and not shown:
            shown = opened.enter_context(Terminal(command))
            shown.last_line = since
        if shown:
            shown.note(text)
            since = shown.last_line
        if not text:
            opened.close()
            shown = None

    with ExitStack() as opened, hashing_shown(note):
        yield


def console_for(stage_name: str, progress: ProgressCallback | bool) -> Quiet:
    return Terminal(stage_name) if progress is True else Quiet(stage_name, progress or None)


def format_table(names: Sequence[str], rows: Iterable[Sequence[Any]], right: Collection[str] = (), null: str = "-") -> str:
    """Lines below a header. Numbers and columns in `right` are aligned right; text is folded to the width of a terminal."""
    cells = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    widths, least = 0, 0
    for index, name in enumerate(names):
        column = [row[index] for row in cells]
        numeric = column and all(isinstance(value, int | float | Decimal | None) for value in column)
        to_right = name in right or numeric
        width = max(cell_len(text) for text in (name, *(format_cell(value, null) for value in column)))
        narrowest = width if to_right else min(width, NARROWEST)
        table.add_column(Text(name), justify="right" if to_right else "left", min_width=narrowest, overflow="fold")
        widths, least = widths + width + 2, least + narrowest + 2
    for row in cells:
        table.add_row(*(Text(format_cell(value, null)) for value in row))
    terminal = _columns()
    console = Console(file=io.StringIO(), width=terminal if least <= terminal < widths else widths, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def fold(line: str) -> str:
    columns = _columns()
    start = " " * (len(line) - len(line.lstrip()) + 2)
    whole = cell_len(line) <= columns or not columns
    return line if whole else textwrap.fill(line, columns, subsequent_indent=start, break_on_hyphens=False)


def _columns() -> int:
    # 0 if standard output is no terminal: lines are then left whole.
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def format_cell(value: Any, null: str = "-") -> str:
    """One line; a float has 6 significant digits, a character that cannot be printed becomes "?"."""
    if value is None:
        return null
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def format_rate(speed: float, unit: str) -> str:
    """12.3 and "image" give "12.3 images/s"; 0.2 gives "5.0 s/image"."""
    return f"{speed:.1f} {unit}s/s" if speed >= 1 else f"{1 / speed:.1f} s/{unit}"


def format_seconds(seconds: float) -> str:
    """Such as "0.4 s", "12 s", "3 min 20 s" or "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
