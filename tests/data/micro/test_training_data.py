"""The training data of the base model: concepts, captions and composed pictures. The sprites are synthetic."""

import io
import json
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.research.micro.captions import CAPITALS, SENTENCES, TRIGGERED, caption, phrase, plain
from data.research.micro.choice import CHOICE, EXAMPLE, HELD_OUT, TWINS, entries
from data.research.micro.compose import COLOURS, SHAPES, compose, load_splits, load_sprites
from stages.text_to_image.buckets import choose_bucket

CONCEPTS = Path(__file__).parents[3] / "data" / "research" / "micro" / "concepts.jsonl"
BLUE, RED = (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)


def red_disc(alpha=255, hidden=(0, 255, 0)):
    """A sprite: a red disc of 200 pixels on a transparent background with a hidden colour; uint8 (1,4,256,256)."""
    y, x = np.mgrid[:256, :256] - 127.5
    inside = (x**2 + y**2 < 100**2)[None]
    sprite = np.where(inside, np.reshape([255, 0, 0, alpha], (4, 1, 1)), np.reshape([*hidden, 0], (4, 1, 1)))
    return torch.from_numpy(sprite.astype(np.uint8))[None]


def drawn(height, width, scale=0.8, shift=(0, 0), sprite=None):
    """(H,W,3), 0 to 1."""
    sprite = red_disc() if sprite is None else sprite
    picture = compose(sprite, torch.tensor([BLUE]), height, width, scale, torch.tensor([shift]))
    assert picture.shape == (1, 3, height, width) and picture.dtype == torch.float32
    assert picture.abs().max() <= 1
    return ((picture[0].permute(1, 2, 0) + 1) / 2).numpy()


def test_the_committed_concepts_are_about_420_of_one_name_and_one_picture_each_split_as_the_choice_says():
    concepts = [json.loads(line) for line in CONCEPTS.read_text(encoding="utf-8").splitlines()]
    assert 400 <= len(concepts) <= 430
    for field in ("name", "phrase", "code"):
        assert max(Counter(concept[field] for concept in concepts).values()) == 1, field
    by_name = {concept["name"]: concept for concept in concepts}
    assert {name: group for group, text in CHOICE.items() for name in entries(text)} == {
        n: c["group"] for n, c in by_name.items()
    }
    assert all(len(name.split()) <= 2 and name == name.lower() and c["phrase"] == phrase(name) for name, c in by_name.items())
    for split, text, count in (("example", EXAMPLE, 24), ("held-out", HELD_OUT, 40)):
        chosen = {name for name, concept in by_name.items() if concept["split"] == split}
        assert chosen == entries(text).keys() and len(chosen) == count
        assert len({by_name[name]["group"] for name in chosen}) >= 6


def test_no_twin_is_itself_an_example_or_held_out():
    own = {name: own for text in CHOICE.values() for name, own in entries(text).items()}
    unseen = {own[name] for name in entries(EXAMPLE) | entries(HELD_OUT)}
    assert not unseen & entries(TWINS).keys()


# Captions.


def test_a_phrase_has_the_article_that_a_person_would_use():
    expected = ("an owl", "a red apple", "a unicorn", "a ufo", "an umbrella", "an hourglass", "a honey pot")
    assert [phrase(each.partition(" ")[2]) for each in expected] == list(expected)
    assert [phrase(each) for each in ("cherries", "broccoli", "french fries")] == ["cherries", "broccoli", "french fries"]
    assert plain("a red apple", "blue") == "a red apple on a blue background"
    assert plain("cherries", "orange") == "cherries on an orange background"
    assert plain("an owl", None) == "an owl"


@pytest.mark.parametrize("subject", ["an owl", "a red apple", "cherries"])
def test_every_form_of_caption_names_the_subject_and_the_colour_once_and_white_goes_unmentioned(subject):
    bare = subject.removeprefix("an ").removeprefix("a ")
    rng = random.Random(0)
    texts = {caption(subject, "purple", rng).lower() for _ in range(400)}
    assert len(texts) > 12
    for text in texts:
        assert text.count(bare) == 1 and text.count("purple") == 1 and "{" not in text, text
    for text in (caption(subject, None, rng).lower() for _ in range(300)):
        assert bare in text and not {"background", *COLOURS} - {"red"} & set(re.findall(r"\w+", text)), text


def test_captions_have_made_up_words_capitals_and_full_stops_as_often_as_is_said_and_one_seed_gives_one_caption():
    texts = [caption("an owl", "teal", random.Random(seed)) for seed in range(4000)]
    ordinary = set(re.findall(r"\w+", "a an owl teal on in of front plain flat icon emoji picture background"))
    odd = sum(bool(set(re.findall(r"\w+", text.lower())) - ordinary) for text in texts)
    assert odd / 4000 == pytest.approx(TRIGGERED, abs=0.015)
    assert sum(text != text.lower() for text in texts) / 4000 == pytest.approx(CAPITALS + SENTENCES, abs=0.03)
    assert sum(text.endswith(".") for text in texts) / 4000 == pytest.approx(SENTENCES, abs=0.02)
    assert texts[:50] == [caption("an owl", "teal", random.Random(seed)) for seed in range(50)]


# Pictures.


def test_shapes_are_what_the_buckets_stage_gives():
    ratios = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3))
    for resolution, shapes in SHAPES.items():
        found = [choose_bucket(1200 * across // down, 1200, resolution) for across, down in ratios]
        assert list(shapes) == list(dict.fromkeys((b.height, b.width) for b in found))


@pytest.mark.parametrize(("height", "width"), [shape for shapes in SHAPES.values() for shape in shapes])
def test_a_sprite_stands_in_the_middle_of_its_background_and_a_shift_moves_it_down_and_right(height, width):
    picture = drawn(height, width)
    red = picture[..., 0]
    rows, columns = np.mgrid[:height, :width]
    centre = np.array([(rows * red).sum(), (columns * red).sum()]) / red.sum()
    assert np.abs(centre - [(height - 1) / 2, (width - 1) / 2]).max() < 0.6
    assert np.allclose(picture[[0, 0, -1, -1], [0, -1, 0, -1]], BLUE, atol=1e-6)
    assert np.allclose(picture[height // 2, width // 2], RED, atol=1e-3)
    across = (red[height // 2] > 0.5).sum()
    assert across == pytest.approx(0.8 * min(height, width) * 200 / 256, abs=2)
    assert np.allclose(drawn(height, width, shift=(5, -7)), np.roll(picture, (5, -7), (0, 1)), atol=1e-6)
    assert np.allclose(drawn(height, width, shift=(0, width)), BLUE, atol=1e-6), "what leaves the picture is cut off"


def test_a_sprite_that_reaches_its_own_edges_covers_just_its_square():
    full = torch.tensor([255, 0, 0, 255], dtype=torch.uint8)[None, :, None, None].expand(1, 4, 256, 256)
    picture = drawn(64, 96, scale=0.5, sprite=full)
    square = np.zeros((64, 96), bool)
    square[16:48, 32:64] = True
    assert np.allclose(picture[square], RED, atol=1e-3) and np.allclose(picture[~square], BLUE, atol=1e-6)


def test_each_picture_of_a_batch_has_its_own_background_sprite_and_shift():
    sprites = torch.cat([red_disc(), red_disc(alpha=128)])
    shifts, backgrounds = torch.tensor([[0, 0], [6, 3]]), torch.tensor([BLUE, (0.0, 1.0, 0.0)])
    both = compose(sprites, backgrounds, 64, 96, 0.7, shifts)
    for b in range(2):
        alone = compose(sprites[b : b + 1], backgrounds[b : b + 1], 64, 96, 0.7, shifts[b : b + 1])
        assert torch.allclose(both[b], alone[0], atol=1e-6)


def test_half_a_sprite_shows_half_of_its_background_and_a_colour_under_full_transparency_none():
    assert np.allclose(drawn(64, 64, sprite=red_disc(alpha=128))[32, 32], [0.5, 0, 0.5], atol=0.01)
    shown = [drawn(64, 64, sprite=red_disc(hidden=hidden)) for hidden in ((0, 255, 0), (0, 0, 0))]
    assert np.allclose(*shown, atol=1e-6)


def test_the_twelve_colours_are_clearly_different():
    shades = np.array(list(COLOURS.values()), float)
    assert len(shades) == 12
    apart = np.linalg.norm(shades[:, None] - shades[None], axis=2) + 1000 * np.eye(12)
    assert apart.min() > 60


def test_sprites_come_out_of_the_zip_by_style_sorted_by_name_and_a_style_or_size_that_is_not_there_is_named(tmp_path):
    colours = {"flat/owl.png": (9, 8, 7, 6), "3d/owl.webp": (9, 8, 7, 6), "3d/hot dog.webp": (1, 2, 3, 255)}
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for name, colour in colours.items():
            out = io.BytesIO()
            Image.new("RGBA", (256, 200 if "flat" in name else 256), colour).save(out, name[-4:].strip("."), lossless=True)
            archive.writestr(name, out.getvalue())
        archive.writestr("3d.json", json.dumps({"hot dog": "held-out"}))
    names, sprites = load_sprites(tmp_path / "s.zip", "3d")
    assert names == ["hot dog", "owl"]
    assert sprites.shape == (2, 4, 256, 256) and sprites.dtype == torch.uint8
    assert sprites[0, :, 40, 50].tolist() == [1, 2, 3, 255]
    assert load_splits(tmp_path / "s.zip") == {"hot dog": "held-out"}
    with pytest.raises(ValueError, match='no style "clay"'):
        load_sprites(tmp_path / "s.zip", "clay")
    with pytest.raises(ValueError, match=r"flat/owl\.png must be 256 x 256 pixels, got 256 x 200"):
        load_sprites(tmp_path / "s.zip", "flat")
