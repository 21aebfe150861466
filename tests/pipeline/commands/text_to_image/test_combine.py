"""`merge`, `resize` and `extract` write LoRAs that draw as they should; `generate` adds several adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.api import Project
from pipeline.commands.text_to_image.combine import MADE
from stages.models.flux2.architecture import FLUX2
from stages.models.weights import read_file
from tests import projects
from tests.pipeline.commands.text_to_image.test_generate import pictures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("combine") / "project", tiny_weights, images=2)
    projects.edit(folder, "rank = 2", "rank = 2\nlr = 0.05")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train")
    return folder


def picture(folder: Path, *words: str) -> np.ndarray:
    (drawn,) = pictures(folder, "a red thing", *words)
    return drawn.astype(int)


def changes(file: Path) -> dict[str, np.ndarray]:
    arrays, scales = FLUX2.read_adapter(file)
    return {
        name: scale * np.asarray(arrays[f"{name}.lora_B.weight"], float) @ np.asarray(arrays[f"{name}.lora_A.weight"], float)
        for name, scale in scales.items()
    }


def written(said: str) -> Path:
    return Path(re.findall(r"wrote (\S+)", said)[0])


def test_two_halves_of_an_adapter_draw_as_the_whole_and_other_strengths_do_not(built, tmp_path):
    projects.latentmill(built, "export", str(tmp_path / "same.safetensors"), "--dtype", "float32")
    whole, base = picture(built), picture(built, "--adapter", "none")
    same = str(tmp_path / "same.safetensors")
    halves = picture(built, "--adapter", "last", "--strength", "0.5", "--adapter", same, "--strength", "0.5")
    assert np.abs(halves - whole).max() <= 1 < np.abs(base - whole).max()
    gone = picture(built, "--adapter", "last", "--strength", "1", "--adapter", same, "--strength", "-1")
    assert np.abs(gone - base).max() <= 1
    by_api = np.asarray(Project(built).adapter().generate("a red thing", strength=0.5, others=[(Path(same), 0.5)])).astype(int)
    np.testing.assert_array_equal(by_api, halves)
    rows = Project(built).sql("select adapter_id, strength from generated where adapter_id like '%+%' order by 1").to_pylist()
    assert len(rows) == 2 and rows[0]["adapter_id"].count("*") == 2


def test_a_merged_file_is_the_sum_with_strengths_and_is_written_once(built, tmp_path):
    last = Project(built).adapter().path
    said = projects.latentmill(built, "merge", "last", str(last), "--strength", "0.8", "--strength", "0.5", "--dtype", "float32")
    file = written(said)
    assert "rank 4, the sum of the ranks" in said and file.parent == built / "exports"
    whole, merged = changes(last), changes(file)
    assert merged.keys() == whole.keys()
    assert all(np.abs(merged[name] - 1.3 * whole[name]).max() < 1e-5 for name in whole)
    about = read_file(file)[1]
    assert json.loads(about[MADE])["operation"] == "merge" and about["modelspec.resolution"] == "96x96"
    before = file.stat().st_mtime_ns
    again = projects.latentmill(built, "merge", "last", str(last), "--strength", "0.8", "--strength", "0.5", "--dtype", "float32")
    assert "is up to date" in again and file.stat().st_mtime_ns == before


def test_a_resized_file_has_the_rank_and_the_error_that_it_states(built, tmp_path):
    last = Project(built).adapter().path
    said = projects.latentmill(
        built, "resize", "last", "--rank", "1", "--dtype", "float32", "--out", str(tmp_path / "small.safetensors")
    )
    whole, small = changes(last), changes(tmp_path / "small.safetensors")
    assert all(np.linalg.matrix_rank(change, 1e-4) <= 1 for change in small.values())
    lost, all_of_it = (sum((each**2).sum() for each in part) for part in ([whole[n] - small[n] for n in whole], whole.values()))
    stated = float(re.findall(r"the relative error is ([\d.]+)%", said)[0]) / 100
    assert stated == pytest.approx((lost / all_of_it) ** 0.5, abs=1e-4) and stated > 0


def test_a_lora_is_extracted_from_a_fine_tuned_transformer(built, tmp_path):
    last = Project(built).adapter().path
    projects.latentmill(built, "export", str(tmp_path / "tuned"), "--merged", "--dtype", "float32")
    said = projects.latentmill(built, "extract", str(tmp_path / "tuned"), "--rank", "2", "--dtype", "float32")
    whole, extracted = changes(last), changes(written(said))
    changed = {name for name, change in whole.items() if np.abs(change).max() > 0}
    assert extracted.keys() == changed and "outside" not in said
    assert all(np.abs(extracted[name] - whole[name]).max() < 1e-5 for name in changed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["merge", "last"], "merge needs two adapters or more, got 1"),
        (["merge", "last", "last", "--strength", "1"], "2 adapters, 1 strengths"),
        (["merge", "last", "wrst"], "got 'wrst': there is no such file"),
        (["resize", "last", "--rank", "2"], "--rank must be below 2, the rank of adapter.safetensors, got 2"),
        (["generate", "a", "--adapter", "last@nothing"], "there is no run 'nothing'"),
    ],
)
def test_a_wrong_wish_is_one_line(built, words, said):
    answered = projects.latentmill(built, *words, code=2)
    assert said in answered and answered.count("\n") <= 1


def test_no_other_file_is_overwritten_and_the_base_itself_has_nothing_to_extract(built, tmp_path):
    (tmp_path / "mine.safetensors").write_bytes(b"something else")
    said = projects.latentmill(built, "resize", "--rank", "1", "--out", str(tmp_path / "mine.safetensors"), code=2)
    assert "mine.safetensors exists and was made from something else" in said
    assert (tmp_path / "mine.safetensors").read_bytes() == b"something else"
    base = Project(built).component("transformer")
    assert "there is nothing to extract" in projects.latentmill(built, "extract", str(base), code=2)
