"""The folder data/assets/retriever: its size, and the licences of what it was trained on."""

import re

from data import ASSETS
from data.research.retriever import corpus, packages

FOLDER = ASSETS / "retriever"
MOST_BYTES = 7_500_000


def rows() -> list[list[str]]:
    lines = (FOLDER / "LICENSES.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_folder_has_at_most_seven_and_a_half_megabytes():
    files = [file for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_every_package_of_the_training_is_pinned_and_permissive_and_the_library_kept_aside_is_not_among_them():
    pinned = {key(line[0].partition("==")[0]): line[0].partition("==")[2] for line in packages.listed()}
    assert all(pinned.values()) and corpus.ASIDE in pinned
    trained = {}
    for package, licence, *_ in rows():
        assert packages.Package(package, "", licence).permissive, (package, licence)
        name, version = package.split()
        trained[key(name.strip("`"))] = version
    assert len(trained) >= 75 and trained.items() <= pinned.items()
    assert corpus.ASIDE not in trained


def test_a_licence_is_permissive_only_if_nothing_else_is_named():
    licences = ("MIT", "BSD License", "Apache-2.0 AND MIT", "", "GPL-3.0", "MIT OR GPL-2.0", "LGPLv3+")
    assert [packages.Package("p", "1", each).permissive for each in licences] == [True] * 3 + [False] * 4
