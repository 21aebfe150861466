"""What ends a command early without being a user's mistake."""


class Stopped(Exception):  # noqa: N818  (not an error: the user asked)
    """The user asked to stop; what was made is kept."""
