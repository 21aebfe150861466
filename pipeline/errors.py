"""Exceptions that end a command early and are not the user's mistake."""


class Stopped(Exception):  # noqa: N818  (not an error: the user asked for it)
    """Raised when the user interrupts a run. The message tells how many rows are kept and how to continue."""
