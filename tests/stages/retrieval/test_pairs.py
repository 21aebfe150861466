"""The stage pairs: which docstrings are queries, how pairs are split, duplicates and leaks."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.commands.retrieval.evaluate import evaluate
from pipeline.project.project import Project
from stages.retrieval.pairs import PairsConfig, groups, leaks, mark_duplicates, reason_against, split_of
from tests.stages.retrieval.project import FUNCTION, INDEXED, make, rows, run


def reason(query: str, document: str = "def f(a):\n  return a", lines: int = 9) -> str | None:
    found = reason_against(query, document, lines, PairsConfig(max_query_words=12))
    return found[0] if found else None


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Count the words of a text.", None),
        ("Count words.", "short_query"),
        ("Count " + "very " * 12 + "many words.", "long_query"),
        ("Initialize self.  See help(type(self)) for accurate signature.", "boilerplate"),
        ("Initialize the object.", "boilerplate"),
        ("Initialize the database connection from a file.", None),
        ("Constructor arguments are keywords.", "boilerplate"),
        ("See the base class.", "boilerplate"),
        ("TODO: write this text.", "boilerplate"),
        ("Override the base class method.", "boilerplate"),
        ("Override standard display hook to use non-locale encoding", None),
        ("Test whether a path is a symbolic link.", None),
        ("Internal routine to get nobody's uid", None),
        ("Seek to a place in the file.", None),
    ],
)
def test_a_query_is_judged_by_its_words(query, expected):
    assert reason(query) == expected


def test_a_pair_is_judged_by_its_code():
    assert reason("Count the words.", lines=4) == "short_body"
    assert reason("Count the words.", "x = 'count  THE words.'") == "verbatim"


def test_splits_have_their_shares_and_a_text_never_changes_its_split():
    names = [f"module{n}" for n in range(4000)]
    found = Counter(split_of(name, 0.1, 0.25) for name in names)
    assert abs(found["test"] / 4000 - 0.25) < 0.03 and abs(found["valid"] / 4000 - 0.1) < 0.02
    tested = {name for name in names if split_of(name, 0.1, 0.25) == "test"}
    assert tested <= {name for name in names if split_of(name, 0.3, 0.3) == "test"}


def test_items_are_grouped_by_common_keys_also_through_a_third():
    assert groups([("a", "x"), ("b", "y"), ("c", "y"), ("a", "z"), ("d", "z"), ("e",)]) == [0, 1, 1, 0, 0, 5]


def test_a_leak_is_the_largest_jaccard_similarity_of_trigrams():
    likeness, position = leaks(["a b c d", "q r s t"], ["x y z", "a b c e", "a b c d f"])
    assert likeness.tolist() == pytest.approx([2 / 3, 0.0]) and position[0] == 2
    assert leaks(["a b c"], [])[0].tolist() == [0.0]


def test_no_module_has_pairs_in_two_splits_but_a_library_can_be_split_within_and_a_leaked_pair_is_rejected(tmp_path):
    folder = make(tmp_path / "project", "", verbs=8, things=6)
    run(folder, "sources", "units")
    for split, most in (("module", 1), ("unit", 3)):
        overrides = {"pairs.split": split, "pairs.test": 0.4, "pairs.valid": 0.2, "pairs.max_leak": 0.3}
        run(folder, "pairs", overrides=overrides)
        found = rows(folder, "pairs", overrides)
        for package in {row["package"] for row in found}:
            assert len({row["split"] for row in found if row["package"] == package}) <= most
        if split == "unit":
            assert {row["split"] for row in found} == {"train", "valid", "test"}
            leaked = [row for row in found if row["rejected"] == "leak"]
            assert leaked and all(row["split"] == "train" and row["leak"] > 0.3 for row in leaked)
            assert all(row["leak"] <= 0.3 for row in found if row["rejected"] is None)


def test_of_pairs_with_one_query_or_body_the_first_is_used_and_deleting_it_makes_the_other_usable(tmp_path):
    folder = make(tmp_path / "project", "", verbs=2, things=1)
    same = FUNCTION.format(verb="count", title="Count", thing="words", number=0)
    renamed = same.replace("Count the words", "Number all words").replace("def count_words", "def number")
    (folder / "code" / "zebra.py").write_text(same.replace("[:words_limit]", "[:1]"))  # the same query
    (folder / "code" / "again.py").write_text(renamed)  # the same body
    run(folder, "sources", "units", "pairs")
    found = {row["package"]: row for row in rows(folder, "pairs") if "Sort" not in row["query"]}
    assert [found[f"code/{name}"]["rejected"] for name in ("again", "flat", "zebra")] == [None, "duplicate", "duplicate"]
    assert len({row["duplicate_group"] for row in found.values()}) == 1
    (folder / "code" / "again.py").unlink()
    run(folder, "sources", "units", "pairs")
    found = {row["package"]: row["rejected"] for row in rows(folder, "pairs") if "Sort" not in row["query"]}
    assert found == {"code/flat": None, "code/zebra": "duplicate"}


def test_stubs_and_vague_queries_do_not_make_unrelated_functions_duplicates():
    count, merge = "a = 1\nb = 2\nc = 3\nd = 4\nreturn a", "e = 1\nf = 2\ng = 3\nh = 4\nreturn e"
    stub = "raise NotImplementedError"
    pairs = [
        ("Count the words.", count, None),
        ("Merge two files.", merge, None),
        ("Count the words.", stub, "short_body"),
        ("Merge two files.", stub, "short_body"),
        ("Constructor.", count, "short_query"),
        ("Constructor.", merge, "short_query"),
        ("Override the base method to close it.", count, "boilerplate"),
        ("Override the base method to close it.", merge, "boilerplate"),
        ("Count the words!", "", None),
        ("Merge two files", "", None),
    ]
    given = [{"pair_id": n, "unit_id": n, "query": query, "rejected": why} for n, (query, _, why) in enumerate(pairs)]
    units = {
        n: {"body": body, "code_lines": len(body.splitlines()), "path": "a.py", "first_line": n}
        for n, (_, body, _) in enumerate(pairs)
    }
    found = mark_duplicates(given, units, PairsConfig())
    assert [row["rejected"] for row in found] == [*[row["rejected"] for row in given][:8], "duplicate", "duplicate"]
    assert [row["duplicate_group"] for row in found] == [0, 1] * 5


def test_code_without_docstrings_has_no_pairs_and_its_search_is_built_all_the_same(tmp_path):
    folder = make(tmp_path / "project", "", verbs=1, things=1)
    (folder / "code" / "flat" / "words.py").write_text("def f(a):\n    a += 1\n    return a\n")
    said = run(folder, *INDEXED)
    assert [line for line in said if "pair" in line or "docstring" in line] == [
        "no unit has a docstring: there is nothing to tune the encoder with, or to evaluate the search by"
    ]
    assert len(rows(folder, "index")) == 1 and rows(folder, "ranks") == []
    assert [line.partition(":")[0] for line in evaluate(Project(folder))] == ["nothing to evaluate"]
