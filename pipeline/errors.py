"""Exceptions that end a command early and are not the user's mistake."""


class Stopped(Exception):  # noqa: N818  (not an error: the user asked for it)
    """The user interrupted a run. The message says how many rows are kept and how to go on."""
