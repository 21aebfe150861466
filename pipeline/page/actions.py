"""What a button or form of the page does: each a function(site, body) -> a sentence for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.commands.status import states
from pipeline.page.blocks import main_command, new_run, pages_of
from pipeline.page.site import Site
from pipeline.project.config import FILE, read_text
from pipeline.project.edit import edited, save
from pipeline.project.runs import find_run, find_runs, trains
from pipeline.project.runs import mark as mark_run
from pipeline.queue import Queue
from stages.pipelines import Field, Form
from stages.tuner.control import CHECKPOINT, PAUSE, STOP

Body = Mapping[str, Any]
PARTS = 2000  # characters of a field


def train(site: Site, body: Body) -> str:
    """Body: "sure", if the user has agreed to a new run."""
    if not body.get("sure") and (anew := new_run(states(site.project))):
        raise ValueError(f"{anew} Press once more to begin it.")
    job = Queue(site.path).add(main_command(site.project))
    return f"job {job.number} is in the queue"


def form(site: Site, body: Body) -> str:
    """Body: "page" and "block" (its number, from 0), and the fields by name."""
    page = pages_of(site.project).get(str(body.get("page")))
    number = body.get("block")
    if page is None or not isinstance(number, int) or not 0 <= number < len(page.blocks):
        raise ValueError("there is no such form")
    block = page.blocks[number]
    if not isinstance(block, Form):
        raise ValueError("there is no such form")
    job = Queue(site.path).add(form_words(site, block, body))
    return f"job {job.number} is in the queue"


def form_words(site: Site, block: Form, values: Body) -> list[str]:
    """The words of the command. Raises ValueError for a field that is empty, too long, not one of its choices, or no picture."""
    options, arguments = [], []
    for field in block.fields:
        text = _checked(field, values.get(field.name, ""))
        if field.pictures:
            options += [
                f"{field.option}={site.file(f'{field.pictures}/{name}')}" for name in map(str.strip, text.splitlines()) if name
            ]
        elif text and field.option:
            options.append(f"{field.option}={text}")  # one word: a text that begins with - is no option
        elif text:
            arguments.append(text)
    return [*block.command.split(), *options, *(["--", *arguments] if arguments else [])]


def _checked(field: Field, given: Any) -> str:
    text = given.strip() if isinstance(given, str) else ""
    if field.wanted and not text:
        raise ValueError(f"{field.label}: fill this in")
    if len(text) > PARTS:
        raise ValueError(f"{field.label}: at most {PARTS} characters")
    if text and field.choices and text not in field.choices:
        raise ValueError(f"{field.label}: must be one of {', '.join(field.choices)}")
    return text


def cancel(site: Site, body: Body) -> str:
    Queue(site.path).cancel(_number(body, "job"))
    return f"job {body['job']}: asked to end; it keeps what it has"


def first(site: Site, body: Body) -> str:
    Queue(site.path).move(_number(body, "job"), 0)
    return f"job {body['job']} is the next"


def hold(site: Site, body: Body) -> str:
    Queue(site.path).pause()
    return "the queue begins no further job"


def start(site: Site, body: Body) -> str:
    Queue(site.path).pause(False)
    return "the queue goes on"


def checkpoint(site: Site, body: Body) -> str:
    (_artifacts(site) / CHECKPOINT).touch()
    return "a checkpoint is written after this step"


def sample(site: Site, body: Body) -> str:
    """The run ends with a checkpoint, as by the file `stop`; then its command draws, and a further job goes on with it."""
    queue = Queue(site.path)
    running = next((job for job in queue.jobs() if job.state == "running"), None)
    words = main_command(site.project)
    stage = queue.progress(running.number).get("stage") if running else None
    if not running or list(running.words) != words or not stage or not trains(site.project.stage(stage).writes):
        raise ValueError(f"latentmill {' '.join(words)} is not training now")
    (_artifacts(site) / STOP).touch()
    job = queue.add(words)
    queue.move(job.number, 0)
    return f"after this step the run is saved and previews are drawn; job {job.number} goes on with it"


def pause(site: Site, body: Body) -> str:
    (_artifacts(site) / PAUSE).touch()
    return "the run waits after this step, with a checkpoint"


def resume(site: Site, body: Body) -> str:
    (_artifacts(site) / PAUSE).unlink(missing_ok=True)
    return "the run goes on"


def mark(site: Site, body: Body) -> str:
    """Body: "run", and "step" as a text, "" for none."""
    text = str(body.get("step", ""))
    if not ((text.isascii() and text.isdecimal()) or not text) or len(text) > 9:
        raise ValueError("step must be that of a checkpoint")
    run = find_run(site.project, str(body.get("run", "")))
    mark_run(run, int(text) if text else None)
    return f"step {text} is the best of {run.label}" if text else f"no step of {run.label} is marked"


def rate(site: Site, body: Body) -> str:
    """Body: "key" of an input, and "times" that it is trained on per epoch, a text; "": as usual."""
    key, text, described = str(body.get("key", "")), str(body.get("times", "")).strip(), site.project.pipeline.detail
    now = site.rates()
    if (
        not described
        or not described.rate
        or not (key in now or any(row["trained"] for row in site.query(described.sql, text=key)))
    ):
        raise ValueError(f"{key[:80]!r} is not trained on")
    try:
        times = float(text) if text else None
    except ValueError:
        raise ValueError(f"times per epoch must be a number, got {text[:40]!r}") from None
    now.pop(key, None)
    if times is not None:
        now[key] = int(times) if times.is_integer() else times
    before = read_text(site.path / FILE)
    save(site.path, before, edited(before, {described.rate: now or None}), site.overrides)
    often = {None: "trained on as usual", 0.0: "left out"}.get(times, f"trained on {text} times per epoch")
    return f"{often}, from the next run on"


def _artifacts(site: Site) -> Path:
    run = next((run for run in find_runs(site.project) if run.current), None)
    if run is None:
        raise ValueError("no run of the present settings has begun")
    return run.table.folder / "artifacts"


def _number(body: Body, name: str) -> int:
    value = body.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number")
    return value


ACTIONS: dict[str, Callable[[Site, Body], str]] = {
    each.__name__: each for each in (train, form, cancel, first, hold, start, checkpoint, sample, pause, resume, mark, rate)
}
