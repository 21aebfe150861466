"""Tells the user that a command has ended, stopped or failed, by the way that LATENTMILL_NOTIFY names.

It is a variable of the user and no setting: a project from elsewhere must neither run a program nor send anything.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from pipeline.errors import Stopped, one_line
from pipeline.terminal import say_aside, shown

WAY = "LATENTMILL_NOTIFY"  # an address beginning with http:// or https://, or a command, which gets the text as its last word
SECONDS = 10.0  # that it may take
STOPPED = 130  # exit code


@contextmanager
def notifying(project: str, what: str) -> Iterator[None]:
    """Notify of how the block ends. It never fails because of that."""
    state, why = "failed", ""
    try:
        yield
        state = "ended"
    except (Stopped, KeyboardInterrupt, click.Abort):
        state = "stopped"
        raise
    except click.exceptions.Exit as error:  # of a process of its own
        state = "stopped" if error.exit_code == STOPPED else "failed"
        raise
    except Exception as error:
        why = f": {one_line(error) or type(error).__name__}"
        raise
    finally:
        if way := os.environ.get(WAY, "").strip():
            _notify(way, {"project": project, "command": what, "state": state, "text": f"{project}: {what} {state}{why}"})


def _notify(way: str, told: dict[str, str]) -> None:
    told = {key: shown(text)[:1000] for key, text in told.items()}
    failed: list[str] = []

    def send() -> None:
        try:
            if way.startswith(("http://", "https://")):
                from urllib.request import Request, urlopen

                body = json.dumps(told | {"content": told["text"]}).encode()  # "text" and "content": what chat programs show
                with urlopen(Request(way, body, {"Content-Type": "application/json"}), timeout=SECONDS):
                    return
            null = subprocess.DEVNULL
            subprocess.run([*shlex.split(way), told["text"]], stdin=null, stdout=null, stderr=null, timeout=SECONDS, check=True)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            failed.append(f"{WAY}: {one_line(error) or type(error).__name__}"[:300])

    # A server may answer byte by byte for ever: its thread is then left behind.
    thread = threading.Thread(target=send, name="notify", daemon=True)
    thread.start()
    thread.join(SECONDS + 1)
    if failed or thread.is_alive():
        say_aside(*failed or [f"{WAY}: no answer in {SECONDS:g} seconds"])
