"""The stage index and the search over it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.api import Project
from pipeline.project.tables import Table
from stages.retrieval.index import Searcher, choose_encoder, in_order, read_pooled
from stages.retrieval.search import codes, lexical, ranking
from stages.retrieval.search.maxsim import pool
from tests import projects
from tests.stages.retrieval.project import rows, run


class RandomEncoder:
    """Vectors of length 1 that depend on the words of a query."""

    def encode_queries(self, queries: list[str]) -> list[np.ndarray]:
        found = [np.random.default_rng(len(query)).normal(size=(len(query.split()), 32)) for query in queries]
        return [(each / np.linalg.norm(each, axis=1, keepdims=True)).astype(np.float32) for each in found]


def artifacts(folder: Path) -> Path:
    return Project(folder).current("index").folder / "artifacts"


def searcher(folder: Path, **options: object) -> Searcher:
    project = Project(folder)
    tables = (in_order(project.folder("index").rows()), artifacts(folder), project.folder("vectors").tensors())
    return Searcher(*tables, RandomEncoder(), **options)


def test_an_index_holds_every_unit_once_and_one_vector_of_each(indexed):
    assert {row["unit_id"] for row in rows(indexed, "index")} == {row["unit_id"] for row in rows(indexed, "units")}
    assert sorted(path.suffix for path in artifacts(indexed).iterdir()) == [".arrow", ".lance"]
    [file] = artifacts(indexed).glob("*.arrow")
    ids, vectors = read_pooled(file)
    tensors = Project(indexed).folder("vectors").tensors()
    for vector_id, vector in zip(ids.to_pylist(), vectors, strict=True):
        np.testing.assert_allclose(pool(codes.unpack(tensors.read(vector_id))), vector, atol=1e-3)


def test_semantic_search_equals_brute_force(indexed):
    query = "count the words"
    (vectors,) = RandomEncoder().encode_queries([query])
    stored = Table(Project(indexed).folder("vectors"))
    expected = {
        row["unit_id"]: float((vectors @ codes.unpack(stored[row["vector_id"]]).T).max(axis=1).mean())
        for row in rows(indexed, "index")
    }
    found = searcher(indexed).search(query, "semantic", limit=100)
    assert [answer.row["unit_id"] for answer in found[:5]] == sorted(expected, key=lambda key: -expected[key])[:5]
    assert all(answer.score == pytest.approx(expected[answer.row["unit_id"]], abs=1e-5) for answer in found)


def test_lexical_search_finds_the_words_and_nothing_else_and_hybrid_search_is_as_lexical_as_its_weight_says(indexed):
    found = searcher(indexed).search("invoices, colours", "lexical", limit=100)
    words = {row["unit_id"]: row["words"].split() for row in rows(indexed, "units")}
    assert found and all("colours" in words[answer.row["unit_id"]] for answer in found)
    assert searcher(indexed).search("sortColours", "lexical")[0].row["qualified_name"] == "sort_colours"
    assert searcher(indexed).search("zebra", "lexical") == []
    first = searcher(indexed).search("sort the colours", "lexical", limit=1)
    assert searcher(indexed, weight=0.0).search("sort the colours", "hybrid", limit=1)[0].row == first[0].row
    assert {answer.lexical for answer in searcher(indexed, weight=1.0).search("zebra", "hybrid", limit=3)} == {0.0}


def test_what_a_name_is_of_comes_before_what_says_it_most_and_the_unit_whose_title_means_the_query_first(indexed, monkeypatch):
    found = searcher(indexed, weight=1.0)
    [place] = np.flatnonzero(found.units.called("sort_colours"))
    scores = np.linspace(2, 1, len(found.ids), dtype=np.float32)
    monkeypatch.setattr(found.words, "scores", lambda query: scores)
    assert found.search("sort_colours", "lexical")[0].place == place
    assert found.search("sort colours", "lexical")[0].place == 0 != place
    monkeypatch.setattr(ranking, "reorder", lambda scores, *_: scores)
    monkeypatch.setattr(found, "title_scores", lambda places: np.where(places == 9, 1.0, 0.0))
    assert found.search("sort the colours", limit=1)[0].place == 9


def test_words_of_a_docstring_are_found_and_edits_and_deletions_are_taken_up_without_building_all_words_again(
    folder, monkeypatch
):
    code = folder / "code"
    file = code / "flat" / "words.py"
    text = file.read_text()
    assert searcher(folder).search("zebra", "lexical") == [] != searcher(folder).search("lines", "lexical")
    # Neither its first sentence nor a line of code is another one.
    file.write_text(text.replace("values: the words.", "values: zebras", 1))
    (code / "deep" / "lines.py").unlink()
    monkeypatch.setattr(lexical, "STALE", 1.0)
    monkeypatch.delattr(lexical, "build")
    run(folder, "sources", "units", "pairs", "tokens", "vectors", "index")
    assert [answer.row["qualified_name"] for answer in searcher(folder).search("zebra", "lexical")] == ["count_words"]
    assert not [row for row in rows(folder, "index") if row["path"].endswith("lines.py")]
    assert searcher(folder).search("lines", "lexical") == []
    assert len(list(artifacts(folder).iterdir())) == 2


def test_a_unit_has_a_title_and_an_answer_a_match_between_nothing_and_one(indexed):
    titles = {row["title"]: row["qualified_name"] for row in rows(indexed, "units")}
    assert titles["Count the words of a list and keep the largest 0."] == "count_words"
    found = searcher(indexed).search("sort the colours", limit=100)
    assert all(0 <= answer.match <= 1 for answer in found) and found[0].match > 1 / 3
    least = found[3].match
    assert all(answer.match >= least for answer in searcher(indexed).search("sort the colours", limit=100, least=least))


def test_a_path_limits_the_answers_and_one_without_files_or_a_query_without_words_is_one_line(indexed):
    found = searcher(indexed).search("count things", "hybrid", paths=["*/deep/*"])
    assert found and {answer.row["path"].split("/")[1] for answer in found} == {"deep"}
    with pytest.raises(ValueError, match=r"no file matches .*drop table units.*; paths are such as 'code/"):
        searcher(indexed).search("count things", "hybrid", paths=["'; drop table units"])
    for query in ("", "  ", "?!"):
        with pytest.raises(ValueError, match="the query must have a word"):
            searcher(indexed).search(query)


def test_an_incomplete_index_is_one_line_and_is_repaired_by_the_next_run_and_vectors_that_are_gone_are_one_line(folder):
    for path in artifacts(folder).glob("pooled-*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"incomplete or of another state of the project: run make index"):
        searcher(folder)
    run(folder, "index")
    assert searcher(folder).search("count words", "semantic")
    for shard in folder.glob("tables/vectors/*/shards/*.arrow"):
        shard.write_bytes(b"")
    said = projects.latentmill(folder, "search", "sort the colours", code=2)
    assert said.endswith(f"error: vectors of the index are damaged or gone: run latentmill verify -p {folder} --repair\n")


@pytest.mark.parametrize("damage", ["deleted", "cut", "flipped", "whole folder"])
def test_a_damaged_word_index_is_named_by_search_and_verify_and_made_again_by_repair(damage, folder, capfd):
    (words,) = artifacts(folder).glob("words-*.lance")
    files = [path for path in words.rglob("*") if path.is_file()]
    before = projects.latentmill(folder, "search", "sort the colours", "--lexical")
    file = max((path for path in files if "_indices" in path.parts), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    if damage == "whole folder":
        shutil.rmtree(words)
    elif damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"\xff" + content[1:])
    said = projects.latentmill(folder, "search", "sort the colours", "--lexical", code=2)
    if damage != "whole folder":
        assert said.count("\n") == 1 and said.endswith(f": run latentmill verify -p {folder} --repair\n") and file.name in said
    (found,) = Project(folder).verify()
    assert found.file == (words if damage == "whole folder" else file).relative_to(words.parents[1]).as_posix()
    assert Project(folder).verify(repair=True) == []
    assert projects.latentmill(folder, "search", "sort the colours", "--lexical") == before
    assert "panicked" not in capfd.readouterr().err


def ranked(base: list[int], tuned: list[int], split: str = "valid") -> pa.Table:
    """Columns of the table ranks. In the mode hard and in the split test, the tuned encoder 1a2b is always first."""
    rows = [
        {"pair_id": f"{number:03}", "encoder": encoder, "mode": mode, "split": part, "hybrid": each}
        for encoder, found in (("base", base), ("1a2b", tuned))
        for mode, part in (("plain", split), ("hard", split), ("plain", "test"))
        for number, rank in enumerate(found)
        for each in [rank if (mode, part) == ("plain", split) else 1 if encoder == "1a2b" else 10]
    ]
    return pa.Table.from_pylist(rows[::-1])


def test_a_tuned_encoder_is_searched_only_if_it_answers_held_out_queries_better_beyond_chance_or_if_asked_for():
    def choose(encoders: set[str], wanted: str, ranks: pa.Table | None = None) -> tuple[str, str]:
        return choose_encoder(encoders, wanted, lambda: ranks)

    both = {"base", "1a2b"}
    better, line = choose(both, "better", ranked([2] * 40, [1] * 30 + [4] * 10))
    figures = "tuning changes MRR@10 of 40 held-out queries by +0.312 [+0.219, +0.406]"
    assert (better, line) == ("1a2b", f"{figures}, so the tuned encoder is searched")
    chance, line = choose(both, "better", ranked([2] * 40, [1] * 18 + [4] * 22))
    assert chance == "base" and ", not up beyond chance: the base is searched; [index] encoder = " in line
    few, line = choose(both, "better", ranked([2] * 12, [1] * 12))
    assert few == "base" and "12 held-out queries (pairs.valid) are too few to say whether tuning helped: the base" in line
    for wanted in ("better", "tuned"):
        assert choose({"base"}, wanted) == ("base", "")
        assert choose({"1a2b"}, wanted) == ("1a2b", "")
    assert choose(both, "tuned") == ("1a2b", "") and choose(both, "base") == ("base", "")
    with pytest.raises(ValueError, match="no vectors of the base"):
        choose({"1a2b"}, "base")
    with pytest.raises(ValueError, match="2 tuned encoders"):
        choose({"1a2b", "3c4d"}, "better")


def test_a_search_says_how_many_files_are_newer_than_the_index(folder):
    from pipeline.commands.retrieval.search import staleness

    run(folder, "sources")  # the copies are other files
    assert staleness(Project(folder)) == ""
    (folder / "code" / "flat" / "words.py").unlink()
    (folder / "code" / "flat" / "new.py").write_text("def f(a):\n    return a\n")
    assert staleness(Project(folder)).startswith("1 file is newer than the index: make index PROJECT=")


def test_an_index_of_another_adapter_is_one_line(indexed):
    from pipeline.commands.retrieval.search import open_encoder

    with pytest.raises(ValueError, match=r"adapter 1a2b3c4d, which is not the project's: run make index"):
        open_encoder(Project(indexed), "1a2b3c4d" * 8)
