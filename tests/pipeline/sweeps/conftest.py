"""The process that the sweeps fork."""

from collections.abc import Iterator

import pytest

from tests.pipeline.sweeps.forks import Forks


@pytest.fixture(scope="package")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("forks")) as made:
        yield made
