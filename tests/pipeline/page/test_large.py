"""The page of a large project: 5,000 images and 20,000 steps are queried and sent in parts that a browser can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from pipeline.page.app import make_app
from pipeline.page.site import Site
from tests.pipeline.page.large import IMAGES, fill

PAGES = ("overview", "images", "captions", "training", "samples", "scores", "sql")
MOST_BYTES, MOST_ROWS, MOST_PICTURES = 350_000, 5_000, 200  # of one page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("large")
    fill(folder)
    return TestClient(make_app(Site(folder), "secret"), base_url="http://127.0.0.1:8765")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    counts: list[int] = []
    rows = Site.query

    def counted(self, *arguments, **values):
        counts.append(len(found := rows(self, *arguments, **values)))
        return found

    monkeypatch.setattr(Site, "query", counted)
    yield counts


@pytest.mark.parametrize("name", PAGES)
def test_the_first_load_of_every_page_sends_few_bytes_and_fetches_few_rows(page, fetched, name):
    shell = page.get("/" if name == "overview" else f"/{name}").text
    assert fetched == [], "the first paint waits for no query"
    before = [page.get(address).content for address in re.findall(r'(?:src|href)="(static/[^"]+)"', shell)]
    assert len(before) == 2 and len(shell) + sum(map(len, before)) < 30_000, "nor for the library of charts"
    text = page.get(f"/fragment/{name}").text
    assert 'class="error"' not in text
    assert (
        len(text) < MOST_BYTES and text.count("<img") <= MOST_PICTURES and text.count("<img") == text.count('<img loading="lazy"')
    )
    assert sum(fetched) < MOST_ROWS


def test_a_text_is_replaced_in_captions_of_all_pages_and_the_answer_undoes_it(page):
    sent = {"headers": {"x-token": "secret"}}
    edits = page.post("/replace/captions", json={"find": "a thing", "by": "an object"}, **sent).json()["edits"]
    assert len(edits) == IMAGES - 1
    assert "4999 captions, 4999 edited" in page.get("/fragment/captions", params={"find": "AN OBJECT"}).text
    back = {key: {"before": edit["text"], "text": None} for key, edit in edits.items()}
    assert page.post("/edit/captions", json=back, **sent).json() == {"conflicts": {}}
    assert "4999 captions, 0 edited" in page.get("/fragment/captions").text


def test_images_are_shown_page_by_page_and_one_is_found_by_a_word_of_its_caption_and_by_each_filter(page):
    first, last = (page.get("/fragment/images", params={"page": number}).text for number in ("0", "83"))
    assert "all 5000" in first and first.count('<li class="') == 60 and "00059.png" in first and "00060.png" not in first
    assert last.count('<li class="') == 20 and "04999.png" in last

    def found(**chosen: str) -> list[str]:
        return re.findall(r"<strong>([^<]+)</strong>", page.get("/fragment/images", params=chosen).text)

    assert found(find="NUMBER 4999") == ["04999.png"]
    assert found(filter="blurred") == ["00001.png"] and found(filter="small") == ["00002.png"]
    assert found(filter="near-duplicates") == ["00003.png"] and found(filter="without caption") == ["00004.png"]
    assert found(filter="blurred", find="number 2") == []
    assert "like 00000.png" in page.get("/fragment/images", params={"filter": "near-duplicates"}).text


def test_filters_and_searches_are_never_sql(page, tmp_path: Path):
    for wrong in ("'", "%", "'; drop table images; --", "\\", "�", "a" * 10_000):
        answered = page.get("/fragment/images", params={"filter": wrong, "order": wrong, "find": wrong, "page": wrong})
        assert answered.status_code == 200 and 'class="error"' not in answered.text
