"""The local page: what every page shows, what an edit changes, and which requests are refused."""

from __future__ import annotations

import asyncio
import base64
import html
import io
import json
import re
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from httpx2 import Response
from PIL import Image
from starlette.testclient import TestClient

from pipeline.commands.query import Limits, answer
from pipeline.page.app import MOST_BYTES, make_app
from pipeline.page.command import write_report
from pipeline.page.site import Site
from pipeline.project.project import Project
from pipeline.queue import Queue
from pipeline.store.lock import locked, texts_lock
from pipeline.store.table import Writer
from schemas.text_to_image import DESCRIPTIONS
from tests import projects

HOME = "http://127.0.0.1:8765"
TOKEN = {"x-token": "secret"}
SNOW = "a fox, on snow"
SCRIPT = '"><script>alert(1)</script>'
PAGES = ("overview", "images", "captions", "training", "samples", "compare", "scores", "draw", "export", "sql")


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    """A project whose images, captions and buckets are built; one caption and one file name hold a script."""
    folder = projects.make(tmp_path_factory.mktemp("page") / "project", tiny_weights, images=3)
    projects.add_image(folder, "<img src=x onerror=alert(2)>.png", seed=7, caption=f"a fox, {SCRIPT}")
    projects.add_image(folder, "more.png", seed=8, caption=SNOW)
    (folder / "images" / "broken.png").write_text("no picture")
    (folder / "secret.txt").write_text("secret")
    Image.linear_gradient("L").resize(projects.SIZES[0]).save(folder / "images" / "picture0.mask.png")
    projects.edit(folder, "[embeddings]", '[latents]\nmask = "file"\n\n[embeddings]')
    projects.build(folder, "images", "captions", "buckets", "latents")
    return folder


@pytest.fixture
def folder(built, tmp_path) -> Path:
    shutil.copytree(built, tmp_path / "project", copy_function=shutil.copy2, symlinks=True)
    return tmp_path / "project"


@pytest.fixture
def page(folder) -> TestClient:
    return TestClient(make_app(Site(folder), "secret"), base_url=HOME)


def texts(page: TestClient) -> dict[str, str]:
    shown = page.get("/fragment/captions").text
    found = re.findall(r'data-key="([^"]+)" data-before="([^"]*)"', shown)
    return {key: html.unescape(text) for key, text in found}


def on_snow(page: TestClient) -> str:
    """The key of the caption of more.png."""
    return next(key for key, text in texts(page).items() if text == SNOW)


def write(page: TestClient, key: str, before: str, text: str | None, headers=TOKEN) -> Response:
    return page.post("/edit/captions", json={key: {"before": before, "text": text}}, headers=headers)


def test_every_page_answers_without_an_error_escapes_what_files_say_and_home_says_rows_and_size_of_every_table(page, folder):
    for name in PAGES:
        shell = page.get("/" if name == "overview" else f"/{name}")
        fragment = page.get(f"/fragment/{name}")
        assert shell.status_code == fragment.status_code == 200
        assert 'class="error"' not in fragment.text
        for text in (shell.text, fragment.text):
            assert "<script>alert" not in text and "<img src=x" not in text
        assert "default-src 'none'" in shell.headers["content-security-policy"]
        assert not re.search(r"https?://", shell.text + fragment.text)
    cells = [re.sub(r"<[^>]*>|\s+", " ", cell).strip() for cell in page.get("/fragment/overview").text.split("<td>")]
    for name in Project(folder).listed:
        rows, size, state = cells[cells.index(name) + 1 :][:3]
        assert rows.isdecimal() and re.fullmatch(r"[\d.]+ k?M?B", size) and state, name
    assert any(cell.startswith("up to date") for cell in cells)


def test_the_page_about_an_image_shows_its_crops_and_what_became_of_it(page):
    text = page.get("/fragment/one", params={"key": "picture0.png"}).text
    assert text.count("<rect") == 2 and "96 px" in text and "picture number 0" in text
    masks = re.findall(r'src="data:image/webp;base64,([^"]+)" alt="mask of the crop at \d+ x \d+: white is trained on"', text)
    assert len(masks) == 2
    with Image.open(io.BytesIO(base64.b64decode(masks[0]))) as mask:
        assert mask.convert("L").getpixel((0, 0)) < 100 and mask.convert("L").getpixel((0, mask.height - 1)) > 150
    assert page.get("/fragment/one", params={"key": "nothing"}).status_code == 404


def test_a_picture_is_left_out_or_repeated_on_its_page_in_the_settings_that_are_there(page, folder):
    shown = page.get("/fragment/one", params={"key": "picture1.png"}).text
    assert 'data-editor="captions"' in shown and shown.count("<textarea") == 1 and 'name="times"' in shown
    assert 'name="times"' not in page.get("/fragment/one", params={"key": "broken.png"}).text
    before = (folder / "project.toml").read_text()
    assert do(page, "rate", key="picture1.png", times="0") == (200, '{"said":"left out, from the next run on"}')
    assert do(page, "rate", key="more.png", times="2.5")[0] == 200
    assert Project(folder).config.sections["train"].data.repeats == {"picture1.png": 0, "more.png": 2.5}
    assert 'name="times" inputmode="decimal" size="6" value="2.5"' in page.get("/fragment/one", params={"key": "more.png"}).text
    for key, times, reason in (
        ("broken.png", "2", "is not trained on"),
        ("../secret.txt", "2", "is not trained on"),
        ("more.png", "many", "must be a number"),
        ("more.png", "1e9", "got 1000000000"),
    ):
        code, text = do(page, "rate", key=key, times=times)
        assert code == 400 and reason in text and "\n" not in text, text
    (folder / "images" / "more.png").write_text("no picture any more")
    projects.build(folder, "images")
    assert 'name="times"' in page.get("/fragment/one", params={"key": "more.png"}).text, "training would refuse the name"
    assert do(page, "rate", key="picture1.png", times="")[0] == do(page, "rate", key="more.png", times=" ")[0] == 200
    assert Project(folder).config.sections["train"].data.repeats is None
    assert set(before.splitlines()) <= set((folder / "project.toml").read_text().splitlines())


def test_what_the_model_of_descriptions_wrote_is_a_suggestion_beside_another_text(page, folder):
    (key, before), *_ = texts(page).items()
    row = {
        "image_id": key.partition(":")[0],
        "path": "",
        "text": "a <b>cat</b>",
        "prompt": "",
        "model": "",
        "version": "",
        "seconds": 1,
    }
    project = Project(folder)
    with Writer(project.current("descriptions"), {"stage": "descriptions"}) as writer:
        writer.append(pa.RecordBatch.from_pylist([row], schema=DESCRIPTIONS.batch))
        writer.finish(None, {})
    used = 'data-use="a &lt;b&gt;cat&lt;/b&gt;"'
    assert used in page.get("/fragment/captions").text
    assert page.post("/edit/captions", json={key: {"before": before, "text": "a <b>cat</b>"}}, headers=TOKEN).status_code == 200
    assert used not in page.get("/fragment/captions").text


def test_pictures_are_small_nothing_but_pictures_is_served_and_no_path_escapes_from_its_folder(page, folder):
    good = page.get("/picture/image_folder/picture0.png", params={"size": "160"})
    assert good.headers["content-type"] == "image/webp" and good.content[:4] == b"RIFF"
    assert page.get("/picture/image_folder/broken.png").headers["content-type"] == "image/svg+xml"
    assert b"picture number" not in page.get("/picture/image_folder/picture0.txt").content
    (folder / "images" / "link.png").symlink_to("/etc/passwd")
    for name in [
        "image_folder/../secret.txt",
        "image_folder/..%2fproject.toml",
        "image_folder/%2e%2e/project.toml",
        "image_folder//etc/passwd",
        "image_folder/%00",
        "samples/../../project.toml",
        "samples/../images/picture0.png",
        "samples/x/../../../secret.txt",
        "train/",
        "nothing/at/all",
        "image_folder/link.png",
        "image_folder/",
    ]:
        answered = page.get(f"/picture/{name}", params={"size": "file"})
        assert answered.status_code == 404 and b"secret" not in answered.content and b"root:" not in answered.content
        assert (b"A link out of the folder" in answered.content) == name.endswith("link.png")


FOREIGN = (
    *({"host": host} for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", "")),
    *({"sec-fetch-site": site} for site in ("cross-site", "same-site")),
    *({"origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:9999")),
)


def test_other_hosts_other_sites_and_an_edit_without_the_token_of_the_page_are_refused(page, folder):
    for headers in FOREIGN:
        for path in ("/", "/fragment/captions", "/picture/image_folder/picture0.png"):
            assert page.get(path, headers=headers).status_code == 403, headers
        for change in ("edit", "replace", "files"):
            assert page.post(f"/{change}/captions", json={}, headers=TOKEN | headers).status_code == 403, headers
    key, text = next(iter(texts(page).items()))
    for headers in ({}, {"x-token": b"wrong"}, {"x-token": "é".encode("latin-1")}):
        assert write(page, key, text, "new", headers).status_code == 403
    assert not (folder / "captions.edits.jsonl").exists()
    assert page.get("/edit/captions").status_code == 405


def test_an_edited_caption_changes_exactly_its_rows_and_no_file_of_the_image_folder(page, folder):
    def rows() -> dict[str, dict]:
        projects.build(folder, "captions")
        found = answer(Project(folder), "from captions where role = 'caption'").to_pylist()
        return {row["image_id"]: row for row in found}

    before, files = rows(), {path: path.read_bytes() for path in (folder / "images").iterdir()}
    key = on_snow(page)
    assert write(page, key, SNOW, "a wolf 🐺 on snow").status_code == 200
    assert texts(page)[key] == "a wolf 🐺 on snow"
    after = rows()
    (changed,) = [image for image in after if after[image] != before[image]]
    assert changed == key.split(":")[0]
    assert (after[changed]["text"], after[changed]["source"]) == ("a wolf 🐺 on snow", "edit")
    assert files == {path: path.read_bytes() for path in (folder / "images").iterdir()}
    assert write(page, key, "a wolf 🐺 on snow", None).status_code == 200
    assert rows() == before


def test_of_two_tabs_the_second_is_told_and_nothing_is_lost(page):
    key, text = next(iter(texts(page).items()))
    assert write(page, key, text, "first tab").status_code == 200
    other = next(other for other in texts(page) if other != key)
    edits = {key: {"before": text, "text": "second tab"}, other: {"before": texts(page)[other], "text": "another"}}
    answered = page.post("/edit/captions", json=edits, headers=TOKEN)
    assert answered.status_code == 409 and answered.json() == {"conflicts": {key: "first tab"}}
    assert texts(page)[key] == "first tab" and texts(page)[other] == "another"


def test_an_edit_that_another_process_or_the_disk_does_not_take_is_one_line(page, folder, monkeypatch):
    key, before = next(iter(texts(page).items()))
    with texts_lock(folder), monkeypatch.context() as patch:
        patch.setattr("pipeline.store.lock.PATIENCE", 0.05)
        answered = write(page, key, before, "a wolf")
    assert answered.status_code == 400 and "is being written by process" in answered.text
    assert not (folder / "captions.edits.jsonl").exists()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        answered = write(page, key, before, "a wolf")
    assert (answered.status_code, answered.text) == (400, "disk full; free some space and run again")
    assert write(page, key, before, "a wolf").status_code == 200


def test_the_button_writes_edits_into_caption_files_also_while_the_table_is_locked_and_its_undo_takes_them_back(page, folder):
    key = on_snow(page)
    files = {path: path.read_bytes() for path in (folder / "images").iterdir()}
    for undo, headers, status in ((False, {}, 403), (False, TOKEN, 400), (True, TOKEN, 400), (3, TOKEN, 400)):
        assert page.post("/files/captions", json={"undo": undo}, headers=headers).status_code == status
    write(page, key, SNOW, "a wolf")
    unwritten = '<button type="button" data-files="undo" disabled>'
    assert unwritten in page.get("/fragment/captions").text
    said = page.post("/files/captions", json={"undo": False}, headers=TOKEN)
    assert said.json() == {"said": "1 caption written into 1 file"}
    assert (folder / "images" / "more.txt").read_text() == "a wolf\n"
    assert texts(page)[key] == "a wolf" and ", 0 edited" in page.get("/fragment/captions").text
    assert unwritten not in page.get("/fragment/captions").text
    assert page.post("/files/captions", json={"undo": True}, headers=TOKEN).status_code == 200
    assert files == {path: path.read_bytes() for path in (folder / "images").iterdir()}
    assert texts(page)[key] == "a wolf" and ", 1 edited" in page.get("/fragment/captions").text
    with locked(Project(folder).current("captions").folder / "lock"):
        told = page.post("/files/captions", json={"undo": False}, headers=TOKEN).json()["said"]
    assert told.startswith("1 caption written into 1 file. The table captions is not up to date: ")
    assert "is being written by" in told and (folder / "images" / "more.txt").read_text() == "a wolf\n"


def test_a_text_a_replacement_or_a_body_that_cannot_be_used_is_refused_and_changes_no_caption(page, folder):
    key, before = next(iter(texts(page).items()))
    edits = [{key: {"before": before, "text": text}} for text in ("x" * 1_000_000, "", "   ", "\ud800", 3, ["a"])]
    wrong = (("a", "x" * 1_000_000), ("a fox, on snow", " "), ("", "x"), ("\ud800", "x"), ("a", "\ud800"), (["a"], "x"))
    replacements = [*({"find": find, "by": by} for find, by in wrong), {"find": "a"}, ["a", "b"]]
    for action, asked in (("edit", edits), ("replace", replacements)):
        for each in asked:
            answered = page.post(f"/{action}/captions", content=json.dumps(each), headers=TOKEN)
            assert answered.status_code == 400 and len(answered.text.splitlines()) == 1
    assert page.post("/edit/captions", content=b"x" * (MOST_BYTES + 1), headers=TOKEN).status_code == 413
    for body in (b"[]", b"{", b'{"nothing": {"before": "", "text": "x"}}', b"\xff", b'{"a": 1}', b"[" * 99_999):
        assert page.post("/edit/captions", content=body, headers=TOKEN).status_code == 400
    assert page.post("/edit/captions", content=b'{"\\ud800": {"before": ""}}', headers=TOKEN).status_code == 400
    assert page.post("/edit/training", content=b"{}", headers=TOKEN).status_code == 400
    assert not (folder / "captions.edits.jsonl").exists()


ENDLESS = "select count(*) from range(1000000) a, range(1000000) b, range(1000000) c"


def test_a_query_of_a_closed_tab_ends_and_other_pages_are_answered_meanwhile(page, folder, monkeypatch):
    answered: list[int] = []

    async def is_disconnected(request):
        # `page` answers in a loop of its own.
        answered.append(await asyncio.to_thread(lambda: page.get("/fragment/overview").status_code))
        return True

    monkeypatch.setattr("starlette.requests.Request.is_disconnected", is_disconnected)
    monkeypatch.setattr("pipeline.page.site.LIMITS", Limits(3000.0))
    text = page.get("/fragment/sql", params={"sql": ENDLESS}).text
    assert answered and set(answered) == {200} and "the query took longer than" in text


def test_sql_is_answered_with_columns_of_equal_names_writes_nothing_and_mistakes_are_one_line(page, tmp_path, monkeypatch):
    for sql in ("copy (select 1) to '{out}'", "select 1; copy (select 1) to '{out}'", "drop view unused"):
        assert 'class="error"' in page.get("/fragment/sql", params={"sql": sql.format(out=tmp_path / "out")}).text
    assert not (tmp_path / "out").exists()
    assert "Did you mean" in page.get("/fragment/sql", params={"sql": "select * from imags"}).text
    text = page.get("/fragment/sql", params={"sql": "select 11 as a, 22 as a from range(2000); "}).text
    assert text.count(">a</th>") == 2 and "11" in text and "22" in text and "2000 rows" in text
    monkeypatch.setattr("pipeline.commands.query.MOST_VALUES", 5000)
    for sql in (
        "select range(1000) from range(20)",
        "select repeat('x', 200000) from range(9)",
        "select [range(99)] from range(99)",
    ):
        assert "more than 5,000 values" in page.get("/fragment/sql", params={"sql": sql}).text


def test_the_report_is_one_file_without_addresses_that_holds_its_pictures(folder, tmp_path):
    text = write_report(Site(folder), tmp_path / "report.html").read_text(encoding="utf-8")
    body = text[text.index("<body") : text.index("<dialog")]
    assert body.count("data:image/webp;base64,") >= 5
    assert not re.search(r'(src|href)="(/|http)', body)
    assert "<script>alert" not in body and "picture number 0" in body


@pytest.mark.timeout(300)  # with the lock held, it would wait for ever
def test_pages_are_answered_while_the_stage_of_an_edit_runs(page, monkeypatch):
    (key, before), *_ = texts(page).items()
    write(page, key, before, "a cat")
    answered: list[int] = []
    monkeypatch.setattr("pipeline.runner.run", lambda *_: answered.append(page.get("/fragment/captions").status_code))
    with page:  # one event loop for both requests
        assert page.post("/files/captions", json={"undo": False}, headers=TOKEN).status_code == 200
    assert answered == [200]


# Jobs from the page


@pytest.fixture
def held(folder, monkeypatch, tmp_path) -> Queue:
    """The queue of the project, paused: what the page adds does not begin."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    queue = Queue(folder)
    queue.pause()
    return queue


def do(client: TestClient, action: str, **body: object) -> tuple[int, str]:
    answer = client.post(f"/do/{action}", json=body, headers=TOKEN)
    return answer.status_code, answer.text


def test_buttons_and_forms_become_jobs_whose_texts_are_no_options(page, held, folder):
    assert do(page, "train")[0] == 200
    fields = {"argument": "--file /etc/passwd", "--adapter": "none", "--seed": "7 --file x", "--steps": ""}
    assert do(page, "form", page="draw", block=0, **fields, **{"--file": "/etc/passwd"})[0] == 200
    assert [job.words for job in held.jobs()] == [
        ("run", "samples"),
        ("generate", "--adapter=none", "--seed=7 --file x", "--", "--file /etc/passwd"),
    ]
    assert do(page, "form", page="export", block=1, **{"--which": "best", "--step": "6", "--style": "comfyui"})[0] == 200
    assert held.jobs()[-1].words == ("export", "--merged", "--which=best", "--step=6")
    names = "picture0.png\r\n\r\n more.png "
    assert do(page, "form", page="draw", block=0, **{"argument": "a fox", "--reference": names})[0] == 200
    given = [f"--reference={folder / 'images' / name}" for name in ("picture0.png", "more.png")]
    assert list(held.jobs()[-1].words) == ["generate", *given, "--", "a fox"]
    assert do(page, "cancel", job=4)[0] == 200
    shown = page.get("/fragment/overview").text
    assert "run samples" in shown and 'data-do="cancel" data-job="1"' in shown
    assert do(page, "first", job=2)[0] == do(page, "cancel", job=1)[0] == 200
    assert {job.number: job.state for job in held.jobs()} == {1: "cancelled", 2: "waiting", 3: "waiting", 4: "cancelled"}


DRAW = {"page": "draw", "block": 0}
WRONG: list[tuple[str, dict, str]] = [
    ("form", DRAW, "fill this in"),
    ("form", {**DRAW, "argument": "a fox", "--adapter": "/etc/passwd"}, "must be one of last, best"),
    ("form", {**DRAW, "argument": "a" * 2001}, "at most 2000 characters"),
    ("form", {**DRAW, "argument": "a", "--reference": "../secret.txt"}, "no picture image_folder/../secret"),
    ("form", {**DRAW, "argument": "a", "--reference": "/etc/passwd"}, "no picture"),
    ("form", {"page": "draw", "block": 1}, "no such form"),
    ("form", {"page": "nothing", "block": True}, "no such form"),
    ("cancel", {"job": "1"}, "a whole number"),
    ("cancel", {"job": 99}, "there is no job 99"),
    ("pause", {}, "no run of the present settings"),
    ("sample", {}, "run samples is not training now"),
    ("__class__", {}, "there is no action"),
]


def test_an_action_that_cannot_be_and_a_damaged_queue_are_one_line_and_no_job(page, held):
    for action, body, reason in WRONG:
        code, text = do(page, action, **body)
        assert code == 400 and reason in text and "\n" not in text, (action, body)
    assert not held.jobs()
    (held.folder / "jobs.json").write_text("[")
    assert "delete it to begin an empty one" in page.get("/fragment/overview").text
    assert do(page, "train")[0] == 400


def test_sample_now_ends_the_run_with_a_checkpoint_draws_and_goes_on_as_the_next_job(page, held, folder):
    projects.edit(folder, "steps = 6\n", "steps = 5000\n")
    projects.edit(folder, "checkpoint_every = 2", "checkpoint_every = 20")
    held.pause(False)
    assert do(page, "train")[0] == 200
    pause = []
    wait(lambda: pause.extend((folder / "tables" / "train").glob("*/artifacts")) or pause, held)
    (pause[0] / "pause").touch()
    wait(lambda: "paused" in held.log(1), held)
    assert do(page, "sample")[0] == 200
    assert [(job.state, job.words) for job in held.jobs()] == [("running", ("run", "samples")), ("waiting", ("run", "samples"))]
    (pause[0] / "pause").unlink(missing_ok=True)
    wait(lambda: held.jobs()[0].over and held.progress(2).get("stage") == "train", held)
    assert held.jobs()[0].state == "finished"
    (drawn,) = answer(Project(folder), "select max(step) as step from samples").to_pylist()
    assert 0 < drawn["step"] <= held.progress(2)["before"] < 5000
    shown = page.get("/fragment/overview").text
    assert "Sample now" in shown and re.search(r"step \d+: loss [\d.]+, [\d.e-]+ s a step, arrays take .* to use", shown)
    do(page, "cancel", job=2)
    wait(lambda: not held.works(), held)
    assert Site(folder).progress() == {"ended": "job 2, run samples: stopped"}


def wait(condition, queue: Queue) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < projects.HANG, [queue.jobs(), queue.log(1), queue.log(2)]
        time.sleep(0.05)


def test_downloads_are_the_files_of_exports_and_of_its_folders_alone(page, folder):
    exports = folder / "exports"
    for name in ("cats 1.safetensors", "hub/README.md", "hub/.hidden", ".temporary/config.json", "a/b/deep"):
        (exports / name).parent.mkdir(parents=True, exist_ok=True)
        (exports / name).write_bytes(name.encode())
    (exports / "link").symlink_to(folder / "secret.txt")
    (exports / "linked").symlink_to(folder / "images")
    shown = re.findall(r'href="export/([^"]*)"', page.get("/fragment/export").text)
    assert set(shown) == {"cats%201.safetensors", "hub/README.md"}
    for name in ("cats%201.safetensors", "hub/README.md"):
        good = page.get(f"/export/{name}")
        assert good.text == name.replace("%20", " ") and good.headers["content-disposition"].startswith("attachment")
    wrong = ("..%2fproject.toml", "hub/..%2f..%2fproject.toml", "link", "linked/picture0.png", "%2fetc%2fpasswd", "hub")
    for name in (*wrong, "%00", "hub/.hidden", ".temporary/config.json", "a/b/deep", "hub%2f%2fREADME.md%2f..", ""):
        assert page.get(f"/export/{name}").status_code == 404, name
    shutil.rmtree(exports)
    exports.symlink_to(folder / "images")
    assert page.get("/export/picture0.png").status_code == 404
