"""The pages in a real browser: Chromium from the system's packages, driven by selenium. Without it, these tests are skipped.

They see the example after a short run, and a project of 5,000 images and 20,000 steps. LATENTMILL_SHOTS names a folder for
screenshots.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from pipeline.commands.query import answer
from pipeline.page.command import write_report
from pipeline.page.site import Site
from pipeline.project.edit import edited
from pipeline.project.project import Project
from pipeline.queue import Queue
from tests import projects
from tests.pipeline.page.large import fill

CHROMIUM, DRIVER = (shutil.which(name) or "" for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver: apt install chromium-driver")
FOUND = find_spec("selenium_axe_python")
AXE = str(Path(FOUND.origin).parent / "axe-core" / "axe.min.js") if FOUND and FOUND.origin else ""
STEPS = 12
KEPT = 8  # images of the example
PAGES = ("overview", "images", "captions", "samples", "compare", "scores", "draw", "export", "settings", "sql")
MANY = ("images", "training", "samples")  # pages that grow with the project


@pytest.fixture(scope="module")
def drive() -> Iterator[Callable[..., dict]]:
    """A function that drives one browser over an address; see drive.py."""
    words = [sys.executable, str(Path(__file__).with_name("drive.py")), CHROMIUM, DRIVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stderr

        def tell(message: object) -> object:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, process.stderr.read()
            return json.loads(answer)

        def order(address: str, folder: Path | str = "", meanwhile: Callable[[], None] = bool, **asked: object) -> dict:
            usual = {"address": address, "folder": str(folder), "widths": [1280, 390], "axe": AXE, "follow": False, "once": []}
            if (answer := tell(usual | asked)) == "now":
                meanwhile()
                answer = tell("done")
            return answer

        yield order
        process.stdin.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the page of the project or projects in `folder`, served by a process of its own, which is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = projects.command(folder, "view", "--no-open", "--port", str(port), str(folder))
    try:
        projects.wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_weights) -> Path:
    """The example after a short run of a tiny model with held-out images."""
    folder = projects.copied(projects.ROOT / "data" / "projects" / "example", tmp_path_factory.mktemp("browser") / "example")
    lines = sorted((folder / "images" / "metadata.jsonl").read_text().splitlines(), key=lambda line: "fox.webp" not in line)
    (folder / "images" / "metadata.jsonl").write_text("\n".join(lines[:KEPT]))
    for line in lines[KEPT:]:
        (folder / "images" / json.loads(line)["file_name"]).unlink()
    text = (folder / "project.toml").read_text().partition("\n[scores]")[0]
    small = {"project.family": "tiny", "project.weights": str(tiny_weights), "project.commit_seconds": 0.0}
    small |= {"buckets.resolutions": [64], "samples.first_prompts": 2, "samples.steps": 2, "samples.width": 64}
    small |= {"train.steps": STEPS, "train.checkpoint_every": 6, "train.validation.share": 0.2, "train.validation.every": 6}
    (folder / "project.toml").write_text(edited(text, small | {"samples.height": 64}))
    projects.build(folder, "images", "captions", "checks", "buckets", "latents", "embeddings", "train", "samples")
    return folder


def shots(name: str) -> str:
    """The folder for screenshots, "" without LATENTMILL_SHOTS."""
    made = Path(os.environ["LATENTMILL_SHOTS"], name) if "LATENTMILL_SHOTS" in os.environ else None
    if made:
        made.mkdir(parents=True, exist_ok=True)
    return str(made or "")


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    """Of both projects: the example and "large"."""
    (folder.parent / "large").mkdir()
    fill(folder.parent / "large")
    with served(folder.parent) as address:
        yield address


@pytest.fixture(scope="module")
def seen(drive, address, folder) -> dict:
    def go_on() -> None:
        projects.edit(folder, f"steps = {STEPS}", f"steps = {2 * STEPS}")
        projects.build(folder, "train")

    narrow = ("overview", "images", "captions", "compare", "draw", "export", "one?key=fox.webp", "projects", "new-project")
    pages = dict.fromkeys((*PAGES, *narrow, "training"))  # the journey sees `narrow` narrow; the run is followed on the last
    more = {"once": [] if shots("") else narrow, "follow": True}
    return drive(f"{address}/p/{folder.name}", shots("example"), go_on, pages=[*pages], **more)


@pytest.fixture(scope="module")
def large(drive, address) -> dict:
    return drive(f"{address}/p/large", shots("large"), pages=MANY, widths=[390], axe="")


def test_pages_load_without_an_error_before_tables_and_charts_fit_their_width_and_ask_nothing_of_another_machine(
    seen, large, address
):
    for look in (*seen["looks"], *large["looks"]):
        assert look["console"] == [] and look["errors"] == [], look
        assert all(each.startswith((address + "/", "data:")) for each in look["requests"]), look
        assert look["overflow"] <= 0 and look["nameless"] == 0, look
        assert look["shown_ms"] is not None or look["page"] == "settings", look  # it comes whole
        assert look["page"] in ("training", "scores") or not any("plotly" in each for each in look["requests"]), look


def test_a_picture_is_enlarged_and_sql_is_asked_with_the_keyboard_alone(seen):
    assert seen["keyboard"]["samples"].startswith("ohwx, a chick") and seen["keyboard"]["sql"] == str(KEPT)


def test_a_caption_edited_in_two_tabs_keeps_both_texts_and_each_undo_goes_one_step_back(seen, folder):
    edited = seen["edited"]
    assert (edited["said"], edited["text"]) == ("1 saved", "edited <b>here</b>")
    assert "changed elsewhere" in edited["second"]
    assert (edited["mine"], edited["theirs"]) == ("edited there", "edited <b>here</b>")
    assert edited["undone"] == "edited <b>here</b>" and edited["back"]
    assert edited["in_sight"], "at the end of a long page, Save and what it says are seen"
    lines = (folder / "captions.edits.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["edited <b>here</b>", "edited there", "edited <b>here</b>", None]


def test_a_run_in_another_process_moves_the_charts_without_a_reload_and_leaves_the_focus(seen):
    assert seen["moved"]["same"] and seen["moved"]["focus"] == "Runs"
    assert seen["moved"]["before"] <= STEPS < seen["moved"]["after"]


def test_the_report_works_from_the_disk(drive, folder, tmp_path):
    path = write_report(Site(folder), tmp_path / "report.html")
    found = drive(path.as_uri())
    assert found["charts"] >= 4 and found["console"] == []


@pytest.fixture(scope="module")
def journey(drive, tmp_path_factory) -> Iterator[dict]:
    """What the two halves of a journey have seen, and the "folder" of its project."""
    import pillow_heif

    tmp_path = tmp_path_factory.mktemp("journey")
    for name in ("first", "second", "studio"):
        (tmp_path / name).mkdir()
    pictures = sorted((projects.ROOT / "data" / "projects" / "example" / "images").glob("*.webp"))[:4]
    for path in pictures[:3]:
        shutil.copy(path, tmp_path / "first")
        (tmp_path / "first" / path.name).with_suffix(".txt").write_text(path.stem)
    pillow_heif.from_pillow(Image.open(pictures[3]).convert("RGB")).save(tmp_path / "first" / "photo.heic")
    (tmp_path / "first" / "broken.jpg").write_text("no picture")
    shutil.copy(pictures[3], tmp_path / "second" / pictures[0].name)  # another picture of the same name
    files = [sorted(map(str, (tmp_path / name).iterdir())) for name in ("first", "second")]
    names = {path.name for path in pictures[:3]} | {"broken.jpg", "photo.heic", f"{pictures[0].stem} 2.webp"}
    folder = tmp_path / "studio" / "my cats"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        try:
            with served(tmp_path / "studio") as address:
                seen = drive(address, tmp_path, journey=files)
            with served(tmp_path / "studio") as address:
                yield {"before": seen, "after": drive(address, tmp_path, journey=[]), "folder": folder, "names": names}
        finally:
            if folder.exists():  # after a failure, its jobs would go on
                Queue(folder).pause()
                for job in Queue(folder).jobs():
                    if job.state in ("running", "waiting"):
                        Queue(folder).cancel(job.number)


def test_from_an_empty_folder_to_downloads_on_a_narrow_screen_by_the_keyboard_alone_and_past_a_killed_server(journey):
    seen, after, folder = journey["before"], journey["after"], journey["folder"]
    assert seen["uploaded"].startswith("9 files") and seen["saved"] == "5 settings saved" and seen["edited"] == "1 saved"
    assert 0 < seen["stopped"] <= seen["went_on"] <= seen["killed"] < after["went_on"] and seen["behind"] == "waiting"
    turned = seen["turned"]
    assert turned[0] == turned[2] != turned[1] and set(turned) <= set(journey["names"])
    assert Project(folder).config.sections["train"].data.repeats == {turned[0]: 2}
    assert after["told"].startswith("train: ") and after["runs"] == 2
    assert after["cards"] == {name: "bad" if name == "broken.jpg" else "" for name in journey["names"]}
    assert after["marked"].startswith("step 2 is the best")
    assert sorted(alt[:25] for alt in after["drawn"]) == [f"ohwx, a drawn fox, seed {n}" for n in range(2)]
    assert after["typed"] == "1" and re.fullmatch("job [45], generate .*: finished", after["live"])
    assert re.fullmatch("job [45], generate .*: finished", after["notified"])
    assert answer(Project(folder), "select count(reference_id) as n from generated").to_pylist() == [{"n": 2}]
    exported = {path.name: path for path in (folder / "exports").rglob("*") if path.is_file()}
    assert {"diffusion_pytorch_model.safetensors", "config.json", "README.md", "previews.png"} < set(exported)
    assert len(after["files"]) == len(exported)
    for name, path in exported.items():
        assert (folder.parent.parent / "downloads" / name).read_bytes() == path.read_bytes(), name
    jobs = Queue(folder).jobs()
    assert [job.state for job in jobs] == [*["stopped"] * 2, *["finished"] * 6] and {job.starts for job in jobs} == {1}
    states = ("new", "captions", "one", "home", "projects", "images", "compare", "draw", "export")
    assert {place: overflow for place, (overflow, _) in looks_of(journey).items()} == dict.fromkeys(states, 0)


@pytest.mark.skipif(not AXE, reason="needs axe-core: pip install selenium-axe-python")
def test_axe_finds_nothing_on_any_page_wide_or_narrow_light_or_dark_nor_in_any_state_of_that_journey(seen, journey):
    assert {(look["page"], look["width"]): look["violations"] for look in seen["looks"] if look["violations"]} == {}
    assert {place: found for place, (_, found) in looks_of(journey).items() if found} == {}


def looks_of(journey: dict) -> dict[str, list]:
    return journey["before"]["looks"] | journey["after"]["looks"]
