"""Text for the terminal: the progress of a stage, aligned tables, and numbers with units."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pipeline.store.disk import format_bytes as format_bytes  # shown beside the other numbers with units
from stages.hashing import hashing_shown

WAIT_SECONDS = 1.0  # the bar appears after this time, since a stage that has nothing to do is over by then
QUIET_SECONDS = 15.0  # without a terminal, seconds from one progress line to the next
NARROWEST = 12  # characters; text columns are not folded below this width

ProgressCallback = Callable[[str, int, int, str], None]  # (stage, done, total, unit)


class Rate(ProgressColumn):
    """A column of the progress bar that shows the speed. The speed is shown in units per second. If it is below one
    unit per second, the seconds per unit are shown instead.
    """

    def render(self, task: Task) -> Text:
        """Return the speed of `task` as text, such as "3.2 images/s". The text is empty before the first unit is done."""
        speed = task.finished_speed or task.speed
        unit = str(task.fields.get("unit", "row"))
        return Text(format_rate(speed, unit) if speed else "")


class Bar(Progress):
    """A progress bar with a line of facts below it. `facts` is that line, or "" for none."""

    facts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield what is drawn: the progress bar, and below the bar the text `self.facts`, such as the loss. If
        `self.facts` is "", only the bar is yielded.
        """
        yield self.make_tasks_table(self.tasks)
        if self.facts:
            yield Text(self.facts, style="dim", overflow="ellipsis", no_wrap=True)


class Terminal:
    """A console that shows the messages and progress of the stage `stage_name` on standard error. It is a context manager. The
    progress bar is shown while the context is open. If standard error is not a terminal, a line of text is shown every
    `QUIET_SECONDS` seconds instead. Standard output is left to results.
    """

    def __init__(self, stage_name: str) -> None:
        self.stage_name = stage_name
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        self.bar = Bar(*columns, console=self.console, transient=True) if sys.stderr.isatty() else None
        self.task = self.bar.add_task(stage_name, total=None, visible=False) if self.bar else None
        self.waiting = threading.Timer(WAIT_SECONDS, self._appear)
        self.waiting.daemon = True
        self.facts = ""
        self.last_line = time.monotonic()
        self.first: tuple[float, int] | None = None  # time and count of the first report: a resumed run does not begin at 0
        self.hashing = hashing_shown(self.note)

    def __enter__(self) -> Terminal:
        self.hashing.__enter__()
        if self.bar:
            self.bar.start()
            self.waiting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hashing.__exit__(kind, error, trace)
        self.waiting.cancel()
        if self.bar:
            self.bar.stop()

    def _appear(self) -> None:
        if self.bar and self.task is not None:
            self.bar.update(self.task, visible=True)

    def say(self, line: str) -> None:
        """Show the message `line`, preceded by the stage's name."""
        self.console.print(f"{self.stage_name}: {line}", markup=False)

    def note(self, text: str) -> None:
        """Show `text` beside the progress, in place of the previous text. `text` holds facts such as the loss; "" means
        no text. On a terminal, `text` is the line below the progress bar. If standard error is not a terminal, `text`
        is the end of each later line of progress.

        Before the first call of `progress`, there is no line of progress. If standard error is not a terminal, `text`
        is then printed as a separate line, at most once in `QUIET_SECONDS` seconds.
        """
        self.facts = text
        if self.bar:
            self.bar.facts = text
        elif text and self.first is None and (now := time.monotonic()) - self.last_line >= QUIET_SECONDS:
            self.last_line = now
            self.say(text)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Show that `done` of `total` units are finished. `unit` is the name of the units, singular or plural, such as
        "images".
        """
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


@contextmanager
def hashing_of(command: str) -> Iterator[None]:
    """Return a context manager that shows how far the hashing of a large file is. It is for a command that shows no
    progress of its own. `command` is the name of the command. Nothing is shown while no large file is hashed.
    """
    opened: list[Terminal] = []
    since = time.monotonic()  # of the last line, whatever the number of files

    def note(text: str) -> None:
        nonlocal since
        if text and not opened:
            opened.append(Terminal(command).__enter__())
            opened[0].last_line = since
        for terminal in opened:
            terminal.note(text)
            since = terminal.last_line
        if not text:
            close()

    def close() -> None:
        while opened:
            opened.pop().__exit__(None, None, None)

    try:
        with hashing_shown(note):
            yield
    finally:
        close()


class Quiet:
    """A console for the stage `stage_name` that shows nothing. If `report` is given, each call of `progress` calls it.
    The arguments of `report` are the stage's name, the number of units done, the total number, and the name of the
    units.
    """

    def __init__(self, stage_name: str, report: ProgressCallback | None = None) -> None:
        self.stage_name, self.report = stage_name, report

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def say(self, line: str) -> None:
        """Discard the message `line`."""

    def note(self, text: str) -> None:
        """Discard `text`."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """Report that `done` of `total` units are finished. `unit` is the name of the units. The callback `self.report`
        is called with the stage's name and these three values. If there is no callback, nothing happens.
        """
        if self.report:
            self.report(self.stage_name, done, total, unit)


def console_for(stage_name: str, progress: ProgressCallback | bool) -> Terminal | Quiet:
    """Return the console that shows the progress of the stage `stage_name`. If `progress` is True, it is the terminal; if
    False, it shows nothing. If `progress` is a function, the console calls it with (stage, done, total, unit).
    """
    if progress is True:
        return Terminal(stage_name)
    return Quiet(stage_name, progress or None)


def format_table(names: Sequence[str], rows: Iterable[Sequence[Any]], right: Collection[str] = (), null: str = "-") -> str:
    """Return `rows` as lines of text below a header line. `names` are the names of the columns. Columns of numbers are
    aligned to the right. Columns whose names are in `right` are aligned to the right too. None is shown as the text
    `null`. A float is shown with 6 significant digits. Any other value is shown as text. If standard output is a
    terminal, wide text columns are folded to its width. Otherwise every row is one line.
    """
    cells = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    widths, least = 0, 0
    for index, name in enumerate(names):
        column = [row[index] for row in cells]
        to_right = name in right or _is_numeric(column)
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


def _is_numeric(column: Sequence[Any]) -> bool:
    """Return True if every value of `column` is a number or None. An empty column is not numeric."""
    return bool(column) and all(isinstance(value, int | float | Decimal | None) for value in column)


def fold(line: str) -> str:
    """Break a line that is too wide for the terminal, and return the text. Lines break at spaces, and the continuation is
    indented. If standard output is no terminal, the line is returned unchanged.
    """
    columns = _columns()
    start = " " * (len(line) - len(line.lstrip()) + 2)
    whole = cell_len(line) <= columns or not columns
    return line if whole else textwrap.fill(line, columns, subsequent_indent=start, break_on_hyphens=False)


def _columns() -> int:
    """Return how many characters a line of the terminal holds, or 0 if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def format_cell(value: Any, null: str = "-") -> str:
    """Return `value` as text on one line. None becomes the text `null`. A float is shown with 6 significant digits. A
    character that cannot be printed becomes "?".
    """
    if value is None:
        return null
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def format_rate(speed: float, unit: str) -> str:
    """Format a speed in units per second. `unit` is the singular: 12.3 and "image" give "12.3 images/s". A speed below 1 is
    inverted: 0.2 and "image" give "5.0 s/image".
    """
    return f"{speed:.1f} {unit}s/s" if speed >= 1 else f"{1 / speed:.1f} s/{unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds as "0.4 s", "12 s", "3 min 20 s" or "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
