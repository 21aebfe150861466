"""Exceptions that commands handle in another way than a mistake of the user."""


class Stopped(Exception):  # noqa: N818  (not an error: the user asked for it)
    """Raised when the user interrupts a run. The message tells how many rows are kept and how to continue."""


class NotBuilt(ValueError):  # noqa: N818  (a state that the user can change, described in one line)
    """Raised if a table that is needed does not exist for the present settings. `table` is the name of the table."""

    def __init__(self, message: str, table: str) -> None:
        super().__init__(message)
        self.table = table
