"""Adapter files that somebody else wrote: each says what it means, or is refused in one line."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from stages.models.flux2.architecture import FLUX2

NAME = "transformer_blocks.0.attn.to_q"
PAIR = {f"transformer.{NAME}.lora_A.weight": mx.ones((4, 6)), f"transformer.{NAME}.lora_B.weight": mx.ones((8, 4))}
OWN = {name.removeprefix("transformer."): value for name, value in PAIR.items()}


def read(folder: Path, arrays: dict[str, mx.array], **header: str) -> dict[str, float]:
    mx.save_safetensors(str(folder / "a.safetensors"), arrays, header)
    return FLUX2.read_adapter(folder / "a.safetensors")[1]


@pytest.mark.parametrize("patterns", [{NAME: 2}, {r".*\.to_q": 2}, {"x|(attn|y).to_q": 2, NAME: 9}])
def test_an_alpha_by_a_pattern_of_peft_goes_before_the_common_one(patterns: dict[str, int], tmp_path: Path) -> None:
    config = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": patterns}
    assert read(tmp_path, PAIR, lora_adapter_metadata=json.dumps(config)) == {NAME: 0.5}
    assert read(tmp_path, PAIR, lora_adapter_metadata=json.dumps(config | {"transformer.alpha_pattern": {}})) == {NAME: 2.0}


PEFT = [[1], "x", {"lora_alpha": "x"}, {"lora_alpha": None}, {"lora_alpha": 10**400}]
PEFT += [{"alpha_pattern": pattern} for pattern in ([NAME], {NAME: "x"}, *({regex: 2} for regex in ("(", "(a+)+x", ".*.*.*.*")))]
PEFT += [{"alpha_pattern": {"a{99999999999}": 2}}]
OTHERS = [{"scales": "[1]"}, {"scales": json.dumps({NAME: None})}, {"alpha": "x"}, {"alpha": "[1]"}]


@pytest.mark.parametrize("header", [*({"lora_adapter_metadata": json.dumps(each)} for each in PEFT), *OTHERS], ids=str)
def test_settings_in_a_header_that_are_none_are_refused_in_one_line(header: dict[str, str], tmp_path: Path) -> None:
    assert read(tmp_path, OWN, alpha="8", scales=json.dumps({"other": 3})) == {NAME: 2.0}
    with pytest.raises(ValueError, match=r"a\.safetensors: ") as error:
        read(tmp_path, PAIR if "lora_adapter_metadata" in header else OWN, **header)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("there", ["a", "b"])
def test_half_of_a_factor_of_a_lokr_and_an_array_that_is_no_matrix_are_refused(there: str, tmp_path: Path) -> None:
    other = {f"transformer_blocks.1.attn.to_q.lokr_w{n}": mx.ones((2, 1 + n)) for n in (1, 2)}
    missing = "b" if there == "a" else "a"
    with pytest.raises(ValueError, match=rf"lacks {NAME}\.lokr_w1_{missing}, though it has other arrays"):
        read(tmp_path, other | {f"{NAME}.lokr_w1_{there}": mx.ones((2, 2))})
    with pytest.raises(ValueError, match=r"lora_A\.weight must be a matrix, got the shape \(4,\)"):
        read(tmp_path, PAIR | {f"transformer.{NAME}.lora_A.weight": mx.ones(4)})
