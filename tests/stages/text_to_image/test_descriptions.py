"""Captions by a model: a real vision-language model of random weights, and a server that the test makes."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline import runner
from pipeline.project.project import Project
from stages.text_to_image.descriptions import DescriptionsConfig, LocalModel
from tests import projects
from tests.vision_language import write_model

pytestmark = pytest.mark.slow


class Server:
    """An OpenAI-compatible server. It answers the colour of a picture's first pixel, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.pictures: list[bytes] = []
        self.answer: Any = None  # in place of the caption: a number is a status, another value the body
        self.stall_after = 10**9  # from this request on, no answer comes
        self.trickles = False  # the answer has no end
        self.stalled, self.free = threading.Event(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                (image,) = (part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url")
                data = base64.b64decode(image.partition(",")[2])
                server.asked.append(body)
                server.pictures.append(data)
                if len(server.asked) >= server.stall_after:
                    server.stalled.set()
                    server.free.wait(projects.HANG)
                pixel = Image.open(io.BytesIO(data)).convert("RGB").getpixel((0, 0))
                status = server.answer if isinstance(server.answer, int) else 200
                plain = {"model": "eye-1", "choices": [{"message": {"content": f"  a picture\nthat begins with {pixel} "}}]}
                text = json.dumps(plain if server.answer is None or status != 200 else server.answer, default=str)
                self.send_response(status)
                self.end_headers()
                while server.trickles and not server.free.wait(0.1):
                    self.wfile.write(b" ")
                self.wfile.write(server.answer if isinstance(server.answer, bytes) else text.encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.free.set()
    made.http.shutdown()


@pytest.fixture
def project(tmp_path: Path, server: Server, tiny_weights: Path) -> Path:
    """Four images. The first has a caption in a folder of captions, which [captions] names; the others have none."""
    folder = projects.make(tmp_path / "project", tiny_weights)
    for file in (folder / "images").glob("*.txt"):
        file.unlink()
    (folder / "words").mkdir()
    (folder / "words" / "picture0.txt").write_text("my own words")
    projects.edit(
        folder, "[captions]", f'[descriptions]\nmodel = "eye"\nserver = "{server.address}"\n\n[captions]\nfolder = "words"'
    )
    return folder


def run(folder: Path, *names: str, settings: tuple[str, ...] = ()) -> list[str]:
    console = projects.Silent()
    for name in names:
        runner.run(Project(folder, settings), name, console)
    return console.lines


def captions(folder: Path) -> dict[str, tuple[str, str]]:
    rows = {name: Project(folder).current(name).rows().to_pylist() for name in ("images", "captions")}
    paths = {row["image_id"]: row["path"] for row in rows["images"]}
    return {paths[row["image_id"]]: (row["source"], row["text"]) for row in rows["captions"] if row["role"] == "caption"}


def test_a_server_captions_the_images_that_have_no_caption_once_and_no_other(project: Path, server: Server) -> None:
    run(project, "images", "descriptions", "captions")
    assert len(server.asked) == 3 and len(set(server.pictures)) == 3
    found = captions(project)
    assert found.pop("picture0.png") == ("sidecar", "my own words")
    assert {source for source, _ in found.values()} == {"description"} and len({text for _, text in found.values()}) == 3
    assert all(text.startswith("a picture that begins with (") for _, text in found.values())
    (row, *_) = Project(project).current("descriptions").rows().to_pylist()
    assert (row["model"], row["prompt"]) == ("eye-1", server.asked[0]["messages"][0]["content"][0]["text"])
    projects.add_image(project, "new.png", seed=80)
    (project / "images" / "new.txt").unlink(missing_ok=True)
    (project / "words" / "picture1.txt").write_text("written later")
    run(project, "images", "descriptions", "captions")
    assert len(server.asked) == 4, "only the new image is captioned"
    assert captions(project)["picture1.png"] == ("sidecar", "written later")
    assert captions(project)["new.png"][0] == "description"


def test_after_a_kill_no_caption_is_written_twice(project: Path, server: Server) -> None:
    run(project, "images")
    server.stall_after = 2
    process = projects.command(project, "run", "descriptions", "--only")
    projects.wait_until(server.stalled.is_set, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = Project(project).folder("descriptions")
    server.stall_after = 10**9
    server.free.set()
    run(project, "descriptions")
    counts = [server.pictures.count(each) for each in set(server.pictures)]
    assert sorted(counts) == [1, 1, 2], "only the picture that was asked for when the process died is asked for again"
    assert kept.exists and Project(project).current("descriptions").rows().num_rows == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (500, r"picture1.png: http://127.0.0.1:\d+/v1/chat/completions answered 500: .* \(0 of 3 captions are written\)"),
        ({"error": "no such model"}, r"must answer choices with a message, got .*no such model"),
        ({"choices": [{"message": {"content": None}}]}, r"must answer a text, got null"),
        (b"[" * 60_000, r"must answer JSON"),
    ],
)
def test_a_wrong_answer_is_one_line_with_the_image(project: Path, server: Server, answer: Any, said: str) -> None:
    run(project, "images")
    server.answer = answer
    with pytest.raises(ValueError, match=said) as error:
        run(project, "descriptions")
    assert "\n" not in str(error.value)


def test_an_empty_answer_is_said_counts_as_no_caption_and_is_asked_for_again(project: Path, server: Server) -> None:
    server.answer = {"choices": [{"message": {"content": " \n"}}]}
    lines = run(project, "images", "descriptions")
    assert any("wrote nothing for 3 images" in line and "picture1.png" in line for line in lines)
    with pytest.raises(ValueError, match="3 of 4 images have no caption"):
        run(project, "captions")
    server.answer = None
    assert any("3 captions written" in line for line in run(project, "descriptions"))
    run(project, "descriptions", "captions")
    assert len(server.asked) == 6 and captions(project)["picture1.png"][0] == "description"


def test_a_server_that_is_silent_or_answers_without_an_end_times_out_and_what_was_written_is_kept(
    project: Path, server: Server
) -> None:
    run(project, "images")
    server.trickles = True
    with pytest.raises(ValueError, match=r"did not answer within 1 seconds; raise .* \(0 of 3 captions are written\)"):
        run(project, "descriptions", settings=("descriptions.timeout=1",))
    server.trickles, server.stall_after = False, 3
    with pytest.raises(ValueError, match=r"did not answer within 5 seconds; raise .* \(1 of 3 captions are written\)"):
        run(project, "descriptions", settings=("descriptions.timeout=5",))
    server.stall_after = 10**9
    run(project, "descriptions")
    assert len(server.asked) == 5


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('descriptions.server="http://example.com/v1"', "server must be on this machine"),
        ('descriptions.server="http://127.0.0.1:9/v1"', "cannot be reached .*: start the server"),
        ('descriptions.server=""', "descriptions.model must be a folder with a vision-language model"),
    ],
)
def test_a_wrong_setting_is_one_line(project: Path, setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(project, "images", "descriptions", settings=(setting,))
    lines = run(project, "descriptions", settings=('descriptions.model=""', 'descriptions.server=""'))
    assert any("no model is set" in line for line in lines), "that is no mistake"


def test_a_package_that_is_missing_is_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "eye").mkdir()
    (project / "eye" / "config.json").write_text("{}")
    for package in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=rf"the Python package {package}: pip install 'latentmill\[describe\]'"):
                LocalModel(DescriptionsConfig(model="eye"), project)


def test_a_vision_language_model_of_transformers_captions_without_a_server(project: Path, server: Server) -> None:
    write_model(project / "eye")
    settings = ('descriptions.server=""', "descriptions.most_tokens=5")
    run(project, "images", "descriptions", "captions", settings=settings)
    rows = Project(project, settings).current("descriptions").rows().to_pylist()
    assert len(rows) == 3 and not server.asked
    assert all(row["version"].startswith("transformers ") and row["model"] == "eye" and row["text"] for row in rows)
