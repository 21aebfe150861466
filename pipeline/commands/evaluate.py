"""What the scores say: the base, each adapter and real pictures side by side, and how sure the difference is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np

from pipeline.options import with_project
from pipeline.project.project import NotBuilt, Project
from pipeline.terminal import format_table

RESAMPLES = 2000  # of the prompts, with replacement
INSIDE = (2.5, 97.5)  # percentiles of them that an interval spans
AT = (1, 10)  # a text found among so many

Row = dict[str, Any]
Pairs = list[tuple[list[Row], list[Row]]]  # by prompt: the base's pictures, the adapter's


@click.command("evaluate")
@with_project
def command(project: Project) -> None:
    """Compare the scores of the base, each adapter and real pictures. `make evaluate` computes the scores first."""
    for line in evaluate(project):
        click.echo(line)


def evaluate(project: Project) -> Iterator[str]:
    """The summary of the scores, in lines. NotBuilt if there are none."""
    table = project.current("scores")
    if not table.exists:
        raise NotBuilt("evaluate needs the table scores, which is not built for this configuration; run: make evaluate", "scores")
    groups = grouped(table.rows().to_pylist())
    if not groups:
        yield "there is no picture to compare: no previews and no references"
        return
    yield from format_table(HEAD, [line(name, rows) for name, rows in groups.items()], right=HEAD[1:]).splitlines()
    yield ""
    yield from notes(groups)


def grouped(rows: list[Row]) -> dict[str, list[Row]]:
    """The base's previews, each adapter's by its step, the real pictures."""
    found: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[("base", "adapter", "real").index(row["kind"]), row["step"], row["adapter_id"]].append(row)
    return {named(key): found[key] for key in sorted(found)}


def named(key: tuple[int, int, str]) -> str:
    """What a group is called."""
    kind, step, adapter_id = key
    return ("base", f"step {step} ({adapter_id[:8]})", "real")[kind]


HEAD = ("", "pictures", "style", "real", "agreement", "median rank", *(f"R@{k}" for k in AT))


def line(name: str, rows: list[Row]) -> tuple[str, ...]:
    """A group's means, as cells."""
    ranks = values(rows, "agreement_rank")
    middle = f"{np.median(ranks):g}" if len(ranks) else "-"
    recalls = (f"{np.mean(ranks <= k):.2f}" if len(ranks) else "-" for k in AT)
    means = (mean(values(rows, column)) for column in ("style", "real", "agreement"))
    return (name, str(len(rows)), *means, middle, *recalls)


def values(rows: list[Row], column: str) -> np.ndarray:
    """A column without its nulls."""
    return np.array([row[column] for row in rows if row[column] is not None], float)


def mean(numbers: np.ndarray) -> str:
    """Two digits; a dash for no numbers."""
    return f"{numbers.mean():.2f}" if len(numbers) else "-"


def notes(groups: dict[str, list[Row]]) -> Iterator[str]:
    """What the columns mean, and each adapter against the base."""
    texts = max(row["texts"] for rows in groups.values() for row in rows)
    yield "style: 0 is the base, 1 the images that were trained on; real: 0 is the base, 1 the references"
    if texts and any(len(values(rows, "agreement")) for rows in groups.values()):
        chance = ", ".join(f"R@{k} {min(1, k / texts):.2f}" for k in AT)
        yield f"ranks are among {texts} texts; by chance: median {(texts + 1) / 2:g}, {chance}"
        yield from share(groups, texts)
    for name, rows in groups.items():
        if name not in ("base", "real") and "base" in groups:
            yield from against(name, paired(groups["base"], rows))


def share(groups: dict[str, list[Row]], texts: int) -> Iterator[str]:
    """How much of the real pictures' agreement over chance the previews have."""
    most = AT[-1]
    found = {name: values(rows, "agreement_rank") for name, rows in groups.items()}
    over = {name: np.mean(ranks <= most) - min(1, most / texts) for name, ranks in found.items() if len(ranks)}
    real = over.pop("real", 0.0)
    if real > 0 and over:
        shares = ", ".join(f"{name} {value / real:.2f}" for name, value in over.items())
        yield f"R@{most} over chance, as a share of the real pictures': {shares}"


def paired(base: list[Row], adapter: list[Row]) -> Pairs:
    """The pictures of both by prompt, for the prompts that both have drawn."""
    sides: tuple[dict[str, list[Row]], dict[str, list[Row]]] = (defaultdict(list), defaultdict(list))
    for side, rows in zip(sides, (base, adapter), strict=True):
        for row in rows:
            side[row["prompt"]].append(row)
    return [(sides[0][prompt], sides[1][prompt]) for prompt in sides[0] if prompt in sides[1]]


def against(name: str, pairs: Pairs) -> Iterator[str]:
    """An adapter against the base, with intervals."""
    for column, measure, what in (
        ("style", auc, "style above the base's, AUC"),
        ("real", auc, "nearer to the references than the base's, AUC"),
        ("agreement", rise, "agreement less the base's"),
    ):
        numbers = [(values(base, column), values(adapter, column)) for base, adapter in pairs]
        if numbers and all(len(base) and len(adapter) for base, adapter in numbers):
            value, low, high = interval(numbers, measure)
            yield f"{name}: {what} {value:.3f} ({low:.3f} to {high:.3f})"


def auc(base: np.ndarray, adapter: np.ndarray) -> float:
    """How often a picture of the adapter lies above one of the base; equal ones count half."""
    above, equal = adapter[:, None] > base[None], adapter[:, None] == base[None]
    return float(np.mean(above + 0.5 * equal))


def rise(base: np.ndarray, adapter: np.ndarray) -> float:
    """The difference of the means."""
    return float(adapter.mean() - base.mean())


def interval(
    pairs: list[tuple[np.ndarray, np.ndarray]], measure: Callable[[np.ndarray, np.ndarray], float]
) -> tuple[float, float, float]:
    """The measure over all prompts, and where it lies when the prompts are drawn anew (a bootstrap of 95 %)."""

    def over(chosen: Any) -> float:
        return measure(*(np.concatenate([pairs[place][side] for place in chosen]) for side in (0, 1)))

    draw = np.random.default_rng(0)
    drawn = [over(draw.integers(0, len(pairs), len(pairs))) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, INSIDE)
    return over(range(len(pairs))), float(low), float(high)
