"""Runs the queries that the documents show; what README and documents name exists, and the index leads to every page."""

import re
from pathlib import Path

import pytest

from pipeline.commands.query import run_query
from pipeline.project import config
from pipeline.project.project import Project
from stages.text_to_image import PIPELINE
from tests import projects

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "data" / "docs"
INDEX = DOCS / "README.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))
SQL = (DOCS / "sql.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SQL, re.DOTALL)


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("readme") / "project", tiny_weights, images=3)
    projects.edit(folder, "\n[samples]", "\n[train.validation]\nevery = 2\n\n[samples]")
    projects.build(folder)
    return folder


@pytest.mark.parametrize("sql", blocks("sql"))
def test_a_query_of_the_documents_answers_over_a_finished_project(built, sql):
    answer = run_query(Project(built), sql, "csv")
    assert answer.splitlines()[0].count(",") >= 1


def test_no_query_of_the_documents_mixes_training_and_validation_losses(built):
    hurt, levels, held = (sql for sql in blocks("sql") if "from train" in sql)
    rows = projects.content(built, "train").to_pylist()
    drawn = [row for row in rows if row["split"] == "train"]
    for sql, count in ((hurt, sum(not row["dropped"] for row in drawn)), (levels, len(drawn))):
        (total,) = run_query(Project(built), f"select sum(draws) from ({sql})", "csv").splitlines()[1:]
        assert int(total) == count < len(rows)
    steps = run_query(Project(built), f"select distinct step from ({held}) order by all", "csv").splitlines()[1:]
    assert steps == ["0", "2", "4", "6"]


def test_the_three_lines_of_python_with_duckdb_run(built, monkeypatch, capsys):
    (code,) = (block for block in blocks("python") if "import duckdb" in block)
    assert len(code.strip().splitlines()) == 3
    monkeypatch.chdir(ROOT)
    exec(code.replace("data/projects/example", str(built)), {})
    assert "picture0.png" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_make_target_that_a_page_names_exists(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z]+)|`make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert {a or b for a, b in named} <= targets


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path) -> set[Path]:
    """The files that a page links to. A link without a file, or to a heading that its page lacks, fails."""
    found = set()
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, heading in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]*))?\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page}: {target}"
        assert not heading or heading in anchors(file), f"{page}: {target}#{heading}"
        found.add(file / "README.md" if (file / "README.md").exists() else file)
    return found


def test_every_page_is_reached_from_the_index_and_every_link_leads_somewhere():
    reached, ahead = set(), {INDEX.resolve()}
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead |= {each for each in links(page) if each.suffix == ".md"} - reached
    assert [page for page in PAGES if page != README and page.resolve() not in reached] == []
    assert INDEX.resolve() in links(README)


EXAMPLES = [
    pytest.param(text, id=f"{page.stem}-{n}")
    for page in PAGES
    for n, text in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_a_page_is_a_project_file(example, tmp_path):
    (tmp_path / "project.toml").write_text(example)
    config.load(tmp_path / "project.toml")


def test_every_file_that_a_page_names_exists():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (README, DOCS / "developing.md", DOCS / "stages.md"))
    named = re.findall(r"`((?:pipeline|stages|schemas|tests|data)/[\w/.-]*)`", text)
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_every_stored_query_that_a_page_names_exists_and_is_asked_by_make_panel():
    from stages.retrieval.views import PANELS as OTHERS

    text = "\n".join(path.read_text(encoding="utf-8") for path in (README, *sorted((ROOT / "data").rglob("*.md"))))
    assert "make query NAME=" not in text
    named = re.findall(r"(?:make panel NAME=|latentmill panel )(\w+)`", text)
    assert "hurting" in named and set(named) <= {panel.name for panel in (*PIPELINE.panels, *OTHERS)}
