"""Tables and progress as text: what is printed where there is no terminal, and what fits into one."""

import hashlib
import os
import re

import pytest

from pipeline import terminal
from pipeline.store.disk import format_bytes
from pipeline.terminal import Terminal, format_rate, format_seconds, format_table
from stages import hashing


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("unit", ["image", "images"])
def test_progress_without_a_terminal_is_a_line_every_few_seconds_with_rate_time_left_and_facts(clock, capsys, unit):
    with Terminal("latents") as shown:
        shown.note("loss 0.5")
        for done in range(0, 101, 2):
            shown.progress(done, 200, unit)
            clock[0] += 1
    said = lines(capsys)
    assert 2 <= len(said) <= 4
    assert all(re.fullmatch(r"latents: \d+ of 200 images, 2\.0 images/s, .* left; loss 0.5", line) for line in said)


@pytest.mark.parametrize("shown", [Terminal, terminal.hashing_of])
def test_how_much_of_a_large_file_is_hashed_is_shown_in_every_command(shown, clock, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "LARGE", 300_000_000)
    monkeypatch.setattr(terminal, "QUIET_SECONDS", 0.0)
    large, small = tmp_path / "model.safetensors", tmp_path / "small"
    for file, size in ((large, 300_000_000), (small, 3)):
        with file.open("wb") as opened:
            opened.truncate(size)
    with shown("train"):
        assert hashing.file_sha256(large) == hashlib.file_digest(large.open("rb"), "sha256").hexdigest()
        assert hashing.file_sha256(small) == hashlib.sha256(bytes(3)).hexdigest()
    said = lines(capsys)
    assert [line.partition(": ")[2] for line in said] == [
        f"hashing model.safetensors: {done} of 0.3 GB" for done in (0.0, 0.1, 0.2, 0.3)
    ]
    hashing.file_sha256(large)
    assert not lines(capsys)
    with Terminal("train") as shown:
        for step in range(1000, 1005):
            shown.progress(step, 1010, "step")
            clock[0] += 10
    assert lines(capsys)[-1] == "train: 1004 of 1010 steps, 10.0 s/step, 1 min 0 s left", "earlier steps do not count"


def test_a_table_is_plain_text_with_numbers_to_the_right_and_wide_characters_counted_twice():
    rows = [("a.jpg", 1, 1 / 3, "12 kB"), ("猫[b]x[/b]", 1000, None, "1.2 MB"), ("two\nlines \x1b[31m", 2, 3.0, "-")]
    assert format_table(("path", "n", "share", "size"), rows, right=("size",)).splitlines() == [
        "path                n     share    size",
        "a.jpg               1  0.333333   12 kB",
        "猫[b]x[/b]       1000         -  1.2 MB",
        "two lines ?[31m     2         3       -",
    ]
    assert format_table(("path", "n"), []) == "path  n"


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (200, 115), (20, 115)])
def test_a_table_is_folded_into_the_terminal_unless_its_columns_would_be_too_narrow(monkeypatch, columns, width):
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    text = format_table(("table", "rows", "state"), [("images", 123456, "word " * 20), ("x", 1, "short")])
    assert max(map(len, text.splitlines())) <= width
    assert (len(text.splitlines()) == 3) == (columns != 80)
    assert text.split().count("word") == 20
    assert "123456" in text


def test_numbers_are_written_with_their_unit():
    assert [format_bytes(n) for n in (0, 812, 1_234_567, 7.75e9)] == ["0 B", "812 B", "1.23 MB", "7.75 GB"]
    assert [format_bytes(n) for n in (999.6, 999_600, 999.6e6, 999.4e6)] == ["1 kB", "1 MB", "1 GB", "999 MB"]
    assert format_bytes(1234.5e9) == "1234 GB"
    assert [format_seconds(s) for s in (0.44, 12.2, 200, 7500)] == ["0.4 s", "12 s", "3 min 20 s", "2 h 5 min"]
    assert [format_rate(speed, "image") for speed in (12.34, 0.25)] == ["12.3 images/s", "4.0 s/image"]


def test_the_summary_of_a_run_names_loss_held_out_rate_next_checkpoint_and_memory():
    from stages.tuner.config import TrainingConfig, ValidationConfig
    from stages.tuner.loop import Summary
    from stages.tuner.validation import Validation

    validation = Validation(ValidationConfig(every=2), 1, 100)
    summary = Summary(TrainingConfig(checkpoint_every=10), [{"step": 1, "split": "train", "loss": 3.0}])
    for step, held_out in ((0, 5.0), (2, 2.0), (4, 4.0)):
        validation.add([{"step": step, "split": "validation", "loss": held_out}])
    row = {"step": 5, "split": "train", "loss": 1.0, "lr": 3e-4, "peak_bytes": 1_900_000_000}
    said = summary.after([row], validation)
    assert said == "loss 2.0000, held out 4.0000 (best 2.0000 at 2), lr 0.0003, checkpoint in 5 steps, 1.9 GB"


def test_a_command_in_what_is_said_names_the_project_unless_it_would_be_taken_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = terminal.Hints()
    said.commands = lambda: ("train", "latents", "panel", "evaluate")
    said.about(tmp_path / "my cats", made=tmp_path / "example")
    own = f"PROJECT='{tmp_path}/my cats'"  # make runs in the checkout
    assert said("not built: make latents") == f"not built: make latents {own}"
    assert said("run: latentmill train, or make train") == f"run: latentmill train -p 'my cats', or make train {own}"
    assert said("`latentmill panel unused` says why") == "`latentmill panel -p 'my cats' unused` says why"
    others = "run: make train PROJECT=/x|latentmill train --x -p /y|latentmill families|make trainers|a/latentmill train"
    for whole in others.split("|"):
        assert said(whole) == whole
    said.about(tmp_path / "example", made=tmp_path / "example")
    assert said("make train; latentmill train") == "make train; latentmill train -p example"
    said.about(tmp_path, made=tmp_path / "example")
    assert said("latentmill train; make train") == f"latentmill train; make train PROJECT={tmp_path}"
