import json

import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters.targets import adapter_metadata, select_targets, target_scales

LINEARS = {
    "transformer_blocks.0.attn.to_q": (16, 16),
    "transformer_blocks.0.ff.linear_in": (96, 16),
    "transformer_blocks.1.attn.to_q": (16, 16),
    "single_transformer_blocks.0.attn.to_out": (16, 64),
}


def selected(*patterns: str) -> list[str]:
    return [target.name for target in select_targets(LINEARS, patterns, 4)]


def test_a_pattern_matches_a_linears_name_from_any_dot_on():
    assert selected("*") == list(LINEARS)
    assert selected("to_q") == selected("attn.to_q") == selected("*.to_q") == [n for n in LINEARS if n.endswith("to_q")]
    assert selected("transformer_blocks.*") == list(LINEARS)[:3]
    assert selected("single_transformer_blocks.*", "transformer_blocks.1.*") == list(LINEARS)[2:]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"'attn.to_k' matches no Linear of the blocks; nearest: attn.to_q") as caught:
        selected("*", "attn.to_k")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="targets must have at least one pattern"):
        selected()


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
        (
            {"ranks": {"to_q": 17}},
            r"rank must be <= 16 for transformer_blocks\.0\.attn\.to_q \(16 x 16\), got 17: a larger one adds",
        ),
        ({"rslora": True}, "rslora needs an alpha, .*; alpha = 4 gives a scale of 1"),
    ],
)
def test_a_rank_alpha_or_pattern_out_of_range_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        select_targets(LINEARS, ["attn.to_q"], 16, **settings)
    assert "\n" not in str(caught.value)


def test_the_metadata_has_scales_where_alpha_over_rank_is_not_every_linears_scale():
    def metadata(**settings):
        return adapter_metadata(select_targets(LINEARS, ["to_q"], 8, **settings))

    assert metadata() == {"variant": "lora", "rank": "8", "alpha": "8"}
    assert metadata(alpha=2.0, ranks={"transformer_blocks.1.*": 2}) == {"variant": "lora", "rank": "8", "alpha": "2"}
    both = dict.fromkeys(selected("to_q"), 1.0)
    assert json.loads(metadata(ranks={"transformer_blocks.1.*": 2})["scales"]) == both
    assert json.loads(metadata(alpha=4.0, rslora=True, ranks={"*": 16})["scales"]) == both
    third = metadata(alpha=1 / 3)  # "alpha" has six digits in the file
    assert json.loads(third["scales"]) == dict.fromkeys(selected("to_q"), 1 / 3 / 8)
