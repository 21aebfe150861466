"""Exceptions that commands handle in another way than a mistake of the user."""

import errno

LONGEST = 1600  # characters of an error's line


class Stopped(Exception):  # noqa: N818  (not an error: the user asked for it)
    """The user interrupted a run. The message says how much is saved and how to go on."""


class NotBuilt(ValueError):  # noqa: N818  (a state that the user can change, described in one line)
    """A table that is needed does not exist for the present settings."""

    def __init__(self, message: str, table: str) -> None:
        super().__init__(message)
        self.table = table


def one_line(error: BaseException) -> str:
    """The message on one line, "file: reason" for an OSError. Beyond `LONGEST` characters, its middle is cut out."""
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "disk full; free some space and run again" if full else error.strerror.lower()
        return reason if error.filename is None else f"{error.filename}: {reason}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
