"""data/assets/judges: the stored weights are small and come from the released ones; the stored texts cover the example."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from data import ASSETS, EXAMPLE
from data.research.experiments.agreement import TEXT_VECTORS, Agreement, TextVectors, with_agreement
from data.research.judges import convert, texts
from stages.hashing import file_sha256
from stages.models.efficientnet import layers
from stages.text_to_image.scores import IMAGE_WEIGHTS, ImageEncoder


def released(seed: int) -> dict[str, np.ndarray]:
    """Random arrays with the names and shapes of the released file."""
    draw = np.random.default_rng(seed)
    found = {}
    for name, (norm, (out, height, width, into), _) in layers().items():
        found[f"{name}.weight"] = draw.normal(0, 1 / np.sqrt(height * width * into), (out, into, height, width))
        found |= {f"{norm}.running_mean": draw.normal(0, 0.1, out), f"{norm}.running_var": draw.uniform(0.5, 2, out)}
        found |= {f"{norm}.weight": draw.uniform(0.5, 2, out), f"{norm}.bias": draw.normal(0, 0.1, out)}
    return {name: array.astype(np.float32) for name, array in found.items()}


def test_the_stored_weights_are_small_and_those_that_the_readme_names_with_differences_of_auc_within_the_limit():
    readme = (ASSETS / "judges" / "README.md").read_text()
    assert IMAGE_WEIGHTS.stat().st_size <= 3_600_000
    assert file_sha256(IMAGE_WEIGHTS) in readme and file_sha256(TEXT_VECTORS) in readme
    assert convert.SOURCE_SHA256 in readme and texts.SOURCE_SHA256 in readme
    assert ImageEncoder.load().source_sha256 == convert.SOURCE_SHA256
    rows = re.findall(r"\| AUC of (\w+) \| ([\d.]+) \| ([\d.]+) \|", readme)
    assert [name for name, _, _ in rows] == ["style", "real"]
    assert all(abs(float(one) - float(other)) <= 0.005 for _, one, other in rows)


def test_every_caption_and_every_prompt_of_the_example_has_a_sentence_embedding_of_length_1():
    vectors = TextVectors.load(TEXT_VECTORS)
    assert vectors.source_sha256 == texts.SOURCE_SHA256
    assert sorted(set(texts.example_texts())) == sorted(vectors.vectors)
    assert np.abs(np.linalg.norm(vectors.stack(sorted(vectors.vectors)), axis=1) - 1).max() < 1e-3


def test_folding_a_batch_norm_keeps_the_output_of_the_convolution():
    import torch
    from torch.nn import functional

    arrays = released(0)
    folded = convert.fold(arrays)
    x = torch.randn(2, 40, 8, 8, generator=torch.manual_seed(0))
    name, norm = "_blocks.5._expand_conv", "_blocks.5._bn0"
    of = [torch.from_numpy(arrays[f"{norm}.{part}"]) for part in ("running_mean", "running_var", "weight", "bias")]
    y = functional.conv2d(x, torch.from_numpy(arrays[f"{name}.weight"]))
    expected = functional.batch_norm(y, *of, training=False, eps=1e-3).permute(0, 2, 3, 1).numpy()
    weight, bias = (np.array(array) for array in folded[name])
    found = x.permute(0, 2, 3, 1).numpy() @ weight[:, 0, 0].T + bias
    assert np.abs(found - expected).max() < 1e-4


def test_a_released_file_of_another_hash_is_not_unpickled(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"not the released file")
    with pytest.raises(ValueError, match="must have the sha256 579344"):
        convert.read_released(tmp_path / "a.pth")


def test_a_real_picture_ranks_its_own_text_far_better_than_by_chance():
    folder = EXAMPLE / "references"
    real = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()[:8]]
    rows = [{"kind": "real", "prompt": f"ohwx, {row['text']}", "path": row["file_name"]} for row in real]
    found = with_agreement(rows, folder, folder, "ohwx")
    assert np.mean([row["agreement_rank"] for row in found]) < 2.5, "4.5 by chance"
    assert np.mean([row["agreement"] for row in found]) > 0.1


def test_a_map_that_was_fitted_to_other_encoders_is_refused(tmp_path):
    arrays = {name: np.zeros(1, np.float32) for name in ("mean", "scale", "weight", "text")}
    save_file(arrays, tmp_path / "map.safetensors", {"images_sha256": "another", "texts_sha256": "of a test"})
    with pytest.raises(ValueError, match="fitted to other encoders"):
        Agreement(["a lion on a red background"], file=tmp_path / "map.safetensors")
