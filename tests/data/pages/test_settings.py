"""The page of settings is what `latentmill settings` prints, and no setting lacks its reason, its bounds or its unit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click.testing import CliRunner

import stages
from data.research.pages.settings import FILE
from pipeline.commands.settings import chosen, command

PAGE = FILE.read_text(encoding="utf-8")
EVERY = [(name, each) for name in stages.PIPELINES for each in chosen(name, "")]


@pytest.mark.parametrize("pipeline", stages.PIPELINES)
def test_the_command_prints_every_section_as_the_page_has_it(pipeline: str) -> None:
    done = CliRunner().invoke(command, ["--pipeline", pipeline])
    assert not done.exception, done.exception
    for block in done.stdout.strip().split("\n\n"):
        assert block in PAGE


def test_a_setting_has_a_reason_and_a_number_has_bounds_and_a_unit() -> None:
    for name, each in EVERY:
        where = f"{name}: {each.key}"
        assert len(each.doc) > 10, where
        is_number = "number" in each.values or each.values[0].isdigit()
        assert bool(each.unit) == is_number, f"{where}: give the field a unit, beside its default"
        # The allowed numbers of bits are few, and its reason has them.
        assert bool(each.bounds) == ("number" in each.values) or "16, 8 or 4" in each.doc, f"{where}: give the field bounds"


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("train.ema", ["train.ema.decay"]),
        ("[train.ema]", ["train.ema.decay"]),
        ("train.lr", ["train.lr"]),
        ("network_dim", ["train.rank"]),
        ("resolutions", ["buckets.resolutions", "train.data.resolutions"]),
    ],
)
def test_settings_are_found_by_section_by_name_and_by_the_name_of_another_trainer(word: str, keys: list[str]) -> None:
    assert [each.key for each in chosen("text_to_image", word)] == keys


@pytest.mark.parametrize(
    ("word", "message"),
    [("clip_skip", "no setting 'clip_skip': no model here has CLIP"), ("trane", "'trane'; did you mean train")],
)
def test_an_unknown_name_is_answered_with_the_reason_or_the_nearest_one(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen("text_to_image", word)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("change what a row is", "setting"), ("choose which rows exist", "selects"), ("change no row", "runtime")],
)
def test_the_page_names_settings_by_their_true_kind(words: str, kind: str) -> None:
    (keys,) = re.findall(rf"hose that\s+{words}\s+\(([^)]*)\)", PAGE)
    named = re.findall(r"`([\w.]+)`", keys)
    kinds: dict[str, Any] = {each.key: each.kind for name, each in EVERY if name == "text_to_image"}
    assert named and {kinds[name] for name in named} == {kind}
