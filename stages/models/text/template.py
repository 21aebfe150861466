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
    """Raise ValueError if a template cannot be parsed, is too long, or could fill the memory with one operation."""
    from jinja2 import Environment, TemplateError, nodes

    where = f"the chat template in {folder}"
    if not isinstance(template, str) or len(template) > TEMPLATE_CHARACTERS:
        raise ValueError(f"{where} must be one text of at most {TEMPLATE_CHARACTERS:,} characters")
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(template)
        kinds = tuple(getattr(nodes, name) for name in GROWING)
        # A template that assigns `loop` could make `loop.index` a text.
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
    from jinja2 import nodes

    # `loop.index % x` is a number, which cannot fill the memory. With a text on the left, % inserts values, which can.
    left = getattr(node, "left", None)
    named = isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"
    return isinstance(node, nodes.Mod) and named and left is not None and left.attr in ("index", "index0")


def within(seconds: float, function: Callable[[], Result], what: str) -> Result:
    """The result of `function`, run in a thread. Raises ValueError if it raises an error or takes longer."""
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
        # Tells the thread to exit. Native code in it still runs to its end.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        raise ValueError(f"{what} did not end within {seconds:g} s")
    if errors:
        raise ValueError(f"{what} failed: {(str(errors[0]) or type(errors[0]).__name__).splitlines()[0]:.200}") from errors[0]
    return results[0]
