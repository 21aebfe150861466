"""Downloads with the real hub client from a local server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.project import weights
from pipeline.project.config import ProjectConfig
from pipeline.store.lock import locked
from stages.models.family import FOLDERS
from stages.text_to_image import families
from tests.projects import HANG

REPOSITORY = "someone/tiny"
COMMIT = "b" * 40


class Hub(ThreadingHTTPServer):
    """A server that acts as a hub with one repository."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.served: list[tuple[str, str, int]] = []  # method, file, first byte
        self.status: dict[str, int] = {}  # HTTP status of a file, or "" for the repository
        self.damaged = ""  # this file is sent with wrong bytes
        self.cut: dict[str, int] = {}  # after so many bytes, the next answer with this file ends
        self.stalled: dict[str, int] = {}  # after so many bytes, answers with this file wait until `released`
        self.released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def _begin(self, status: int, length: int = 0, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content_Length": str(length)}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self) -> None:
        hub, match = self.server, re.fullmatch(rf"/{REPOSITORY}/resolve/[^/]+/(.+?)(\?.*)?", self.path)
        name = match[1] if match else ""
        if not match and f"/api/models/{REPOSITORY}" in self.path and "" not in hub.status:
            rows: Any = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": each} for each in hub.files]}
            if "/tree/" in self.path:
                rows = [{"type": "file", "path": n, "size": len(d), "oid": "c" * 40} for n, d in hub.files.items()]
            content = json.dumps(rows).encode()
            self._begin(200, len(content), Content_Type="application/json")
            self.wfile.write(content)
            return
        if name not in hub.files:
            self._begin(hub.status.get("", 404), X_Error_Code="EntryNotFound" if match else "RepoNotFound")
            return
        first = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        hub.served.append((self.command, name, first))
        if status := hub.status.get(name):
            self._begin(status, X_Error_Code="GatedRepo" if status in (401, 403) else "")
            return
        data = hub.files[name]
        sent = data[:-1] + bytes([data[-1] ^ 1]) if name == hub.damaged else data
        about = {"X_Repo_Commit": COMMIT, "X_Linked_Size": str(len(data)), "Accept_Ranges": "bytes"}
        about |= dict.fromkeys(("ETag", "X_Linked_Etag"), f'"{hashlib.sha256(data).hexdigest()}"')
        about |= {"Content_Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        self._begin(206 if first else 200, len(data) - first, **about)
        if self.command == "HEAD":
            return
        until = hub.stalled.get(name, hub.cut.pop(name, len(data)))
        self.wfile.write(sent[first:until])
        if until < len(data):
            self.wfile.flush()
            if name in hub.stalled:
                hub.released.wait(HANG)
            self.connection.close()
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def server(tiny_weights: Path) -> Iterator[Hub]:
    names = [p for p in tiny_weights.rglob("*") if p.is_file()]
    made = Hub({p.relative_to(tiny_weights).as_posix(): p.read_bytes() for p in names})
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()


def fetch(server: Hub, folder: Path, repository: str = REPOSITORY, family: str = "klein-4b") -> str:
    """Load the transformer and the tokenizer, or the component `family`, from the hub. Return what was found or refused."""
    from huggingface_hub import constants

    timeout = 1 if server.stalled else HANG
    place = {"ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    place |= {"HF_HUB_CACHE": str(folder / "hf" / "hub"), "HF_HUB_DOWNLOAD_TIMEOUT": timeout, "HF_HUB_ETAG_TIMEOUT": timeout}
    place |= {"HUGGINGFACE_CO_URL_TEMPLATE": place["ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name, value in place.items():
            patch.setattr(constants, name, value)
        try:
            if family not in FOLDERS:
                found = weights.resolve(repository, folder, families.family(family), ["transformer", "tokenizer"])
            else:
                settings = ProjectConfig(family="tiny", components={family: repository})
                found = weights.find(settings, folder, families.family("tiny"), family, fetch=True)
        except ValueError as error:
            return f"refused {error}"
    return f"found {found}"


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def test_only_the_components_asked_for_are_fetched_and_nothing_twice(server: Hub, tmp_path: Path) -> None:
    line = fetch(server, tmp_path)
    assert line.startswith("found ")
    copy = Path(line.removeprefix("found "))
    assert (copy / WEIGHTS).read_bytes() == server.files[WEIGHTS]
    assert [path.relative_to(copy).as_posix() for path in copy.rglob("*.safetensors")] == [WEIGHTS]
    got = [name for method, name, _ in server.served if method == "GET"]
    assert len(got) == len(set(got))
    server.served.clear()
    assert fetch(server, tmp_path) == line and not server.served


@pytest.mark.parametrize("share", [0.0, 0.99])
def test_a_download_that_is_cut_is_completed_and_has_the_right_bytes(server: Hub, tmp_path: Path, share: float) -> None:
    server.cut[WEIGHTS] = int(share * len(server.files[WEIGHTS]))
    line = fetch(server, tmp_path)
    if line.startswith("refused"):
        assert "cannot be reached" in line
        line = fetch(server, tmp_path)
    assert Path(line.removeprefix("found ")).joinpath(WEIGHTS).read_bytes() == server.files[WEIGHTS]


@pytest.mark.parametrize(
    ("file", "status", "said"),
    [
        (WEIGHTS, 401, "is gated .*accept the licence at .*/someone/tiny, then run `hf auth login`"),
        (WEIGHTS, 403, "is gated .*accept the licence at .*/someone/tiny, then run `hf auth login`"),
        ("", 404, f"the hub has no repository {REPOSITORY}"),
        (WEIGHTS, 404, "^refused .*hf download"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_what_to_do(server: Hub, tmp_path: Path, file: str, status: int, said: str) -> None:
    server.status[file] = status
    line = fetch(server, tmp_path)
    assert re.search(said, line), line


@pytest.mark.parametrize("sound", [True, False])
def test_a_large_file_of_a_server_that_stalled_is_continued_unless_what_is_there_is_damaged_and_complete_files_are_kept(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    monkeypatch.setattr(weights, "LARGE", 10_500_000)  # the client writes 10 MB at a time
    content = server.files[WEIGHTS] = np.random.default_rng(0).bytes(12_000_000)
    server.stalled[WEIGHTS] = 11_000_000
    line = fetch(server, tmp_path)
    assert "someone/tiny sent nothing for 1 s (HF_HUB_DOWNLOAD_TIMEOUT): run the command again, what has arrived is kept" in line
    (partial,) = tmp_path.rglob("*.incomplete")
    kept = partial.stat().st_size
    assert 10_000_000 <= kept <= 11_000_000 and content.startswith(partial.read_bytes())
    complete = {name for method, name, _ in server.served if method == "GET"} - {WEIGHTS}
    server.stalled.clear()
    server.served.clear()
    if not sound:
        partial.write_bytes(bytes(9) + partial.read_bytes()[9:])
        assert "arrived damaged" in fetch(server, tmp_path)
    copy = Path(fetch(server, tmp_path).removeprefix("found "))
    assert (copy / WEIGHTS).read_bytes() == content and not list(tmp_path.rglob("*.incomplete"))
    got = [(name, first) for method, name, first in server.served if method == "GET"]
    assert [first for name, first in got if name == WEIGHTS] == ([kept] if sound else [kept, 0])
    assert not complete & {name for name, _ in got}


@pytest.mark.parametrize("large", [False, True])
def test_a_file_with_another_hash_is_refused_and_fetched_again(server: Hub, tmp_path: Path, monkeypatch, large: bool) -> None:
    monkeypatch.setattr(weights, "LARGE", 1 if large else weights.LARGE)
    data, server.damaged = server.files[WEIGHTS], WEIGHTS
    assert f"refused {WEIGHTS} arrived damaged: its sha256 is" in fetch(server, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= len(data)]
    server.damaged = ""
    assert (Path(fetch(server, tmp_path).removeprefix("found ")) / WEIGHTS).read_bytes() == data


def test_a_second_download_of_a_repository_at_the_same_time_is_refused_in_one_line(server: Hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weights, "LARGE", 1)
    place = tmp_path / "hf" / "hub" / ".locks" / f"models--{REPOSITORY.replace('/', '--')}" / "latentmill.lock"
    place.parent.mkdir(parents=True)
    with locked(place):
        assert fetch(server, tmp_path) == f"refused {REPOSITORY} is being downloaded by another process: wait for it or stop it"
    assert fetch(server, tmp_path).startswith("found ")


def test_a_tokenizer_that_lies_with_the_text_encoder_is_fetched_without_its_weights(server: Hub, tmp_path: Path) -> None:
    words = {name.partition("/")[2] for name in server.files if name.startswith("tokenizer/")}
    server.files = {name.replace("tokenizer/", "text_encoder/"): data for name, data in server.files.items()}
    server.files["model.safetensors"] = server.files[WEIGHTS]
    copy = Path(fetch(server, tmp_path, family="flux3-klein-base").removeprefix("found "))
    assert [path.relative_to(copy).as_posix() for path in copy.rglob("*.safetensors")] == [WEIGHTS]
    assert words <= {path.name for path in (copy / "text_encoder").iterdir()}


def test_a_component_is_fetched_alone_from_a_repository_of_its_own_and_from_one_of_a_whole_model(
    server: Hub, tmp_path: Path
) -> None:
    whole = dict(server.files)
    encoder = {name.partition("/")[2]: data for name, data in whole.items() if name.startswith("text_encoder/")}
    words = {name.partition("/")[2]: data for name, data in whole.items() if name.startswith("tokenizer/")}
    unneeded = {"model-Q4_K_M.gguf": b"x", "onnx/model.safetensors": b"x", "README.md": b"x"}
    server.files = {**words, **encoder, **unneeded}
    copy = Path(fetch(server, tmp_path, family="tokenizer").removeprefix("found "))
    assert {path.name for path in copy.iterdir()} == {*words, "config.json"}
    assert fetch(server, tmp_path, family="text_encoder") == f"found {copy}"
    assert {path.name for path in copy.iterdir()} == {*words, *encoder}
    server.served.clear()
    assert fetch(server, tmp_path, family="text_encoder") == f"found {copy}" and not server.served
    server.files = whole
    copy = Path(fetch(server, tmp_path / "other", family="text_encoder").removeprefix("found "))
    assert copy.name == "text_encoder" and {path.name for path in copy.parent.iterdir()} == {"text_encoder"}
