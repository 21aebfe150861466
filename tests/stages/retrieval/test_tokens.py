"""The stage tokens, and the encoder that reads token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schemas.retrieval import TOKENS
from stages.retrieval.encoder import TextTokenizer, load_encoder
from stages.retrieval.families import FAMILIES
from tests.stages.retrieval import project

TINY = FAMILIES["tiny"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    TINY.architecture.write_random_weights(folder, TINY, 0)
    return folder


def test_every_text_has_its_ids_cut_to_the_length_of_its_role_with_the_end_token(tmp_path: Path) -> None:
    folder = project.make(tmp_path, "[tokens]\nquery_tokens = 9\ndocument_tokens = 40\n", verbs=3, things=2)
    project.run(folder, "sources", "units", "pairs", "tokens")
    found = project.rows(folder, "tokens")
    assert {row["role"] for row in found} == {"query", "document"}
    for row in found:
        assert row["count"] <= (9 if row["role"] == "query" else 40)
        assert row["ids_shape"] == [row["count"]]
    assert any(row["truncated"] for row in found)
    assert TOKENS.key == ("text_id",)


def test_a_query_has_one_unit_vector_per_token_whatever_it_is_encoded_with(model: Path) -> None:
    encoder = load_encoder(model, model, TINY, query_tokens=12)
    texts = ["Count the words of a list.", "parse dates", "words " * 50]
    together, alone = encoder.encode_queries(texts), [encoder.encode_queries([text])[0] for text in texts]
    for text, one, other in zip(texts, together, alone, strict=True):
        assert one.shape == (len(encoder.query_ids(text)), TINY.sizes["dimensions"])
        assert np.abs(one - other).max() <= 1e-5
        assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-5)
        assert encoder.tokenizer.pieces(encoder.query_ids(text).tolist())[-1] == "</s>"
    assert len(together[2]) == 12
    assert encoder.encode_queries([]) == []


def test_a_tokenizer_lower_cases_only_if_its_family_says_so_and_one_that_is_missing_is_refused_in_one_line(
    model: Path, tmp_path: Path
) -> None:
    plain, lower = (TextTokenizer(model, lower_case=flag) for flag in (False, True))
    assert plain.encode(["Words"]) == lower.encode(["words"])
    with pytest.raises(ValueError, match=r"/tokenizer\.json is missing"):
        TextTokenizer(tmp_path, lower_case=False)
