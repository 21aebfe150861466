"""Full-text search over split identifiers, the sum of two searches, and the measures of a ranking."""

from __future__ import annotations

import numpy as np
import pytest

from stages.intervals import bootstrap_mean
from stages.retrieval.search import lexical, measures

WORDS = ["parse date from text", "read file line by line", "parse header of message", "sort numbers", "dates dated dating"]


@pytest.fixture
def index(tmp_path):
    lexical.build(tmp_path / "words", WORDS)
    return lexical.LexicalIndex(tmp_path / "words", len(WORDS))


def test_documents_with_more_of_the_words_or_their_forms_score_higher_and_punctuation_and_operators_mean_nothing(index):
    scores = index.scores("parseDate")
    assert scores.argmax() == 0 and scores[2] > 0 and scores[1] == scores[3] == 0
    assert index.scores("sorting")[3] > 0 and index.scores("date")[4] > 0
    for query in ("", "'; drop table units; --", '"', "date AND (", "words:date*", "-", "~2 ^3 +", "\x00"):
        scores = index.scores(query)
        assert scores.shape == (5,) and np.isfinite(scores).all()


def test_a_revised_index_links_what_is_still_there_and_finds_what_a_new_one_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(lexical, "STALE", 0.5)
    many = np.array([f"{one} {two}" for one in WORDS for two in ("alpha", "beta", "gamma delta")])
    called = np.arange(len(many)) * 7 - 40
    lexical.build(tmp_path / "one", many.tolist(), called)
    data = {file.name: file.stat().st_ino for file in (tmp_path / "one").rglob("data/*.lance")}
    now = np.concatenate([many[2:], ["count the zebras"]])[::-1]  # in another order, too
    numbers = np.concatenate([called[2:], [999]])[::-1]
    assert lexical.revise(tmp_path / "two", tmp_path / "one", numbers, lambda places: now[places].tolist())
    there = {file.name: file.stat().st_ino for file in (tmp_path / "two").rglob("data/*.lance")}
    assert data.items() < there.items()
    lexical.build(tmp_path / "new", now.tolist())
    revised, new = lexical.LexicalIndex(tmp_path / "two", len(now), numbers), lexical.LexicalIndex(tmp_path / "new", len(now))
    for query in ("parse the date", "zebra", "sort beta", "line"):
        one, other = revised.scores(query), new.scores(query)
        assert ((one > 0) == (other > 0)).all() and one.argmax() == other.argmax()
        np.testing.assert_allclose(one, other, rtol=0.3)  # words are weighed as when the first was built
    assert revised.words(np.array([0, 3])) == new.words(np.array([0, 3])) == [now[0], now[3]]
    earlier = lexical.LexicalIndex(tmp_path / "one", len(many), called)
    assert earlier.scores("zebra").sum() == 0 and earlier.scores("parse")[0] > 0
    monkeypatch.setattr(lexical, "STALE", 0.1)
    assert not lexical.revise(tmp_path / "three", tmp_path / "two", numbers[1:], lambda places: now[places].tolist())


def test_an_index_of_other_documents_is_refused_and_one_of_the_same_gives_equal_scores(index, tmp_path):
    lexical.build(tmp_path / "again", WORDS)
    again = lexical.LexicalIndex(tmp_path / "again", len(WORDS))
    np.testing.assert_array_equal(index.scores("parse the date"), again.scores("parse the date"))
    with pytest.raises(ValueError, match="has 5 documents, not 6 of these"):
        lexical.LexicalIndex(tmp_path / "words", 6)
    with pytest.raises(ValueError, match="holds no full-text index"):
        lexical.LexicalIndex(tmp_path / "nothing", 5)


def test_measures_of_known_ranks_in_which_a_tie_counts_against_the_right_answer():
    scores = np.array([0.5, 0.9, 0.5, 0.1])
    assert [measures.rank_of(scores, place) for place in (0, 1, 3)] == [3, 1, 4]
    assert measures.rank_of(scores, 0, np.array([1, 2])) == 1
    ranks = np.array([1.0, 2, 10, 11])
    assert measures.MEASURES["P@1"](ranks).tolist() == [1, 0, 0, 0]
    assert measures.reciprocal(ranks).tolist() == [1, 0.5, 0.1, 0]
    assert measures.MEASURES["R@10"](ranks).tolist() == [1, 1, 1, 0]
    np.testing.assert_allclose(measures.MEASURES["nDCG@10"](ranks), [1, 1 / np.log2(3), 1 / np.log2(11), 0])


def test_intervals_hold_their_mean_and_shrink_with_more_queries():
    assert measures.wilson(14 / 15, 15) == pytest.approx((0.702, 0.988), abs=2e-3)
    assert measures.wilson(0.0, 10)[0] == pytest.approx(0) and measures.wilson(1.0, 10)[1] == pytest.approx(1)
    values = np.random.default_rng(0).normal(0.3, 1, 2000)
    low, high = bootstrap_mean(values)
    few = bootstrap_mean(values[:100])
    assert low < values.mean() < high and high - low < few[1] - few[0]
    assert bootstrap_mean(values) == (low, high)
