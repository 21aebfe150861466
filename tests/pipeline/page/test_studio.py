"""The page of a folder of projects: each with its state and its own pages, and new ones made from uploaded files."""

from __future__ import annotations

import functools
import html
import io
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

import pillow_heif
from PIL import Image
from starlette.testclient import TestClient

from pipeline.commands.init import new_project
from pipeline.commands.query import answer
from pipeline.page import studio
from pipeline.page.draft import safe_paths
from pipeline.page.studio import Studio, make_studio
from pipeline.project.project import Project
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
    text = html.unescape(page.get("/fragment/overview").text)
    assert "1 captions missing" in text
    assert "damaged/project.toml: not valid TOML" in text
    addresses = re.findall(r'<a href="([^"]+)">', text)
    assert addresses == ["new", "p/cats/", "p/damaged/", "p/old/my%20dogs/"]
    assert page.get(f"/{addresses[1][:-1]}").url.path == "/p/cats/"
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


# New projects


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(studio, "PIPELINE", replace(studio.PIPELINE, models="tests.pipeline.page.test_studio:no_models"))
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def no_models(budget: int) -> list[dict]:
    facts = {"name": "micro", "title": "micro", "licence": "free", "terms": "", "hub": "", "bytes": 0}
    return [facts | {"fits": {768: "fits"}}]


def served(folder: Path) -> TestClient:
    return TestClient(make_studio(Studio(folder), "secret"), base_url=HOME)


def do(client: TestClient, action: str, body: object, headers: dict[str, str] = TOKEN) -> tuple[int, dict]:
    got = client.post(f"/do/{action}", content=json.dumps(body), headers=headers)
    return got.status_code, got.json() if got.status_code == 200 else {"said": got.text}


def put(client: TestClient, key: str, at: int, content: bytes, headers: dict[str, str] = TOKEN) -> tuple[int, str]:
    got = client.post(f"/part/{key}?at={at}", content=content, headers=headers)
    return got.status_code, got.text


def upload(client: TestClient, files: dict[str, bytes], part: int = 1000) -> None:
    """As the page does."""
    code, told = do(client, "announce", {"files": [[name, len(content), 7] for name, content in files.items()]})
    assert code == 200, told
    for (key, at), content in zip(told["have"], files.values(), strict=True):
        while key and at < len(content):
            code, text = put(client, key, at, content[at : at + part])
            assert code == 200, text
            at = json.loads(text)["have"]


@functools.cache  # it is random
def picture(number: int = 0, kind: str = "PNG") -> bytes:
    pillow_heif.register_heif_opener()
    out = io.BytesIO()
    Image.effect_noise((96 + number, 64), 50).convert("RGB").save(out, kind)
    return out.getvalue()


def test_uploaded_files_become_a_project_as_init_makes_it_and_nothing_is_in_its_place_before(empty, tmp_path):
    page = served(empty)
    files = {
        "cats/a.png": picture(1),
        "cats/a.txt": b"a cat",
        "cats/.DS_Store": b"hidden",
        "cats/photo.HEIC": picture(2, "HEIF"),
        "cats/broken.jpg": b"no picture",
        "cats/empty.txt": b"",
    }
    upload(page, files)
    upload(page, {"cats/a.png": picture(3), "cats/a.txt": b"another cat"})  # other files of the same names
    assert [path.name for path in empty.iterdir()] == [".new-project"]
    shown = page.get("/fragment/new").text
    assert "7 files" in shown and "cats/a 2.png" in shown and "DS_Store" not in shown
    code, told = do(page, "create", {"name": "my cats", "trigger": "ohwx", "preset": "style", "family": "micro"})
    assert (code, told["go"]) == (200, "p/my%20cats/"), told
    folder = empty / "my cats"
    assert {path.name: path.read_bytes() for path in (folder / "images" / "cats").iterdir()} == {
        name.removeprefix("cats/"): content for name, content in files.items() if "DS_Store" not in name
    } | {"a 2.png": picture(3), "a 2.txt": b"another cat"}
    new_project(empty / "x", {"images": str(folder / "images"), "family": "micro", "preset": "style", "trigger": "ohwx"})
    by_init = (empty / "x" / "project.toml").read_text()
    assert (folder / "project.toml").read_text() == by_init.replace("../my cats/images", "images")
    projects.build(folder, "images", "captions")
    rows = {row["path"]: row["rejected"] for row in answer(Project(folder), "select path, rejected from images").to_pylist()}
    assert rows == {"cats/a.png": None, "cats/a 2.png": None, "cats/photo.HEIC": None, "cats/broken.jpg": "unreadable"}
    texts = answer(Project(folder), "select text from captions where role = 'caption' order by text").to_pylist()
    assert [row["text"] for row in texts] == ["ohwx", "ohwx, a cat", "ohwx, another cat"]
    assert "No files yet" in page.get("/fragment/new").text and "my cats" in page.get("/fragment/overview").text


def test_a_file_that_was_cut_goes_on_where_it_was_after_a_restart_and_from_two_servers(empty):
    first, content = served(empty), picture(5)
    _, told = do(first, "announce", {"files": [["a.png", len(content), 7]]})
    ((key, _),) = told["have"]
    assert put(first, key, 0, content[:1000]) == (200, '{"have":1000}')
    other = served(empty)  # another server, or the same after a kill
    assert do(other, "announce", {"files": [["a.png", len(content), 7]]})[1]["have"] == [[key, 1000]]
    assert "1 not here as a whole" in other.get("/fragment/new").text
    code, told = do(other, "create", {"name": "a", "family": "micro"})
    assert code == 400 and "choose them again" in told["said"] and not (empty / "a").exists()
    assert put(other, key, 1000, content[1000:1500]) == (200, '{"have":1500}')
    assert put(first, key, 1000, content[1000:1800]) == (200, '{"have":1500}')  # told where to go on
    assert put(first, key, 1500, content[1500:] + b"x")[0] == 400 and put(first, key, 1500, b"")[0] == 400
    assert put(first, key, 1500, content[1500:]) == (200, f'{{"have":{len(content)}}}')
    assert (empty / ".new-project" / "project" / "images" / "a.png").read_bytes() == content
    assert do(first, "create", {"name": "a", "family": "micro"})[0] == 200
    assert do(other, "create", {"name": "a", "family": "micro"})[1]["said"].endswith("exists already: choose another name")
    assert do(other, "create", {"name": "b", "family": "micro"})[1]["said"] == "add pictures first"
    assert put(other, key, 0, content)[0] == 400


STORED = {
    "../../etc/passwd.png": "_/_/etc/passwd.png",
    "/etc/a.png": "_/etc/a.png",
    "C:\\x\\..\\a.png": "C__x_.._a.png",
    "a\n\x00\x1b[31m\u202egnp.png": "a___[31m_gnp.png",
    "con.png": "_con.png",
    "LPT1": "_LPT1",
    "ende. ": "ende",
    "cafe\u0301.png": "caf\u00e9.png",
    "\ud800.png": "_.png",
    "a//b.png": "a/_/b.png",
    "👩\u200d👧.png": "👩\u200d👧.png",
}


def test_a_name_is_made_safe_and_lies_below_the_pictures(empty):
    upload(served(empty), {name: stored.encode() for name, stored in STORED.items()})
    images = empty / ".new-project" / "project" / "images"
    found = {path.relative_to(images).as_posix(): path.read_text() for path in images.rglob("*") if path.is_file()}
    assert found == {stored: stored for stored in STORED.values()}


def test_equal_names_and_long_ones_stay_apart_and_captions_stay_with_their_pictures():
    long = "ä" * 300
    names = safe_paths(
        ["a.png", "A.PNG", "a.txt", "cafe\u0301.png", "caf\u00e9.png", f"{long}.png", f"{long}.txt"], {"a.mask.png"}
    )
    assert names[:3] == ["a.png", "A 2.PNG", "a.txt"] and names[3:5] == ["caf\u00e9.png", "caf\u00e9 2.png"]
    assert names[5].removesuffix(".png") == names[6].removesuffix(".txt") and max(len(name.encode()) for name in names) <= 200
    taken = {"a.png", "b.png"}
    assert safe_paths(["a.png", "a.txt", "b.mask.png"], taken) == ["a 2.png", "a 2.txt", "b.mask.png"]


TOO_MUCH: list[tuple[object, str]] = [
    ([["film.mov", 10 * 10**9, 7]], "film.mov: 10 GB, more than the 4 GB that one file may have"),
    ([[f"{n}.tar", 4 * 10**9, 7] for n in range(60)], "in all"),
    ([[f"{n}.png", 0, 7] for n in range(20_001)], "more than the 20000"),
    ([["a/b/c/d/e/f/g/h/i.png", 1, 7]], "folders deep"),
    ([["a", 1, 7], ["a/b.png", 1, 7]], "the name of a folder"),
    ([["a.png", -1, 7]], "must be [path"),
    ([["a.png", True, "x"]], "must be [path"),
    ([], "must be a list"),
    ("a.png", "must be a list"),
    ([["a.png", 2 * 10**6, 7]], "free 1 MB more"),
]


def test_what_cannot_be_uploaded_or_has_no_room_on_the_disk_is_one_line_before_the_first_byte(empty, monkeypatch):
    for files, reason in TOO_MUCH:
        if "free" in reason:
            monkeypatch.setattr("pipeline.store.disk.free_bytes", lambda folder: 10**6)
        code, told = do(served(empty), "announce", {"files": files})
        assert code == 400 and reason in told["said"] and "\n" not in told["said"]
    assert not [path for path in empty.rglob("*") if path.is_file() and path.name != "lock"]


MANY = 60


def test_many_uploads_at_once_are_all_stored(empty):
    page = served(empty)
    _, told = do(page, "announce", {"files": [[f"{n}.txt", 4, 7] for n in range(MANY)]})
    keys = [key for key, _ in told["have"]]
    with page, ThreadPoolExecutor(50) as pool:
        codes = list(pool.map(lambda pair: put(page, pair[1], 0, f"{pair[0]:04}".encode())[0], enumerate(keys)))
    assert set(codes) == {200}
    images = empty / ".new-project" / "project" / "images"
    assert all((images / f"{n}.txt").read_text() == f"{n:04}" for n in range(MANY))


NAMES = [{"name": name} for name in ("", "..", "../x", "a/b", ".x", "a\nb", "con", "x" * 300, "taken")]


def test_a_name_or_a_project_that_init_refuses_is_one_line_and_its_files_stay(empty):
    page = served(empty)
    upload(page, {"a.png": picture()})
    (empty / "taken").mkdir()
    others = ({"family": "nothing"}, {"preset": "nothing"}, {"trigger": "a\nb"}, {"trigger": 3}, {"preset": "edit"})
    for field in (*NAMES, *others):
        code, told = do(page, "create", {"name": "cats", "family": "micro", **field})
        assert code == 400 and "\n" not in told["said"], (field, told)
    assert not list(empty.parent.glob("*.toml")) and not (empty / "taken" / "images").exists()
    assert not (empty / "cats").exists() and "1 file," in page.get("/fragment/new").text


def test_another_site_uploads_nothing_and_makes_no_project(empty):
    page = served(empty)
    upload(page, {"a.png": picture()})
    ((key, _),) = do(page, "announce", {"files": [["b.png", 4, 7]]})[1]["have"]
    before = sorted(empty.rglob("*"))
    for headers in ({}, {"x-token": "wrong"}, TOKEN | {"origin": "http://evil.example"}, TOKEN | {"host": "evil.example"}):
        for action, body in (("announce", {"files": [["c.png", 4, 7]]}), ("create", {"name": "cats"}), ("discard", {})):
            assert do(page, action, body, headers)[0] == 403
        assert put(page, key, 0, b"abcd", headers)[0] == 403
    assert sorted(empty.rglob("*")) == before


def test_a_list_of_files_that_was_damaged_or_edited_is_one_line_everywhere(empty):
    page = served(empty)
    for damage in ("[", '{"key": "../x", "name": "a", "size": 1}', '{"key": "a", "name": "../x", "size": 1}', '{"a": 1}'):
        upload(page, {"a.png": picture()})
        (empty / ".new-project" / "files.jsonl").write_text(damage)
        assert "delete" in page.get("/fragment/new").text
        for action, body in (("announce", {"files": [["c.png", 4, 7]]}), ("create", {"name": "cats", "family": "micro"})):
            code, told = do(page, action, body)
            assert code == 400 and "to begin anew" in told["said"] and "\n" not in told["said"]
        assert do(page, "discard", {})[0] == 200 and "No files yet" in page.get("/fragment/new").text


def test_no_file_is_written_through_a_link(empty, tmp_path):
    (tmp_path / "outside").mkdir()
    for place in (".new-project/project/images", ".new-project/parts", ".new-project/project/images/a"):
        page = served(empty)
        shutil.rmtree(empty / ".new-project", ignore_errors=True)
        (empty / place).parent.mkdir(parents=True, exist_ok=True)
        (empty / place).symlink_to(tmp_path / "outside")
        code, told = do(page, "announce", {"files": [["a/b.txt", 1, 7]]})
        if code == 200:
            code, told["said"] = put(page, told["have"][0][0], 0, b"x")
        assert code == 400 and "is a link" in told["said"]
        assert not list((tmp_path / "outside").iterdir())


# Two servers and two tabs


def test_two_servers_on_one_project_lose_no_job_and_no_edit(folder):
    pages, queue = [served(folder), served(folder)], Queue(folder / "cats")
    queue.pause()
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda n: pages[n % 2].post("/p/cats/do/train", json={}, headers=TOKEN).status_code, range(12)))
    assert set(codes) == {200} and [job.number for job in queue.jobs()] == list(range(1, 13))
    assert pages[0].post("/p/cats/do/cancel", json={"job": 1}, headers=TOKEN).status_code == 200
    second = pages[1].post("/p/cats/do/cancel", json={"job": 1}, headers=TOKEN)
    assert second.status_code == 400 and second.text == "job 1 is cancelled"
