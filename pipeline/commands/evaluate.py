"""The command evaluate: the scores of the base, of each adapter and of real pictures side by side, with confidence intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np

from pipeline.options import with_project
from pipeline.project.project import NotBuilt, Project
from pipeline.terminal import format_table

RESAMPLES = 2000  # bootstrap samples of the prompts
PERCENTILES = (2.5, 97.5)  # the ends of a 95 % interval
RECALLS = (1, 10)  # R@k: share of the pictures whose own text is among the k nearest texts
HEAD = ("", "pictures", "style", "real", "agreement", "median rank", *(f"R@{k}" for k in RECALLS))

Row = dict[str, Any]
Groups = dict[str, list[Row]]  # heading of a line -> the rows of scores that it summarises
Pairs = list[tuple[np.ndarray, np.ndarray]]  # per prompt: values of the base's pictures, values of the adapter's


@click.command("evaluate")
@with_project
def command(project: Project) -> None:
    """Compare the scores of the base, each adapter and real pictures. `make evaluate` computes the scores first."""
    for line in evaluate(project):
        click.echo(line)


def evaluate(project: Project) -> Iterator[str]:
    """Yield the summary of a project's scores line by line: a table of means, then explanations and comparisons.

    NotBuilt if the table scores does not exist.
    """
    table = project.current("scores")
    if not table.exists:
        raise NotBuilt("evaluate needs the table scores, which is not built for this configuration; run: make evaluate", "scores")
    groups = group_rows(table.rows().to_pylist())
    if not groups:
        yield "there is no picture to compare: no previews and no references"
        return
    cells = [summary_cells(name, rows) for name, rows in groups.items()]
    yield from format_table(HEAD, cells, right=HEAD[1:]).splitlines()
    yield ""
    yield from explanations(groups)
    for name, rows in groups.items():
        if name not in ("base", "real") and "base" in groups:
            yield from comparisons(name, groups["base"], rows)


def group_rows(rows: list[Row]) -> Groups:
    """Group rows of scores by what drew them: "base", then "step 250 (1a2b3c4d)" per adapter by step, then "real"."""
    found: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[("base", "adapter", "real").index(row["kind"]), row["step"], row["adapter_id"]].append(row)
    names = {key: ("base", f"step {key[1]} ({key[2][:8]})", "real")[key[0]] for key in found}
    return {names[key]: found[key] for key in sorted(found)}


def summary_cells(name: str, rows: list[Row]) -> tuple[str, ...]:
    """Return a group's line of the table as text, a cell for every column of HEAD; "-" where no picture has the score."""
    ranks = values(rows, "agreement_rank")
    median = f"{np.median(ranks):g}" if len(ranks) else "-"
    recalls = (f"{np.mean(ranks <= k):.2f}" if len(ranks) else "-" for k in RECALLS)
    scores = (values(rows, column) for column in ("style", "real", "agreement"))
    means = (f"{score.mean():.2f}" if len(score) else "-" for score in scores)
    return (name, str(len(rows)), *means, median, *recalls)


def values(rows: list[Row], column: str) -> np.ndarray:
    """Return the values of a column that are not null, as float64."""
    return np.array([row[column] for row in rows if row[column] is not None], float)


def explanations(groups: Groups) -> Iterator[str]:
    """Yield lines that explain the columns of the table, and what the ranks would be by chance."""
    texts = max(row["texts"] for rows in groups.values() for row in rows)
    yield "style: 0 is the base, 1 the training images; real: 0 is the base, 1 the references"
    ranks = {name: values(rows, "agreement_rank") for name, rows in groups.items()}
    if not texts or not any(map(len, ranks.values())):
        return
    chance = ", ".join(f"R@{k} {min(1, k / texts):.2f}" for k in RECALLS)
    yield f"ranks are among {texts} texts; by chance: median {(texts + 1) / 2:g}, {chance}"
    k = RECALLS[-1]
    over_chance = {name: float(np.mean(found <= k)) - min(1, k / texts) for name, found in ranks.items() if len(found)}
    real = over_chance.pop("real", 0.0)
    if real > 0 and over_chance:
        shares = ", ".join(f"{name} {value / real:.2f}" for name, value in over_chance.items())
        yield f"R@{k} over chance, as a share of the real pictures': {shares}"


def comparisons(name: str, base: list[Row], adapter: list[Row]) -> Iterator[str]:
    """Yield one line per score that compares the adapter `name` with the base, over the prompts that both have drawn."""
    for column, measure, meaning in (
        ("style", auc, "style above the base's, AUC"),
        ("real", auc, "nearer to the references than the base's, AUC"),
        ("agreement", mean_difference, "agreement less the base's"),
    ):
        pairs = pair_by_prompt(base, adapter, column)
        if pairs and all(len(one) and len(other) for one, other in pairs):
            value, low, high = bootstrap_interval(pairs, measure)
            yield f"{name}: {meaning} {value:.3f} ({low:.3f} to {high:.3f})"


def pair_by_prompt(base: list[Row], adapter: list[Row], column: str) -> Pairs:
    """Return the values of `column` per prompt, of the base and of the adapter, for the prompts that both have drawn."""
    prompts: tuple[dict[str, list[Row]], dict[str, list[Row]]] = (defaultdict(list), defaultdict(list))
    for side, rows in zip(prompts, (base, adapter), strict=True):
        for row in rows:
            side[row["prompt"]].append(row)
    shared = [prompt for prompt in prompts[0] if prompt in prompts[1]]
    return [(values(prompts[0][prompt], column), values(prompts[1][prompt], column)) for prompt in shared]


def auc(base: np.ndarray, adapter: np.ndarray) -> float:
    """Return the probability that a value of `adapter` is larger than a value of `base`; equal values count half."""
    above, equal = adapter[:, None] > base[None], adapter[:, None] == base[None]
    return float(np.mean(above + 0.5 * equal))


def mean_difference(base: np.ndarray, adapter: np.ndarray) -> float:
    """Return the mean of `adapter` minus the mean of `base`."""
    return float(adapter.mean() - base.mean())


def bootstrap_interval(pairs: Pairs, measure: Callable[[np.ndarray, np.ndarray], float]) -> tuple[float, float, float]:
    """Return `measure(base, adapter)` over all prompts, and the low and high end of its 95 % bootstrap interval.

    Prompts are resampled, with the seed 0: pictures of one prompt depend on each other.
    """

    def over(chosen: Any) -> float:
        return measure(*(np.concatenate([pairs[place][side] for place in chosen]) for side in (0, 1)))

    draw = np.random.default_rng(0)
    resampled = [over(draw.integers(0, len(pairs), len(pairs))) for _ in range(RESAMPLES)]
    low, high = np.percentile(resampled, PERCENTILES)
    return over(range(len(pairs))), float(low), float(high)
