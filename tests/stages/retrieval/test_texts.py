"""The words, sentences and ids of queries and documents."""

import pytest

from stages.retrieval import ranks
from stages.retrieval.texts import first_sentence, without_name, words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("parseHTTPHeader_2", "parse http header 2"),
        ("get_payload(self, i=None)", "get payload self i none"),
        ("__init__", "init"),
        ("XMLParser.feed", "xml parser feed"),
        ("größe_maß", "größe maß"),
        ("", ""),
    ],
)
def test_identifiers_are_split_into_words_of_lower_case(text, found):
    assert " ".join(words(text)) == found


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return the payload. It may be a list.", "Return the payload."),
        ("Return the\n    payload of a message\n\n    More.", "Return the payload of a message"),
        ("Match names, e.g. Foo. Then stop.", "Match names, e.g. Foo."),
        ("Args:\n    x: a number", None),
        (">>> f()\n3", None),
        ("Add two numbers.\nReturns:\n    the sum", "Add two numbers."),
        ("   ", None),
    ],
)
def test_a_query_is_the_first_sentence_of_the_prose(docstring, sentence):
    assert first_sentence(docstring) == sentence


def test_a_name_is_removed_from_text_and_words_as_a_whole_word_only():
    assert without_name("text", "") == "text"
    unit = {"text": "m sort_words(a):\n  return sort_words(a) + sorted_words", "name": "sort_words", "words": "", "text_id": ""}
    found = ranks.without_name(unit)
    assert found["text"] == "m f(a):\n  return f(a) + sorted_words"
    assert found["words"] == "m f a return f a sorted words"
