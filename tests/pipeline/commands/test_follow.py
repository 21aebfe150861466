"""`latentmill follow`: one image through every table, or one line if the text matches no image or several."""

from __future__ import annotations

import pytest

from pipeline.commands.follow import follow
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject, digest


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> FakeProject:
    return tables.make(tmp_path_factory.mktemp("project"))


def follow_text(project: FakeProject, what: str) -> str:
    return "\n".join(follow(project, what))


def test_the_lines_go_through_every_table(project: FakeProject) -> None:
    text = follow_text(project, "a.jpg")
    for stage_name in ("images", "captions", "buckets", "latents", "train", "samples"):  # embeddings: in the lines of captions
        assert any(line.startswith(stage_name) for line in text.splitlines()), stage_name
    part = next(project.folder("latents").shards.glob("*.arrow")).name
    for fact in (
        f"image_id {digest('a.jpg')}",
        "JPEG RGB, 640 x 480, 12.3 kB",
        "the same bytes are also in copy-of-a.jpg",
        '"a red cat" (sidecar): 9 tokens',
        '"猫 on a sofa" (sidecar): 12 tokens, 3 more were cut',
        "512: 512 x 512 from 480 x 480 at (80, 0), scale 1.07, crop loss 25.0 %, 1024 tokens",
        "512 x 512: 1 x 2 x 2 bfloat16, mean 0.500, std 1.118, largest 2.00; " + part,
        "drawn 20 times in 40 steps, once without its caption: steps 2, 4, 6",
        "no preview has a caption of this image as prompt; previews: 2, prompts: 1",
    ):
        assert fact in text, fact


def test_the_mean_loss_is_compared_with_all_images_at_the_same_noise_levels(project: FakeProject) -> None:
    # Every tenth of sigma has two values; a.jpg has the lower sigma of each, and 0.1 more loss.
    lines = [line for line in follow_text(project, "a.jpg").splitlines() if "mean loss" in line]
    assert lines[0].split("mean loss ")[1] == "0.8750; all images at these noise levels 0.8125; all samples 0.8125"


def test_an_image_that_was_rejected_held_out_drawn_as_a_preview_or_never_drawn_is_told_so(project: FakeProject) -> None:
    text = follow_text(project, "late.png")
    measured = "held out, measured by 2 samples: mean loss 4.0000 at step 0, 2.5000 at step 40; the lowest 2.0000 at step 20"
    assert measured in text and "512 x 512: not encoded, cannot be decoded" in text and "drawn" not in text
    text = follow_text(project, "mute.png")
    assert "captions  none" in text and "latents   none" in text and "never drawn in 40 steps" in text
    assert "768: not trained, too_small" in follow_text(project, "b.png")
    assert "not used: truncated: ends after 99 bytes" in follow_text(project, "broken.jpg")
    assert "step 40: previews/40.png" in follow_text(project, "sub/b.png")


def test_an_image_is_found_by_path_part_of_it_image_id_or_caption(project: FakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project.resource("image_folder") / "sub" / "b.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    monkeypatch.chdir(file.parent)
    number = digest("sub/b.png")
    for what in ("sub/b.png", "b.png", "SUB/", number, number[:7].upper(), "Blue DOG", str(file)):
        assert follow_text(project, what).startswith("images    sub/b.png\n"), what
    text = follow_text(project, "copy-of-a.jpg")
    assert "not used: duplicate: of a.jpg" in text and "the same bytes are also in a.jpg" in text
