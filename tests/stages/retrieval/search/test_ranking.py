"""How much words and meaning count for a query, and the rules that follow their sum."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from stages.retrieval.search import ranking

PATHS = ["code/a.py", "code/a.py", "code/a.py", "code/a.py", "code/b.py", "code/tests/test_a.py"]
NAMES = ["parse", "Stack.push", "LIMIT, Nest", "Stack", "Other.push", "test_push"]
SIGNATURES = ["def parse()", "def push()", "", "class Stack:", "def push()", "def test_push()"]
UNITS = ranking.Units(*(pa.chunked_array([each]) for each in (PATHS, NAMES, SIGNATURES)))
PLACES = np.arange(6)


def after(rule: ranking.Rule, scores: list[float], query: str = "put on a pile") -> list[float]:
    return [round(score, 6) for score in rule(np.array(scores, float), PLACES, UNITS, query).tolist()]


@pytest.mark.parametrize("query", ["parse_date", "JSONDecoder.decode", "Stack::push", "main()", "retry"])
def test_an_identifier_alone_goes_to_the_words_and_a_sentence_to_the_meaning(query):
    assert ranking.share(query) < 0.5 < ranking.share(f"where is {query} used")


def test_a_unit_that_is_the_whole_query_comes_first_and_one_that_a_sentence_names_rises():
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "push") == [1, 8, 0, 3, 6, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "Stack.push") == [1, 8, 0, 3, 0, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "Nest") == [1, 2, 6, 3, 0, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "what does Stack.push do") == [1, 3, 0, 3, 0, 5]
    assert after(ranking.exact_symbol, [1, 2, 0, 3, 0, 5], "push it and parse the rest") == [1, 2, 0, 3, 0, 5]


def test_tests_count_three_quarters_unless_the_query_is_about_tests():
    assert after(ranking.tests_down, [1, 1, 1, 1, 1, 4]) == [1, 1, 1, 1, 1, 3]
    assert after(ranking.tests_down, [1, 1, 1, 1, 1, -4]) == [1, 1, 1, 1, 1, -4]
    assert after(ranking.tests_down, [1, 1, 1, 1, 1, 4], "a test of the pile") == [1, 1, 1, 1, 1, 4]


def test_a_unit_rises_with_the_words_of_the_query_in_its_name():
    assert after(ranking.name_words, [1, 1, 1, 1, 1, 1], "what is pushed on the stacks") == [1, 2, 1, 1.5, 1.5, 1.5]
    assert after(ranking.name_words, [1, 1, 1, 1, 1, 1], "is it") == [1, 1, 1, 1, 1, 1]


def test_statements_beside_functions_and_special_methods_count_four_fifths():
    assert after(ranking.minor_down, [1, 1, 1, 1, 1, -4]) == [1, 1, 0.8, 1, 1, -4]
    names = ["Stack.__init__", "__main", "lines 1 to 40"]
    files = [["code/a.py", "code/a.py", "code/b.lua"], names, ["def __init__(self)", "def __main()", ""]]
    units = ranking.Units(*(pa.chunked_array([each]) for each in files))
    assert ranking.minor_down(np.ones(3), np.arange(3), units, "put on a pile").tolist() == [0.8, 1, 1]


def test_from_the_fourth_answer_of_a_file_on_each_counts_less():
    assert after(ranking.later_down, [4, 3, 2, 1, 1, 1]) == [4, 3, 2, 0.8, 1, 1]
    assert after(ranking.later_down, [1, 2, 3, 4, 1, 1]) == [0.8, 2, 3, 4, 1, 1]
    one_file = ranking.Units(*(pa.chunked_array([[each] * 6]) for each in ("code/a.py", "f", "def f()")))
    scores = ranking.later_down(np.ones(6), PLACES, one_file, "put on a pile")
    assert [round(score, 6) for score in scores.tolist()] == [1, 1, 1, 0.8, 0.64, 0.512]


def test_an_answer_rises_with_the_best_other_one_of_its_file():
    assert after(ranking.file_coherence, [4, 3, 0, 0, 4, -1]) == [4.3, 3.4, 0.4, 0.4, 4, -1]


def test_the_share_of_the_words_of_a_query_that_code_holds_knows_no_endings_and_no_function_words():
    assert ranking.coverage("where are the retries counted", "count retry retries") == 1.0
    assert ranking.coverage("purple elephants of the moon", "count retry retries") == 0.0


def test_function_words_are_not_searched_unless_there_are_no_others():
    assert ranking.telling("where are the retryCounts") == "retry counts"
    assert ranking.telling("where is it") == "where is it"
