"""The benchmark of search asks every query in every mode."""

from click.testing import CliRunner

from tests.bench.search import main
from tests.stages.retrieval.conftest import indexed  # noqa: F401


def test_every_mode_has_a_time(indexed):  # noqa: F811
    lines = CliRunner().invoke(main, [str(indexed), "--rounds", "1"], catch_exceptions=False).output.splitlines()
    assert [line.split()[0] for line in lines] == ["lexical", "semantic", "hybrid"]
    assert all(float(line.split()[1]) > 0 for line in lines)
