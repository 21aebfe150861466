"""What a person sees while a stage runs: one bar with rate and time left, and lines above it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

WAIT_SECONDS = 1.0  # a stage that has nothing to do is over by then; one that loads weights shows that it lives
QUIET_SECONDS = 15.0  # without a terminal, one progress line this often


class Rate(ProgressColumn):
    """Units per second, or seconds per unit when slow."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        speed = task.finished_speed or task.speed
        unit = str(task.fields.get("unit", "row"))
        return Text(spell_rate(speed, unit) if speed else "")


class Terminal:
    """Progress and lines on standard error, so that standard output holds results only."""

    def __init__(self, stage_name: str) -> None:
        self.stage_name = stage_name
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, transient=True) if sys.stderr.isatty() else None
        self.task = self.bar.add_task(stage_name, total=None, visible=False) if self.bar else None
        self.waiting = threading.Timer(WAIT_SECONDS, self._appear)
        self.waiting.daemon = True
        self.told = time.monotonic()
        self.first: tuple[float, int] | None = None  # when, and how far it was: a run that goes on does not begin at 0

    def __enter__(self) -> Terminal:
        if self.bar:
            self.bar.start()
            self.waiting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.waiting.cancel()
        if self.bar:
            self.bar.stop()

    def _appear(self) -> None:
        if self.bar and self.task is not None:
            self.bar.update(self.task, visible=True)

    def say(self, line: str) -> None:
        """One line, named after the stage."""
        self.console.print(f"{self.stage_name}: {line}", markup=False)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Move the bar; without a terminal, a line now and then. `unit`: what is counted, image or images."""
        unit = unit.removesuffix("s")
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=done, total=total, visible=True, unit=unit)
            return
        now = time.monotonic()
        if self.first is None:
            self.first = (now, done)
        since, before = self.first
        if done > before and now - self.told >= QUIET_SECONDS:
            self.told = now
            speed = (done - before) / (now - since)
            self.say(f"{done} of {total} {unit}s, {spell_rate(speed, unit)}, {spell_seconds((total - done) / speed)} left")


class Quiet:
    """A console that shows nothing, or passes progress on to a function."""

    def __init__(self, name: str, report: Callable[[str, int, int, str], None] | None = None) -> None:
        self.name, self.report = name, report

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def say(self, line: str) -> None:
        """Drop a message."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """Pass progress on as (stage, done, total, unit)."""
        if self.report:
            self.report(self.name, done, total, unit)


def console_for(name: str, progress: Callable[[str, int, int, str], None] | bool) -> Terminal | Quiet:
    """The console of a stage: True is the terminal, False shows nothing, a function is called with the progress."""
    if progress is True:
        return Terminal(name)
    return Quiet(name, progress or None)


def spell_rate(speed: float, unit: str) -> str:
    """12.3 images/s, or 4.5 s/image below one a second."""
    return f"{speed:.1f} {unit}s/s" if speed >= 1 else f"{1 / speed:.1f} s/{unit}"


def spell_seconds(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def spell_bytes(count: float) -> str:
    """812 B, 1.2 MB, 7.75 GB; decimal units, as in the documents."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
