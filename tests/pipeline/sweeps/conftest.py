"""The process that the sweeps fork, and the finished projects that they begin with."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipeline.forks import Forks
from tests.pipeline.sweeps import life


@pytest.fixture(scope="session")  # of the package, it would be started again where another package's tests come between
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def finished(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory, seeded_weights: Callable[[str], Path]
) -> Callable[[str], tuple[Path, dict[str, str]]]:
    """A function family -> a finished project, never changed, and the digests of its results."""

    @functools.cache
    def make(family: str) -> tuple[Path, dict[str, str]]:
        folder = life.make(tmp_path_factory.mktemp(family) / "project", seeded_weights(family), family=family)
        return folder, forks.call(life.completed, folder).value

    return make
