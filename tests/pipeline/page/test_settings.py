"""The screen of settings: what a change does, what is refused, and what is written into project.toml."""

from __future__ import annotations

import html
import re
import tomllib
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pipeline.page.app import make_app
from pipeline.page.settings import Items
from pipeline.page.site import Site
from pipeline.project import edit
from pipeline.project.config import FILE, load
from tests import projects

HOME = "http://127.0.0.1:8765"
COMMENT = "# the cat's own settings\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("settings") / "project", tiny_weights, images=3)
    projects.edit(folder, "steps = 6\n", "steps = 6  # few\n")
    (folder / FILE).write_text(COMMENT + (folder / FILE).read_text())
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train")
    return folder


@pytest.fixture
def page(built) -> TestClient:
    before = (built / FILE).read_bytes()
    yield TestClient(make_app(Site(built), "secret"), base_url=HOME, follow_redirects=False)
    (built / FILE).write_bytes(before)


def fields(text: str) -> dict[str, str]:
    """What a browser sends of the form as it was answered."""
    inputs = re.findall(r'<input[^>]* name="([^"]+)" value="([^"]*)"', text)
    chosen = re.findall(r'<select[^>]* name="([^"]+)"[^>]*>.*?(?:<option selected>([^<]*)|</select>)', text, re.DOTALL)
    texts = re.findall(r'<textarea[^>]* name="([^"]+)"[^>]*>\n(.*?)</textarea>', text, re.DOTALL)
    return {name: html.unescape(value) for name, value in (*inputs, *chosen, *texts)}


def send(page: TestClient, act: str, shown: str | None = None, **changes: str):
    form = fields(page.get("/settings").text if shown is None else shown)
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return page.post("/settings", data=form | changed | {"act": act})


def test_check_says_what_a_change_computes_again_and_writes_nothing(page, built):
    before = (built / FILE).read_bytes()
    answer = send(page, "check", train__lr="2e-3", train__checkpoint_every="3")
    effects = dict(re.findall(r"<li><a [^>]*>([^<]+)</a> = [^:]*: <strong>([^<]*)", answer.text))
    assert effects["train.lr"].startswith("train: a new run of 6 steps")
    assert effects["train.checkpoint_every"] == "nothing more is computed"
    assert 'value="2e-3"' in answer.text and "to do now" in answer.text and answer.status_code == 200
    assert (built / FILE).read_bytes() == before


def test_save_changes_the_lines_that_were_changed_and_no_other(page, built):
    before = (built / FILE).read_text()
    page_all = send(page, "all").text
    changes = {"train__steps": "8", "train__lr": "2e-3", "train__ema": "on", "captions__preview_prompts": 'a\r\nb, "c"'}
    saved = send(page, "save", page_all, **changes)
    assert (saved.status_code, saved.headers["location"]) == (303, "settings?saved=4")
    after = (built / FILE).read_text()
    assert after.startswith(COMMENT) and "steps = 8  # few\n" in after and "lr = 2e-3\n" in after
    old, new = tomllib.loads(before), tomllib.loads(after)
    assert new["captions"]["preview_prompts"] == ["a", 'b, "c"'] and new["train"]["ema"] == {}
    for section in ("project", "buckets", "embeddings", "samples"):
        assert new[section] == old[section]
    assert "4 settings saved" in page.get("/settings?saved=4").text
    undone = {"train__steps": "6", "train__lr": "", "train__ema": "", "captions__preview_prompts": "a red thing"}
    send(page, "save", **undone)
    assert tomllib.loads((built / FILE).read_text()) == old


def test_of_two_tabs_the_second_is_refused_and_keeps_what_it_typed_and_a_file_changed_by_hand_stays(page, built, monkeypatch):
    tab = page.get("/settings").text
    assert send(page, "save", train__steps="9").status_code == 303
    saved = (built / FILE).read_bytes()
    second = send(page, "save", tab, train__rank="4")
    assert second.status_code == 409 and "changed meanwhile" in second.text and (built / FILE).read_bytes() == saved
    assert fields(second.text)["train.rank"] == "4" and fields(second.text)["train.steps"] == "9"
    assert send(page, "save", second.text).status_code == 303
    assert load(built / FILE).sections["train"].rank == 4 and load(built / FILE).sections["train"].steps == 9
    texts_lock = edit.texts_lock

    def late(folder: Path):  # by hand, between reading and writing
        (built / FILE).write_text((built / FILE).read_text() + "# by hand\n")
        return texts_lock(folder)

    monkeypatch.setattr(edit, "texts_lock", late)
    assert send(page, "save", train__steps="8").status_code == 409
    assert "# by hand" in (built / FILE).read_text() and load(built / FILE).sections["train"].steps == 9


def test_a_value_with_which_the_project_would_not_open_is_never_written(page, built):
    before = (built / FILE).read_bytes()
    form = fields(send(page, "all").text) | {"act": "save"}
    for key, text, said in [
        ("train.steps", "0", "train.steps must be &gt;= 1"),
        ("train.steps", "1\nrank = 3", "train.steps must be a whole number"),
        ("train.steps", "1" * 5000, "train.steps"),
        ("train.precision", "float8", "train.precision must be"),
        ("buckets.resolutions", "96, [", "buckets.resolutions"),
        ("buckets.resolutions", "[" * 5000, "buckets.resolutions"),
        ("project.family", "nothing", "project.family"),
        ("captions.template", "a\0b", "captions.template"),
        ("captions.template", "\ud800", ""),
        ("train.base_bits_for", "{a = 3}", "base_bits_for must give"),
    ]:
        for act in ("check", "save"):
            body = urlencode(form | {"act": act, key: text}, errors="surrogatepass")
            answer = page.post("/settings", content=body, headers={"content-type": "application/x-www-form-urlencoded"})
            assert answer.status_code in (400, 422) and said in answer.text and (built / FILE).read_bytes() == before


def test_what_does_not_fit_is_refused_with_a_button_that_puts_in_settings_that_fit(page, monkeypatch):
    from stages.memory import Remedy
    from stages.text_to_image.train import STAGE

    found = edit.outlook.forecast

    def small(project, name, seen=None):
        made = found(project, name, seen)
        if name != STAGE.name or project.config.sections["train"].base_bits == 4:
            return made
        return edit.outlook.Forecast(
            2 * seen.budget, find_remedy=lambda: Remedy({"train": {"base_bits": 4, "optimizer": {"kind": "lion"}}}, 1)
        )

    monkeypatch.setattr(edit.outlook, "forecast", small)
    refused = send(page, "check", train__lr="2e-3")
    ((value, words),) = re.findall(r'<button name="take" value="([^"]*)">([^<]*)', refused.text)
    assert "train needs about" in refused.text
    assert html.unescape(words) == 'Take [train] base_bits = 4; [train.optimizer] kind = "lion"'
    taken = page.post("/settings", data=fields(refused.text) | {"take": html.unescape(value)}).text
    assert 'role="alert"' not in taken
    assert [fields(taken)[f"train.{key}"] for key in ("lr", "base_bits", "optimizer.kind")] == ["2e-3", "4", "lion"]


def test_another_site_and_a_form_without_the_token_change_no_setting(page, built):
    before = (built / FILE).read_bytes()
    form = fields(page.get("/settings").text) | {"train.steps": "9", "act": "save"}
    for headers in [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]:
        assert page.post("/settings", data=form, headers=headers).status_code == 403
    for token in ("", "é", "wrong"):
        assert page.post("/settings", data=form | {"token": token}).status_code == 403
    for damaged in ("", "[]", '["x", 3]', "[" * 9999):
        assert page.post("/settings", data=form | {"shown": damaged}).status_code == 400
    assert (built / FILE).read_bytes() == before


KEYS = ["train.steps", "train.schedule.shape", "train.ema", "new.key", "train.lr"]
VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9).map(lambda text: text.replace("\0", "").replace("\r", "")),
    st.integers(-9, 9),
    st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.text("ab ,'\"\\\n#[]", max_size=5), max_size=3),
    st.sampled_from([True, False, None, {}, {"a b": 1}]),
)
FILES = (
    "",
    "[train]  # t\nsteps = 6  # s\n[train.schedule]\nshape = 'x'\n",
    "train.steps = 6\nschedule = 3\n",
    "[train.schedule]\nshape = 1\n[samples]\n[train]\nlr = 1\n",
    "train = {steps = 6, schedule = {shape = 1}}\r\n# end",
    "[[images.folder]]\npath = 'x'\n[train]\nsteps = '''\n[no]\n'''\n",
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FILES), st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_an_edited_text_says_what_was_asked_and_keeps_every_comment_of_other_lines(text, changes):
    try:
        after = edit.edited(text, changes)
    except ValueError as error:
        assert "edit the file" in str(error) and len(str(error).splitlines()) == 1
        return
    expected, found = tomllib.loads(text), tomllib.loads(after)
    for key, value in changes.items():
        edit._put(expected, key, value, dict)
    assert found == expected
    assert text.startswith("train = ") or all(line in after for line in text.splitlines() if "#" in line and "steps" not in line)


@pytest.mark.parametrize("project", ["example", "code", "library"])
def test_every_setting_of_a_project_goes_through_its_field_unchanged(project):
    text = (projects.ROOT / "data" / "projects" / project / FILE).read_text()
    items = Items(text)
    assert set(items.pipeline.basic) <= set(items.found)
    values, bad = items.values(items.texts)
    assert not bad
    assert tomllib.loads(tomlkit.dumps(tomlkit.parse(edit.edited(text, values)))) == tomllib.loads(text)
