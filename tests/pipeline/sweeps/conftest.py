"""The process that the sweeps fork."""

from collections.abc import Iterator

import pytest

from tests.pipeline.sweeps.forks import Forks


@pytest.fixture(scope="package")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with Forks(tmp_path_factory.mktemp("forks")) as made:
            yield made
