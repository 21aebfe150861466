"""Which commands there are: those of every project, those of the known pipelines, and those of the project's own pipeline."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

from pipeline import cli
from pipeline.store.disk import format_bytes
from stages.text_to_image import PIPELINE
from stages.text_to_image.families import FAMILIES
from tests import projects
from tests.toy import project as toy


def latentmill(*words: str, folder: Path = projects.ROOT) -> str:
    with contextlib.chdir(folder):
        _, out, err = projects.said(*words)
    return out + err


def test_the_help_lists_all_commands_and_loads_nothing_large():
    code = (
        "import sys; from click.testing import CliRunner; from pipeline.cli import cli\n"
        "print(CliRunner().invoke(cli, ['--help']).output)\n"
        "print('LOADED', [m for m in ('mlx', 'numpy', 'pyarrow', 'lance', 'duckdb', 'tokenizers', 'PIL') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=projects.ROOT, capture_output=True, text=True, check=True).stdout
    for name in (name for _, commands in cli.command_groups(()) for name in commands):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE), name
    assert "LOADED []" in out


def test_a_pipeline_outside_the_packages_brings_its_command_to_its_projects_alone(tmp_path):
    folder = toy.make(tmp_path / "texts")
    projects.latentmill(folder, "run", "lines", "--only")
    assert projects.latentmill_process(folder, "longest") == "one two three four five\n"
    assert latentmill("longest", folder=folder) == "one two three four five\n"
    assert "Commands of tests.toy" in latentmill("--help", folder=folder)
    assert "there is no command 'longest'" in latentmill("longest", folder=tmp_path)
    assert "there is no command 'stauts'; did you mean status?" in latentmill("stauts", folder=tmp_path)


def test_the_generic_commands_work_for_another_pipeline(tmp_path):
    folder = toy.make(tmp_path / "texts")
    assert "7 rows missing: make lines" in projects.latentmill(folder, "status")
    for stage in ("lines", "tokens"):
        projects.latentmill(folder, "run", stage, "--only")
    assert projects.latentmill(folder, "follow", "apple").splitlines() == [
        "lines     a.txt:1: a red apple on a table",
        "tokens    16 tokens",
        f"train     not built yet; run: make train PROJECT={folder}",
    ]
    assert "one two three four five" in projects.latentmill(folder, "query", "from long_lines")
    assert projects.latentmill(folder, "panel").splitlines()[1].split("  ")[-1] == "Words per line"
    assert projects.latentmill(folder, "panel", "words", "--format", "csv").splitlines()[:2] == ["words,lines", "1,1"]
    assert "did you mean words?" in projects.latentmill(folder, "panel", "wordz", code=2)
    assert projects.latentmill(folder, "clean").splitlines()[-1] == "freed 0 B"


def test_every_panel_answers_over_a_small_project(tmp_path):
    from pipeline.commands.catalog import open_catalog
    from tests.pipeline.commands import tables

    catalog = open_catalog(tables.make(tmp_path))
    assert [panel.name for panel in PIPELINE.panels if not catalog.execute(panel.sql).fetchall()] == []


def test_the_families_are_listed_with_licence_and_source_and_have_the_sizes_of_the_page_of_weights():
    out = latentmill("families")
    assert re.search(r"^klein-base-4b +\S.*Apache.* 16.1 GB ", out, re.MULTILINE)
    heads = [line.split(")")[0] for line in out.splitlines() if line.startswith("family")]
    assert heads == ["family (text_to_image", "family (retrieval"]  # each has a family `tiny`
    page = (projects.ROOT / "data" / "docs" / "weights.md").read_text()
    for family in ("klein-base-4b", "klein-base-9b", "dev", "flux3-klein-base", "z-image"):
        sizes = FAMILIES[family].component_bytes()
        line = re.findall(rf"^\| `{family}` \| (.*)$", page, re.MULTILINE)[0]
        assert all(format_bytes(sizes[part]) in line for part in ("transformer", "text_encoder")), line


def test_what_a_script_may_ask_for_prints_json_with_json(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    for words in ("plan", "status", "runs", "doctor", "families", "lint", "panel checks"):  # lint builds the table checks
        where = [] if words in ("doctor", "families") else ["--project", str(folder)]
        code, out, _ = projects.said(*words.split(), "--json", *where)
        assert code == 0 and isinstance(json.loads(out), list | dict), words
