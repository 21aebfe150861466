import json

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter
from stages.tuner.adapters.targets import adapter_metadata, select_targets, target_scales

LINEARS = {
    "transformer_blocks.0.attn.to_q": (8, 8),
    "transformer_blocks.0.ff.linear_in": (48, 8),
    "transformer_blocks.1.attn.to_q": (8, 8),
    "single_transformer_blocks.0.attn.to_out": (8, 32),
}


def names(*patterns: str) -> list[str]:
    return [target.name for target in select_targets(LINEARS, patterns, 4)]


def test_a_pattern_names_linears_from_any_part_of_their_name_on():
    assert names("*") == list(LINEARS)
    assert names("to_q") == names("attn.to_q") == names("*.to_q") == [n for n in LINEARS if n.endswith("to_q")]
    assert names("transformer_blocks.*") == list(LINEARS)[:3]
    assert names("single_transformer_blocks.*", "transformer_blocks.1.*") == list(LINEARS)[2:]


def test_a_pattern_that_names_nothing_is_refused_with_what_is_near():
    with pytest.raises(ValueError, match=r"'attn.to_k' matches no Linear of the blocks; nearest: attn.to_q") as caught:
        names("*", "attn.to_k")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="targets must have at least one pattern"):
        names()


def test_alpha_is_the_rank_unless_given():
    assert target_scales(select_targets(LINEARS, ["*"], 4)) == dict.fromkeys(LINEARS, 1.0)
    assert target_scales(select_targets(LINEARS, ["*"], 4, 2.0)) == dict.fromkeys(LINEARS, 0.5)


def test_the_first_pattern_that_matches_gives_a_linear_its_rank_and_alpha():
    found = select_targets(
        LINEARS, ["*"], 8, ranks={"transformer_blocks.1.*": 2, "attn.to_q": 4, "ff.*": 0}, alphas={"to_out": 3.0, "*": 1.0}
    )
    assert {t.name: (t.rank, t.alpha) for t in found} == {
        "transformer_blocks.0.attn.to_q": (4, 1.0),
        "transformer_blocks.1.attn.to_q": (2, 1.0),
        "single_transformer_blocks.0.attn.to_out": (8, 3.0),
    }
    assert [t.scale for t in select_targets(LINEARS, ["*"], 8, ranks={"to_q": 4})] == [1.0] * 4
    assert [t.scale for t in select_targets(LINEARS, ["to_q"], 8, 4.0, ranks={"transformer_blocks.1.*": 2})] == [0.5, 2.0]


def test_rslora_divides_alpha_by_the_root_of_the_rank():
    found = select_targets(LINEARS, ["*"], 16, 8.0, ranks={"to_q": 4}, rslora=True)
    assert [t.scale for t in found] == [4.0, 2.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": {"to_k": 4}}, "rank_for: 'to_k' matches no target; nearest: to_q"),
        ({"alphas": {"to_out": 4.0}}, "alpha_for: 'to_out' matches no target"),
        ({"ranks": {"to_q": -1}}, "rank_for: the value of 'to_q' must be >= 0 \\(0 leaves the Linears out\\), got -1"),
        ({"alphas": {"to_q": 0.0}}, "alpha_for: the value of 'to_q' must be > 0, got 0.0"),
        ({"ranks": {"*": 0}}, "rank_for must leave at least one target"),
        ({"rslora": True}, "rslora needs an alpha, .*; alpha = 4 gives a scale of 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        select_targets(LINEARS, ["attn.to_q"], 16, **settings)
    assert "\n" not in str(caught.value)


def test_a_header_names_the_scales_that_alpha_and_rank_do_not_give():
    def said(**settings):
        return adapter_metadata(select_targets(LINEARS, ["to_q"], 8, **settings))

    assert said() == {"variant": "lora", "rank": "8", "alpha": "8"}
    assert said(alpha=2.0, ranks={"transformer_blocks.1.*": 2}) == {"variant": "lora", "rank": "8", "alpha": "2"}
    both = dict.fromkeys(names("to_q"), 1.0)
    assert json.loads(said(ranks={"transformer_blocks.1.*": 2})["scales"]) == both
    assert json.loads(said(alpha=4.0, rslora=True, ranks={"*": 16})["scales"]) == both


def test_fresh_adapters_are_uniform_within_the_kaiming_bound_and_b_is_zero():
    made = fresh_adapter(select_targets({"wide": (16, 1024)}, ["*"], 64), 0)
    a = np.array(made["wide.lora_A.weight"])
    assert made["wide.lora_A.weight"].dtype == mx.float32
    assert a.shape == (64, 1024)
    assert made["wide.lora_B.weight"].shape == (16, 64)
    assert not np.array(made["wide.lora_B.weight"]).any()
    assert 0.99 / 32 < np.abs(a).max() <= 1 / 32
    assert abs(a.std() * 32 - 1 / np.sqrt(3)) < 0.01  # so PEFT's kaiming_uniform_(a=sqrt(5)) has it


def test_an_adapters_start_does_not_depend_on_which_others_there_are():
    all_of_them = fresh_adapter(select_targets(LINEARS, ["*"], 4), 0)
    some = fresh_adapter(select_targets(LINEARS, ["single_transformer_blocks.*"], 4), 0)
    assert all(mx.array_equal(value, all_of_them[name]) for name, value in some.items())


def test_a_linear_adds_the_scaled_adapter_and_keeps_the_dtype_of_the_stream():
    draw = np.random.default_rng(0)
    W, A, B, x = (draw.normal(size=s).astype(np.float32) for s in ((6, 8), (2, 8), (6, 2), (3, 8)))
    apply = lora.adapted_linear({"q.lora_A.weight": mx.array(A), "q.lora_B.weight": mx.array(B)}, {"q": 0.5})
    np.testing.assert_allclose(np.array(apply("q", mx.array(W), mx.array(x))), x @ (W + 0.5 * B @ A).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(apply("k", mx.array(W), mx.array(x))), x @ W.T, rtol=1e-4, atol=1e-5)
    assert apply("q", mx.array(W).astype(mx.bfloat16), mx.array(x).astype(mx.bfloat16)).dtype == mx.bfloat16


def test_moved_is_the_largest_magnitude_of_any_b():
    adapters = fresh_adapter(select_targets(LINEARS, ["*"], 4), 0)
    assert lora.largest_change(adapters).item() == 0
    adapters["transformer_blocks.1.attn.to_q.lora_B.weight"] -= 0.25
    assert lora.largest_change(adapters).item() == 0.25
