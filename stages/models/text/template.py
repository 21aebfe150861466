"""Bounds on a chat template. A template is a program in a file that somebody else wrote."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

TEMPLATE_SECONDS = 5.0  # to fill in or tokenize one prompt, which takes about a millisecond
TEMPLATE_CHARACTERS = 100_000
# Operations that make a text as long as a number says. No chat template of a supported model has one.
GROWING = ("Mul", "Pow", "Mod")
GROWING_NAMES = frozenset({"format", "center", "ljust", "rjust", "zfill", "indent", "wordwrap"})


def check_template(template: Any, folder: Path) -> None:
    """Raise ValueError if a chat template cannot be parsed, is too long, or could fill the memory with one operation.
    `template` is its text. `folder` is the tokenizer's folder, for the message.
    """
    from jinja2 import Environment, TemplateError, nodes

    where = f"the chat template in {folder}"
    if not isinstance(template, str) or len(template) > TEMPLATE_CHARACTERS:
        raise ValueError(f"{where} must be one text of at most {TEMPLATE_CHARACTERS:,} characters")
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(template)
        kinds = tuple(getattr(nodes, name) for name in GROWING)
        named_loop = any(name.name == "loop" and name.ctx != "load" for name in tree.find_all(nodes.Name))
        growing = [type(node).__name__ for node in tree.find_all(kinds) if named_loop or not _of_a_loop(node)]
        growing += [node.name for node in tree.find_all(nodes.Filter) if node.name in GROWING_NAMES]
        growing += [node.attr for node in tree.find_all(nodes.Getattr) if node.attr in GROWING_NAMES]
    except (TemplateError, RecursionError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{where} cannot be read: {first:.200}") from None
    if growing:
        raise ValueError(f"{where} must not use {growing[0]}, which could make a text of any length")


def _of_a_loop(node: Any) -> bool:
    """Return True if `node` is the operation `loop.index % x` or `loop.index0 % x`, where `x` is any expression. In a
    chat template, `loop.index` and `loop.index0` count the rounds of a `for` loop, from 1 and from 0. `node` is an
    operation in the syntax tree of the template, as Jinja parses it.

    A template may use these two operations, because the result is a number, and a number cannot fill the memory. With a
    text on the left, `%` inserts values into the text, which can make a text of any length.
    """
    from jinja2 import nodes

    left = getattr(node, "left", None)
    named = isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"
    return isinstance(node, nodes.Mod) and named and left is not None and left.attr in ("index", "index0")


def within(seconds: float, function: Callable[[], Result], what: str) -> Result:
    """Call `function` without arguments in a thread, and return its result. `seconds` is the longest time to wait.
    `what` names the call in error messages. Raises ValueError if `function` raises an error or takes longer.

    If `function` takes longer, its thread is told to exit. Native code in the thread still runs to its end.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  (a template may raise anything; native code panics)
            errors.append(error)

    thread = threading.Thread(target=call, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        raise ValueError(f"{what} did not end within {seconds:g} s")
    if errors:
        raise ValueError(f"{what} failed: {(str(errors[0]) or type(errors[0]).__name__).splitlines()[0]:.200}") from errors[0]
    return results[0]
