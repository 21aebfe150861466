"""How much words and meaning count for a query, and the rules that follow their sum."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from stages.retrieval.search import ranking

PATHS = ["code/a.py", "code/a.py", "code/a.py", "code/a.py", "code/b.py", "code/tests/test_a.py"]
NAMES = ["parse", "Stack.push", "LIMIT, Nest", "Stack", "Other.push", "test_push"]
SIGNATURES = ["def parse()", "def push()", "", "class Stack:", "def push()", "def test_push()"]


def units_of(*columns: list[str]) -> ranking.Units:
    """Paths, names and signatures."""
    return ranking.Units(*(pa.chunked_array([each]) for each in columns))


UNITS = units_of(PATHS, NAMES, SIGNATURES)
PLACES = np.arange(6)


def after(
    rule: ranking.Rule, scores: list[float], query: str = "put on a pile", words: tuple[float, ...] = (0,) * 6
) -> list[float]:
    asked = ranking.Asked(query, np.array(words, float))
    return [round(score, 6) for score in rule(np.array(scores, float), PLACES, UNITS, asked).tolist()]


@pytest.mark.parametrize("query", ["parse_date", "JSONDecoder.decode", "Stack::push", "main()", "retry"])
def test_an_identifier_alone_goes_to_the_words_and_a_sentence_to_the_meaning(query):
    assert ranking.share(query) < 0.5 < ranking.share(f"where is {query} used")


def test_a_unit_that_is_the_whole_query_comes_first_and_one_that_a_sentence_names_rises():
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "push") == [1, 8, 0, 3, 6, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "Stack.push") == [1, 8, 0, 3, 0, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "Nest") == [1, 2, 6, 3, 0, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "what does Stack.push do") == [1, 3, 0, 3, 0, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "push it and parse the rest") == [1, 2, 0, 3, 0, 5]


def test_tests_and_what_is_kept_for_old_callers_count_less_unless_the_query_is_about_them():
    assert after(ranking.aside_down, [1, 1, 1, 1, 1, 4]) == [1, 1, 1, 1, 1, 2.6]
    assert after(ranking.aside_down, [1, 1, 1, 1, 1, -4]) == [1, 1, 1, 1, 1, -4]
    assert after(ranking.aside_down, [1, 1, 1, 1, 1, 4], "a test of the pile") == [1, 1, 1, 1, 1, 4]


ASIDE = ["_examples/a.go", "src/PileTest.java", "a/deprecated/b.kt", "_compat.py", "a_benchmark.cc", "pkg/a_test.go"]
ASIDE += ["test_suite/a.rs"]
NOT_ASIDE = ["latest/a.go", "contest.py", "compatible.py.d/a.py", "manifest.go", "attestation/spectrum.py"]


def test_a_file_is_aside_by_its_name_or_its_folders_and_not_by_a_part_of_a_word():
    paths = [f"code/{path}" for path in ASIDE + NOT_ASIDE]
    found = units_of(paths, ["f"] * len(paths), ["def f()"] * len(paths)).aside
    assert found.tolist() == [True] * len(ASIDE) + [False] * len(NOT_ASIDE)


def test_a_unit_rises_with_the_words_of_the_query_in_its_name():
    assert after(ranking.name_words, [1, 1, 1, 1, 1, 1], "what is pushed on the stacks") == [1, 2.2, 1, 1.6, 1.6, 1.6]
    assert after(ranking.name_words, [1, 1, 1, 1, 1, 1], "is it") == [1, 1, 1, 1, 1, 1]


def test_a_unit_rises_with_the_words_of_the_query_in_its_path():
    units = units_of(["code/http/connection_table.py", "code/other.py"], ["f", "g"], ["def f()", "def g()"])
    asked = ranking.Asked("connectors of http", np.zeros(2))
    assert ranking.path_words(np.zeros(2), np.arange(2), units, asked).tolist() == [0.75 / 2 + 0.25 / 2, 0]
    whole = units_of(["code/connect/mod.rs"], ["f"], ["fn f()"])
    assert ranking.path_words(np.zeros(1), np.arange(1), whole, asked).tolist() == [0.75]


def test_a_unit_rises_with_all_that_full_text_search_finds_in_its_file():
    assert after(ranking.file_evidence, [0] * 6, words=(1, 0, 0, 1, 4, 0)) == [0.5, 0.5, 0.5, 0.5, 1, 0]
    assert after(ranking.file_evidence, [0] * 6) == [0] * 6


def test_texts_and_statements_beside_functions_and_special_methods_count_seven_tenths():
    assert after(ranking.minor_down, [1, 1, 1, 1, 1, -4]) == [1, 1, 0.7, 1, 1, -4]
    names = ["Stack.__init__", "__main", "lines 1 to 40", "Use"]
    units = units_of(["code/a.py", "code/a.py", "code/b.lua", "code/c.md"], names, ["def __init__(self)", "def __main()", "", ""])
    asked = ranking.Asked("put on a pile", np.zeros(4))
    assert ranking.minor_down(np.ones(4), np.arange(4), units, asked).tolist() == [0.7, 1, 1, 0.7]


def test_each_further_answer_of_a_file_counts_less():
    assert after(ranking.later_down, [4, 3, 2, 1, 1, 1]) == [4, 2.7, 1.62, 0.729, 1, 1]
    assert after(ranking.later_down, [1, 2, 3, -4, 1, 1]) == [0.81, 1.8, 3, -4, 1, 1]


def test_the_share_of_the_words_of_a_query_that_code_holds_knows_no_endings_and_no_function_words():
    assert ranking.coverage("where are the retries counted", "count retry retries") == 1.0
    assert ranking.coverage("purple elephants of the moon", "count retry retries") == 0.0


def test_function_words_are_not_searched_unless_there_are_no_others():
    assert ranking.telling("where are the retryCounts") == "retry counts"
    assert ranking.telling("where is it") == "where is it"
