"""Units of TOML, YAML and JSON, and which of such files are read."""

from __future__ import annotations

import json

import pytest

from stages.retrieval import sources
from stages.retrieval.units.stage import UnitsConfig, find_units
from tests.stages.retrieval.project import INDEXED, rows, run

TOML = """title = "nests"

# How birds are counted.
[count]
owls = [
    1,
    2,
]

[[nest]]
at = 1
[[nest]]
at = 2
"""
YAML = """name: nests
on:
  push:
    branches: [main]

# Runs at night.
jobs:
  count:
    steps:
      - run: count
      - name: "tell: all"
        run: tell
  sort:
    steps: []
"""
JSON = """{
  "name": "nests",
  "scripts": {
    "count": "count --all",
    "sort": "sort"
  },
  "birds": [
    {"name": "owl"},
    {"name": "swift"},
    {"name": "crow"},
    {"name": "robin"},
    {"name": "wren"},
    {"name": "tit"}
  ]
}
"""


def units(text: str, language: str, window: int = 40) -> list[tuple[str, int, int]]:
    found = find_units(text, language, UnitsConfig(min_lines=1, window=window))
    assert {unit.kind for unit in found} <= {"code", "lines"} and not any(unit.signature for unit in found)
    return [(unit.qualified_name, unit.first_line, unit.last_line) for unit in found]


def test_small_tables_and_keys_that_follow_each_other_are_one_unit_with_their_names():
    assert units(TOML, "toml") == [("title, count, nest", 1, 13)]
    assert units(YAML, "yaml") == [("name, on, jobs", 1, 14)]
    assert units(JSON, "json") == [("name, scripts, birds", 2, 15)]


def test_a_table_or_key_alone_is_a_unit_with_its_comment_a_long_one_is_divided_and_of_long_data_the_first_lines_are_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("stages.retrieval.units.unit.GROUP", 1)
    assert units(TOML, "toml") == [("title", 1, 1), ("count", 3, 8), ("nest", 10, 13)]
    assert units(YAML, "yaml", 8) == [("name", 1, 1), ("on", 2, 4), ("jobs", 6, 14)]
    assert units(YAML, "yaml", 6) == [("name", 1, 1), ("on", 2, 4), ("jobs.count", 6, 12), ("jobs.sort", 13, 14)]
    assert units(JSON, "json", 6) == [("name", 2, 2), ("scripts", 3, 6), ("birds", 7, 12)]
    records = json.dumps([{"id": number} for number in range(100)], indent=1)
    assert units(records, "json") == [("lines 1 to 40", 1, 40)]
    assert units("- owl\n" * 50, "yaml") == [("lines 1 to 20", 1, 20), ("lines 21 to 40", 21, 40), ("lines 41 to 50", 41, 50)]


@pytest.mark.parametrize("language", ["toml", "yaml", "json"])
def test_a_file_that_is_nested_deeply_or_cannot_be_parsed_has_units(language):
    deep = "".join(f'{" " * depth}"k{depth}":\n' for depth in range(300))
    for text in (deep, deep.replace('"k', "k"), "[" * 60_000, "a" * 60_000, "[a\n" * 1000, "{\n" * 1000, '"a" = : \\\n'):
        assert units(text, language), text[:9]


def test_a_file_of_configuration_is_found_and_counts_less_than_functions(folder):
    from pipeline.project.project import Project
    from stages.retrieval.search.ranking import Units

    files = {"a.toml": TOML, "b.yml": YAML, "c.json": JSON, "package-lock.json": JSON + "\n", "d.json": JSON + "\n" * 64_000}
    for name, text in files.items():
        (folder / "code" / name).write_text(text)
    run(folder, *INDEXED)
    found = {row["path"]: (row["skipped"], row["detail"]) for row in rows(folder, "sources")}
    assert found["code/package-lock.json"] == ("generated", "its name is that of a lock file")
    assert found["code/d.json"] == ("too_large", "64238 bytes: more than the 64000 of a file of configuration")
    index = Project(folder).folder("index").rows()
    minor = Units(*(index[name] for name in ("path", "qualified_name", "signature"))).minor
    least = {path for path, less in zip(index["path"].to_pylist(), minor.tolist(), strict=True) if less}
    assert {"code/a.toml", "code/b.yml", "code/c.json"} <= least and "code/flat/words.py" not in least


def test_files_of_a_language_that_an_older_version_did_not_know_are_read_and_nothing_else_is(folder, monkeypatch):
    (folder / "code" / "a.toml").write_text(TOML)
    with monkeypatch.context() as older:
        older.setattr(sources, "LANGUAGES", {".py": "python"})
        run(folder, "sources")
    row = next(row for row in rows(folder, "sources") if row["path"] == "code/a.toml")
    assert row["language"] == ""
    read, opened = [], sources.read_bytes
    monkeypatch.setattr(sources, "read_bytes", lambda path, most: read.append(path.name) or opened(path, most))
    for expected in (["a.toml"], []):
        read.clear()
        run(folder, "sources")
        assert [name for name in read if name != ".gitignore"] == expected
        assert [row["skipped"] for row in rows(folder, "sources") if row["path"] == "code/a.toml"] == [None]
