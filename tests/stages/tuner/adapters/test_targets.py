"""Adapters before the first step: fresh, and started from another adapter."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import (
    adapter_metadata,
    check_initial,
    fresh_adapter,
    select_targets,
    start_from_adapter,
    target_scales,
)
from tests.stages.tuner.adapters.variants import IN, OUT, VARIANTS, normal, targets_of, trained

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


def test_the_first_pattern_that_matches_gives_a_linear_its_rank_and_alpha():
    found = select_targets(
        LINEARS, ["*"], 8, ranks={"transformer_blocks.1.*": 2, "attn.to_q": 4, "ff.*": 0}, alphas={"to_out": 3.0, "*": 1.0}
    )
    assert {t.name: (t.rank, t.alpha) for t in found} == {
        "transformer_blocks.0.attn.to_q": (4, 1.0),
        "transformer_blocks.1.attn.to_q": (2, 1.0),
        "single_transformer_blocks.0.attn.to_out": (8, 3.0),
    }


@pytest.mark.parametrize(
    ("alpha", "settings", "scales"),
    [
        (None, {}, [1.0] * 4),
        (None, {"ranks": {"to_q": 4}}, [1.0] * 4),
        (4.0, {"ranks": {"transformer_blocks.1.*": 4}}, [0.25, 0.25, 1.0, 0.25]),
        (8.0, {"ranks": {"to_q": 4}, "rslora": True}, [4.0, 2.0, 4.0, 2.0]),
    ],
)
def test_a_scale_is_alpha_over_the_rank_or_with_rslora_its_root_and_1_without_an_alpha(alpha, settings, scales):
    assert list(target_scales(select_targets(LINEARS, ["*"], 16, alpha, **settings)).values()) == scales


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": {"to_k": 4}}, "rank_for: 'to_k' matches no target; nearest: to_q"),
        ({"alphas": {"to_out": 4.0}}, "alpha_for: 'to_out' matches no target"),
        (
            {"ranks": {"to_q": 17}},
            r"rank must be <= 16 for transformer_blocks\.0\.attn\.to_q \(16 x 16\), got 17: a larger one adds",
        ),
        ({"whole": ("haed",)}, "full: 'haed' matches no Linear of the blocks"),
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


def test_fresh_adapters_are_uniform_within_the_kaiming_bound_and_b_is_zero():
    made = fresh_adapter(select_targets({"wide": (64, 1024)}, ["*"], 64), 0)
    a = np.array(made["wide.lora_A.weight"])
    assert not np.array(made["wide.lora_B.weight"]).any()
    assert 0.99 / 32 < np.abs(a).max() <= 1 / 32
    assert abs(a.std() * 32 - 1 / np.sqrt(3)) < 0.01  # so PEFT's kaiming_uniform_(a=sqrt(5)) has it


def test_a_fresh_array_depends_only_on_its_name_and_the_seed():
    all_of_them = fresh_adapter(select_targets(LINEARS, ["*"], 4), 0)
    some = fresh_adapter(select_targets(LINEARS, ["single_transformer_blocks.*"], 4), 0)
    assert all(mx.array_equal(value, all_of_them[name]) for name, value in some.items())
    pairs = all_of_them, fresh_adapter(select_targets(LINEARS, ["*"], 4), 1)
    drawn = [value.flatten().tolist()[:8] for each in pairs for name, value in each.items() if name.endswith(lora.A)]
    assert len({*map(tuple, drawn)}) == 2 * len(LINEARS)


def outputs(arrays, scales, weight, x):
    return lora.AdaptedLinear(arrays, scales)("q", weight, x)


@pytest.mark.parametrize(("source", "variant"), [*zip(VARIANTS, VARIANTS, strict=True), ("lora", "dora")])
def test_an_adapter_starts_with_the_change_of_the_source_at_any_scale_and_larger_rank(source, variant):
    weight, x = normal(5, 96, 64), normal(6, 3, 64)
    old = targets_of({"q": (96, 64)}, source, rank=2)
    found = trained(old, {"q": weight})
    settings = {"rank": 5, "alpha": 2.5, **VARIANTS[variant]}
    new = select_targets({"q": (96, 64), "k": (96, 64)}, ["*"], **settings)
    fresh = fresh_adapter(new, 9, {"q": weight, "k": weight})
    made = start_from_adapter(found, target_scales(old), new, fresh, {"q": weight})
    assert {name: a.shape for name, a in made.items()} == {name: a.shape for name, a in fresh.items()}
    assert all(mx.array_equal(made[name], fresh[name]) for name in made if name.startswith("k."))
    want = outputs(found, target_scales(old), weight, x)
    assert mx.linalg.norm(outputs(made, target_scales(new), weight, x) - want).item() <= 1e-6 * mx.linalg.norm(want).item()
    if lora.A in new[0].shapes:
        assert mx.abs(made["q" + lora.A]).min(axis=1).max().item() > 0  # every direction can be trained


def test_a_source_that_does_not_fit_the_targets_or_is_not_finite_is_refused_in_one_line():
    weight = normal(5, OUT, IN)
    targets = {name: targets_of({"blocks.0.q": (OUT, IN)}, name) for name in VARIANTS}
    large = select_targets({"blocks.0.q": (OUT, IN)}, ["*"], 7)
    other = select_targets({"blocks.0.q": (OUT, 8)}, ["*"], 4)
    away = select_targets({"blocks.0.qs": (OUT, IN)}, ["*"], 4)
    wide = select_targets({"blocks.0.q": (OUT, IN)}, ["*"], 64, variant="lokr", factor=2)
    cases = [
        (large, targets["lora"], "must have a rank <= 4, got 7: raise the rank to 7"),
        (other, targets["lora"], r"must be for shape \(48, 32\), got \(48, 8\)"),
        (away, targets["lora"], "blocks.0.qs, which is not a target: add it to the targets; did you mean blocks.0.q"),
        (targets["dora"], targets["lora"], "must be a LoRA, got a DoRA"),
        (targets["lokr"], targets["dora"], "must be a DoRA, got a LoKr"),
        (wide, targets["whole lokr"], "set the factor"),
    ]
    for old, new, message in cases:
        base = dict.fromkeys(("blocks.0.q", "blocks.0.qs"), weight)
        with pytest.raises(ValueError, match=message) as caught:
            start_from_adapter(fresh_adapter(old, 0, base), target_scales(old), new, fresh_adapter(new, 0, base), base)
        assert "\n" not in str(caught.value)
    broken = fresh_adapter(large, 0) | {"blocks.0.q" + lora.B: mx.full((OUT, 7), float("nan"))}
    with pytest.raises(ValueError, match=r"q.lora_B.weight has values that are not finite: choose an earlier checkpoint"):
        check_initial(broken, target_scales(large), large)
