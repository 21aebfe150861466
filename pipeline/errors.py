"""Exceptions that commands handle in another way than a mistake of the user."""


class Stopped(Exception):  # noqa: N818  (not an error: the user asked for it)
    """The user interrupted a run. The message says how much is saved and how to go on."""


class NotBuilt(ValueError):  # noqa: N818  (a state that the user can change, described in one line)
    """A table that is needed does not exist for the present settings."""

    def __init__(self, message: str, table: str) -> None:
        super().__init__(message)
        self.table = table
