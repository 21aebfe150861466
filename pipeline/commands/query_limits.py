"""What an SQL query may use and reach: time, memory, and only the tables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

# What keeps a query from files, from extensions, and from undoing that. An answer too large for the memory is an error.
LOCKED = (
    ("temp_directory", "''"),
    ("enable_external_access", "false"),
    ("autoload_known_extensions", "false"),
    ("lock_configuration", "true"),
)


@dataclass(frozen=True)
class Limits:
    seconds: float = 300.0
    gigabytes: float = 4.0  # DuckDB's memory
    unsafe: bool = False  # may read and write files, attach databases and load extensions


USUAL = Limits()


@contextmanager
def limited(catalog: duckdb.DuckDBPyConnection, limits: Limits) -> Iterator[None]:
    """Limit the queries within; raises ValueError of one line for one that breaks a limit."""
    import duckdb

    catalog.execute("set python_enable_replacements = false")  # a misspelt table must not find a Python variable
    catalog.execute(f"set memory_limit = '{limits.gigabytes} GB'")
    # Stays in force after the `with` statement: the last setting locks the others.
    for name, value in () if limits.unsafe else LOCKED:
        catalog.execute(f"set {name} = {value}")
    # DuckDB has no setting for a time limit.
    timer = threading.Timer(limits.seconds, catalog.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except duckdb.InterruptException:
        raise ValueError(f"the query took longer than {limits.seconds:g} s; --seconds allows more") from None
    except duckdb.OutOfMemoryException:
        raise ValueError(f"the query needs more than {limits.gigabytes:g} GB; --memory-gb allows more") from None
    except duckdb.PermissionException as error:
        raise ValueError(f"{_first_line(error)}: a query reads only the tables; --unsafe allows more") from None
    finally:
        timer.cancel()


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("LINE 1:")[0].split())
