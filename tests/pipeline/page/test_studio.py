"""The page of a folder of projects: each with its state and its own pages, and new ones made from uploaded files."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from pipeline.page.studio import Studio, make_studio
from pipeline.queue import Queue
from tests import projects

HOME = "http://127.0.0.1:8765"
TOKEN = {"x-token": "secret"}


@pytest.fixture
def folder(tmp_path, tiny_weights, monkeypatch) -> Path:
    """Two projects, one of them in a folder of its own, with a picture without caption, and one whose settings are damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cats = projects.make(tmp_path / "studio" / "cats", tiny_weights, images=2)
    (cats / "images" / "picture0.txt").unlink()
    projects.edit(cats, "[captions]", '[captions]\nmissing = "skip"')
    projects.make(tmp_path / "studio" / "old" / "my dogs", tiny_weights, images=1)
    (tmp_path / "studio" / "damaged").mkdir()
    (tmp_path / "studio" / "damaged" / "project.toml").write_text("x = [")
    return tmp_path / "studio"


@pytest.fixture
def page(folder) -> TestClient:
    return TestClient(make_studio(Studio(folder), "secret"), base_url=HOME)


def test_each_project_below_the_folder_is_shown_with_its_state_and_has_its_own_pages(page, folder):
    projects.build(folder / "cats", "images", "captions")
    queue = Queue(folder / "cats")
    queue.folder.mkdir()
    now = {"stage": "train", "done": 312, "total": 1000, "unit": "steps", "before": 0, "began": 0.0, "at": 100.0}
    (queue.folder / "1.progress").write_text(json.dumps(now))
    job = {"number": 1, "words": ["run", "samples"], "state": "running"}
    (queue.folder / "jobs.json").write_text(json.dumps({"jobs": [job], "paused": False, "last": 1}))
    with (queue.folder / "worker").open("w") as worker:
        import fcntl

        fcntl.flock(worker, fcntl.LOCK_EX)
        text = html.unescape(page.get("/fragment/overview").text)
    assert "train: 312 of 1000 steps" in text and "1 captions missing" in text
    assert "damaged/project.toml: not valid TOML" in text
    addresses = re.findall(r'<a href="([^"]+)">', text)
    assert addresses == ["p/cats/", "p/damaged/", "p/old/my%20dogs/"]
    assert page.get(f"/{addresses[0][:-1]}").url.path == "/p/cats/"
    shell = page.get("/p/old/my%20dogs/images").text
    assert "<h1>my dogs</h1>" in shell and 'href="/">Projects' in shell
    for address in re.findall(r'(?:src|href)="([^"#]+)"', shell):
        if not address.startswith("data:"):
            assert page.get(f"/p/old/my%20dogs/{address}" if address != "/" else "/").status_code == 200, address
    assert "picture1.png" in page.get("/p/cats/fragment/images").text
    assert page.get("/p/cats/picture/image_folder/picture0.png?size=160").content[:4] == b"RIFF"
    assert page.get("/p/damaged/").status_code == 400 and page.get("/p/nothing/").status_code == 404


def test_a_projects_pages_keep_their_guards_below_a_path(page, folder):
    for path in ("/", "/p/cats/", "/p/cats/fragment/images", "/events"):
        assert page.get(path, headers={"host": "evil.example"}).status_code == 403
        assert page.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    for headers in ({}, {"x-token": "wrong"}, TOKEN | {"origin": "http://evil.example"}):
        assert page.post("/p/cats/do/train", json={}, headers=headers).status_code == 403
    assert not Queue(folder / "cats").jobs()
    assert "default-src 'none'" in page.get("/p/cats/").headers["content-security-policy"]
    for path in (
        "/p/cats/../damaged/project.toml",
        "/p/cats/export/..%2fproject.toml",
        "/p/cats/picture/image_folder/..%2fproject.toml",
    ):
        assert page.get(path).status_code in (400, 404)


@pytest.mark.parametrize(("name", "reason"), [("pictures", "no project in it"), ("nothing", "no such folder")])
def test_a_folder_without_projects_is_shown_only_if_it_is_empty(tmp_path, name, reason):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"")
    code, _, said = projects.said("view", "--no-open", str(tmp_path / name))
    assert code == 2 and reason in said and said.count("\n") == 1
    (tmp_path / "empty").mkdir()
    empty = TestClient(make_studio(Studio(tmp_path / "empty"), ""), base_url=HOME)
    assert "No project yet" in empty.get("/fragment/overview").text
