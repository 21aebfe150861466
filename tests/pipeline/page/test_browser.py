"""The pages in a real browser: Chromium from the system's packages, driven by selenium. Without them, these tests are skipped.

LATENTMILL_BROWSER names a Python that has selenium (the extra `browser`), if the one that runs the tests has none.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.page.report import write_report
from pipeline.page.site import Site
from tests import projects

CHROMIUM, DRIVER = (shutil.which(name) or "" for name in ("chromium", "chromedriver"))
PYTHON = os.environ.get("LATENTMILL_BROWSER", sys.executable)
FOUND = CHROMIUM and DRIVER and not subprocess.run([PYTHON, "-c", "import selenium"], capture_output=True, check=False).returncode
pytestmark = pytest.mark.skipif(not FOUND, reason="needs chromium, chromedriver and selenium (the extra `browser`)")
WIDTHS = (1280, 400)


def drive(address: str, folder: Path, changing: str = "") -> dict:
    words = [PYTHON, str(Path(__file__).with_name("drive.py")), address, str(folder), CHROMIUM, DRIVER]
    done = subprocess.run([*words, ",".join(map(str, WIDTHS)), changing], capture_output=True, text=True, timeout=projects.HANG)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("browser") / "project", tiny_weights, images=3)
    projects.edit(folder, "[train]\n", "[train.validation]\nshare = 0.34\nevery = 2\n\n[train]\n")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train", "samples")
    return folder


@pytest.fixture(scope="module")
def seen(folder, tmp_path_factory) -> dict:
    """What the browser saw while the page ran, and a stage ran in another process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shots, signal = Path(os.environ.get("LATENTMILL_SHOTS") or tmp_path_factory.mktemp("shots")), folder / "now"
    server = projects.command(folder, "view", "--no-open", "--port", str(port))
    script = (
        "import sys, time, pathlib; from tests import projects; f = pathlib.Path(sys.argv[1])\n"
        "while not (f / 'now').exists(): time.sleep(0.1)\n"
        "projects.add_image(f, 'late.png', seed=9); projects.build(f, 'images')"
    )
    stage = subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=projects.ROOT)
    try:
        projects.wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, server)
        return drive(f"http://127.0.0.1:{port}", shots, str(signal)) | {"port": port}
    finally:
        for process in (server, stage):
            process.kill()
            process.wait()


def test_every_page_loads_without_an_error_and_asks_nothing_of_another_machine(seen):
    for look in seen["looks"]:
        assert look["console"] == [] and look["errors"] == [], look
        own = (f"http://127.0.0.1:{seen['port']}/", "data:")
        assert all(address.startswith(own) for address in look["requests"]), look


def test_every_page_fits_its_width_and_every_picture_has_a_text(seen):
    for look in seen["looks"]:
        assert look["scroll"] <= look["width"] and look["nameless"] == 0, look


def test_a_caption_edited_in_the_browser_is_kept_in_the_project(seen, folder):
    assert seen["edited"] == {"said": "1 saved", "text": "edited <b>here</b>"}
    assert "edited <b>here</b>" in (folder / "captions.edits.jsonl").read_text()


def test_a_stage_in_another_process_moves_the_page_without_a_reload(seen):
    assert seen["moved"]


def test_the_report_works_from_the_disk(folder, tmp_path):
    path = write_report(Site(folder), tmp_path / "report.html")
    found = drive(path.as_uri(), tmp_path)
    assert found["charts"] >= 4 and found["console"] == []
