"""The page of a large project: 5,000 images and 20,000 steps are shown in parts that a browser can hold."""

from __future__ import annotations

import html
import json
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from pipeline.page.app import make_app
from pipeline.page.site import Site
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject, digest

IMAGES, STEPS = 5000, 20_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("large")
    (folder / "images").mkdir()
    (folder / "project.toml").write_text('[project]\nfamily = "tiny"\n')
    fill(folder)
    return TestClient(make_app(Site(folder), "secret"), base_url="http://127.0.0.1:8765")


def fill(folder: Path) -> None:
    """Write the tables of a large project."""
    project, draw = FakeProject(folder), random.Random(0)
    ids = [digest(str(n)) for n in range(IMAGES)]
    tables.write(project, "images", [{"path": f"{n:05}.png", "image_id": each} for n, each in enumerate(ids)])
    captions = [
        {"image_id": each, "caption_id": each, "role": "caption", "text": f"a thing, number {n}"} for n, each in enumerate(ids)
    ]
    tables.write(project, "captions", captions)
    common = {"split": "train", "seconds": 1.0, "peak_bytes": 1_000_000, "lr": 1e-4, "grad_norm": 0.5}
    rows = [
        common | {"step": step, "image_id": ids[step % IMAGES], "sigma": draw.random(), "loss": 0.2 + draw.random()}
        for step in range(1, STEPS + 1)
    ]
    tables.write(project, "train", rows)


@pytest.mark.parametrize("name", ["overview", "images", "captions", "training", "samples", "scores"])
def test_every_page_of_a_large_project_is_small_and_has_no_error(page, name):
    text = page.get(f"/fragment/{name}").text
    assert 'class="error"' not in text
    assert len(text) < 400_000 and text.count("<img") <= 200


def test_curves_of_many_steps_have_few_points(page):
    charts = [
        json.loads(html.unescape(each)) for each in re.findall(r'data-chart="([^"]*)"', page.get("/fragment/training").text)
    ]
    points = [len(trace["x"]) for chart in charts for trace in chart["traces"]]
    assert points and max(points) <= 450
    assert any(trace["x"][-1] > STEPS - 400 for chart in charts for trace in chart["traces"])


def test_images_and_captions_are_shown_page_by_page(page):
    first, last = (page.get("/fragment/images", params={"page": number}).text for number in ("0", "83"))
    assert "all 5000" in first and first.count('<li class="') == 60 and "00059.png" in first and "00060.png" not in first
    assert last.count('<li class="') == 20 and "04999.png" in last
    assert page.get("/fragment/captions", params={"find": "number 4999"}).text.count("<textarea") == 1
