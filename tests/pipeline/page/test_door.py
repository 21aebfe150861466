"""`latentmill view --listen`: what stands between the page and the own network."""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from pipeline.page.door import Door, address_of
from pipeline.page.studio import Studio, make_studio
from tests import projects

PASSWORD = "correct horse battery"
HOME = "https://192.168.1.20:8765"


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def page(tmp_path, clock) -> TestClient:
    app = make_studio(Studio(tmp_path), "secret", ("192.168.1.20",), Door(PASSWORD, lambda: clock.now))
    return TestClient(app, base_url=HOME, follow_redirects=False)


def enter(page: TestClient, password: str, **headers: str) -> tuple[int, str]:
    answer = page.post("/login", data={"password": password}, headers=headers)
    return answer.status_code, answer.text


def test_nothing_but_the_form_is_answered_without_the_password_and_the_cookie_is_for_tls_and_this_page_alone(page):
    for path in ("/", "/new", "/static/page.js", "/events", "/fragment/overview", "/p/x/", "/login", "/nothing"):
        answer = page.get(path)
        assert answer.status_code == 401 and "password" in answer.text and "secret" not in answer.text, path
    assert page.post("/do/discard", json={}, headers={"x-token": "secret"}).status_code == 401
    assert enter(page, "")[0] == enter(page, PASSWORD + "x")[0] == 401
    assert page.get("/", headers={"cookie": "__Host-session=wrong"}).status_code == 401


def test_who_gives_the_password_is_in_for_half_a_day(page, clock):
    answer = page.post("/login", data={"password": PASSWORD})
    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 303 and cookie.startswith("__Host-session=") and PASSWORD not in cookie
    for word in ("Secure", "HttpOnly", "SameSite=strict", "Path=/"):
        assert word in cookie
    assert "secret" in page.get("/").text and page.get("/fragment/overview").status_code == 200
    assert page.post("/do/discard", json={}).status_code == 403  # it needs the page's token too
    clock.now += 13 * 3600
    assert page.get("/").status_code == 401


def test_wrong_passwords_make_all_wait_longer_each_time_but_not_those_who_are_in(page, clock):
    page.post("/login", data={"password": PASSWORD})
    waits = []
    for _ in range(9):
        assert "wrong password" in enter(page, "wrong")[1]
        code, text = enter(page, PASSWORD)
        assert code == 401 and "wait" in text  # also the right one, so that guesses cannot go on
        waits.append(int(text.split("wait ")[1].split()[0]))
        assert page.get("/").status_code == 200
        clock.now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert enter(page, PASSWORD)[0] == 303


def test_another_site_cannot_even_try_a_password(page):
    for headers in ({"host": "evil.example"}, {"host": "127.0.0.1"}, {"origin": "http://192.168.1.20:8765"}):
        assert enter(page, PASSWORD, **headers)[0] == 403


def test_an_address_that_others_reach_is_refused():
    for address in ("0.0.0.0", "::", "8.8.8.8", "2606:4700::1111", "224.0.0.1", "::ffff:8.8.8.8", "no such.name", " "):
        with pytest.raises(ValueError, match=r"--listen .*such as 192\.168\.1\.20"):
            address_of(address)
    assert address_of("192.168.1.20") == "192.168.1.20" and address_of("fd00::1") == "fd00::1"


def test_without_password_and_tls_files_nothing_listens_and_one_line_says_why(tmp_path):
    def said(*words: object) -> str:
        code, out, text = projects.said("view", "--no-open", *map(str, words), str(tmp_path))
        assert code == 2 and text.count("\n") == 1 and not out
        return text

    assert "needs --password-file" in said("--listen", "127.0.0.1") and "needs --password-file" in said("--key", tmp_path / "key")
    secret, certificate, key = (tmp_path / name for name in ("password", "certificate", "key"))
    files = ("--listen", "127.0.0.1", "--password-file", secret, "--certificate", certificate, "--key", key)
    assert "no PEM files" in said(*files)
    if not shutil.which("openssl"):
        return
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", key, "-out", certificate)
    subprocess.run(["openssl", *map(str, made)], check=True, capture_output=True)
    assert "No such file" in said(*files)
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    assert f"chmod 600 {secret}" in said(*files)
    secret.chmod(0o600)
    secret.write_text("short")
    assert "12 characters or more" in said(*files)
