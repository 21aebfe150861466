"""`latentmill runs`, `compare` and `best`: training runs listed, named, side by side, and the checkpoint of one to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pipeline.commands.catalog import OTHER_DATA, plain, rows_of_results, run_facts
from pipeline.options import JSON, give_json, with_project
from pipeline.project.project import Project
from pipeline.project.runs import TrainingRun, find_run, find_runs, mark, rename
from pipeline.terminal import format_cell, format_seconds, format_table, tell
from stages.pipelines import load

SHOWN = 3  # settings that a line of the list names
ROWS = 10  # stretches of the curves, of equal length
SHOWN_FACTS = {  # name in the comparison -> column of the table `runs`
    "recipe": "run",
    "state": "state",
    "steps": "steps",
    "time": "seconds",
    "data rows": "data_rows",
    "loss": "loss",
    "best step": "best_step",
}
MEASURES = ("held-out", "scores")  # what can tell the checkpoints of a run apart


@click.command("runs")
@click.argument("run", required=False)
@click.option("--name", help="Give RUN this name.")
@JSON
@with_project
def command(run: str | None, name: str | None, as_json: bool, project: Project) -> None:
    """List all training runs of a project, or show or name one run. RUN is the name of a run, or the first digits of
    its recipe. The recipe is the run's id of 12 hex digits. With RUN, the facts about this run are shown. With RUN and
    `--name`, this run gets the given name. Earlier runs are kept when the settings change. To use an earlier run in
    another command, give that command the option `--run` with the run's name.
    """
    if name and not run:
        raise ValueError("which run? latentmill runs RUN --name NAME; `latentmill runs` lists them")
    if as_json and not name:
        found = [find_run(project, run)] if run else find_runs(project)
        plain_facts = [run_facts(project, each) for each in found]
        give_json([{key: value for key, value in facts.items() if key != "different"} for facts in plain_facts])
    elif not run:
        tell(list_runs(project) or f"{project.name} has no run yet; run: latentmill train")
    else:
        one = find_run(project, run)
        if name:
            rename(project, one, name)
            tell(f"the run {one.recipe} is called {name}")
        else:
            facts = run_facts(project, one)
            facts["seconds"] = format_seconds(facts["seconds"])
            lines = [(key, value) for key, value in facts.items() if key not in ("settings", "differs", "different", "versions")]
            lines += [(key, f"{plain(mine)}, now {plain(now)}") for key, (mine, now) in facts["different"].items()]
            tell(format_table(("fact", "value"), lines))


def list_runs(project: Project) -> str:
    rows = []
    for run in find_runs(project):
        facts = run_facts(project, run)
        different = [f"{key.removeprefix(run.stage + '.')} {plain(value)}" for key, (value, _) in facts["different"].items()]
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        also = f", {OTHER_DATA}" if facts["differs"].endswith(OTHER_DATA) else ""
        same = "present settings" if run.current else "none: other data, weights or version"
        rows.append(
            (
                f"{run.label}{' *' if run.current else ''}",
                f"{facts['steps']}/{facts['wanted_steps']}" if facts["wanted_steps"] else str(facts["steps"]),
                None if facts["loss"] is None else f"{facts['loss']:.4g}",
                f"{facts['marked_step']}, marked"
                if facts["marked_step"] is not None
                else f"{facts['best_step']}: {facts['best_loss']:.4g}"
                if facts["best_step"]
                else None,
                ", ".join(different[:SHOWN]) + more + also or same,
            )
        )
    return format_table(("run", "steps", "loss", "best", "settings that differ"), rows, right=("steps", "loss")) if rows else ""


@click.command("compare")
@click.argument("runs", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="Where the file with the results side by side is written.")
@with_project
def compare_command(runs: tuple[str, ...], out: Path | None, project: Project) -> None:
    """Compare training runs: settings that differ, losses over the steps, and results side by side. RUNS are the names
    of at least two runs, as `latentmill runs` lists them. A run's recipe, the hash that names its folder, is accepted
    too. The results side by side are written to the file --out.
    """
    if len(runs) < 2:
        raise ValueError("compare needs two runs or more: latentmill compare A B; with make: make compare RUNS='A B'")
    found = [find_run(project, text) for text in runs]
    if len({run.recipe for run in found}) < 2:
        raise ValueError(f"compare needs at least two different runs, got {', '.join(runs)}")
    for line in compare(project, found, out):
        tell(line)


@click.command("best")
@click.argument("run", required=False)
@click.option("--by", type=click.Choice(MEASURES), help="What decides.  [default: held-out, if data are held out; else scores]")
@click.option("--mark", "step", type=click.IntRange(0), help="Mark the checkpoint of this step as the best.  [0: none]")
@with_project
def best_command(run: str | None, by: str | None, step: int | None, project: Project) -> None:
    """Name the best checkpoint of a run, and say why. It is the one that you have marked, here or on the page. If none is
    marked, the best checkpoint has the lowest held-out loss. If no samples are held out, it has the best scores. RUN is
    the name or recipe of a run. Without RUN, the run of the current settings is used. If there is none, the newest run
    is used.

    The held-out loss says how well the data are predicted. It can rise while the results still gain the style of the data. The
    scores compare the results themselves: samples.checkpoints="all" draws those of every checkpoint.
    """
    runs = find_runs(project)
    found = find_run(project, run) if run else next((each for each in runs if each.current), runs[0] if runs else None)
    if found is None:
        raise ValueError(f"{project.name} has no run yet; run: latentmill train")
    if step is not None:
        mark(found, step or None)
        found = find_run(project, found.recipe)
    for line in best(project, found, by):
        tell(line)


def compare(project: Project, runs: Sequence[TrainingRun], out: Path | None = None) -> Iterator[str]:
    """Facts, differing settings and losses of the runs; with `side_by_side`, also an image `out` (None: in exports/)."""
    facts = [run_facts(project, run) for run in runs]
    heads = [run.label for run in runs]
    for fact in facts:
        fact["seconds"] = format_seconds(fact["seconds"])
    yield format_table(("", *heads), [(name, *(fact[key] for fact in facts)) for name, key in SHOWN_FACTS.items()])
    yield ""
    differ = differing_settings(runs)
    yield format_table(("setting", *heads), differ) if differ else "no setting differs: the runs were trained on different data"
    yield ""
    yield format_table(("mean loss of steps", *heads), _curves(runs))
    if steps := sorted({step for run in runs for step in run.held_out}):
        yield ""
        yield format_table(
            ("held-out loss at step", *heads), [(step, *(run.held_out.get(step) for run in runs)) for step in steps]
        )
    if project.pipeline.side_by_side:
        target = out or project.path / "exports" / f"{'-and-'.join(heads)}.png"
        rows = [
            row | {"file": project.path / "tables" / name.removeprefix("all_") / row["recipe"] / "artifacts" / row["path"]}
            for name, table in rows_of_results(project, runs).items()
            for row in table.to_pylist()
        ]
        written = load(project.pipeline.side_by_side)([(run.label, run.adapters) for run in runs], rows, target)
        none = "no results with equal prompts and seeds to show side by side; run: make samples"
        yield ""
        yield f"side by side: {written}" if written else none


def differing_settings(runs: Sequence[TrainingRun]) -> list[list[str]]:
    """Rows of a setting and its value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    settings = [(key, *(run.settings.get(key) for run in runs)) for key in keys]
    return [[format_cell(value, "unset") for value in row] for row in settings if len(set(map(repr, row[1:]))) > 1]


def _curves(runs: Sequence[TrainingRun]) -> list[tuple[Any, ...]]:
    """Mean loss of each run over about `ROWS` stretches of equal length; None where a run has no step."""
    losses = [dict(zip(*run.steps.select(["step", "loss"]).to_pydict().values(), strict=True)) for run in runs]
    last = max((max(by_step, default=0) for by_step in losses), default=0)
    width = max(1, -(-last // ROWS))
    rows = []
    for first in range(1, last + 1, width):
        end = min(first + width - 1, last)
        parts = [[loss for step, loss in by_step.items() if first <= step <= end] for by_step in losses]
        rows.append((f"{first} to {end}", *(sum(part) / len(part) if part else None for part in parts)))
    return rows


def best(project: Project, run: TrainingRun, by: str | None = None) -> Iterator[str]:
    """The marked checkpoint, or the best by held-out loss or scores (`by`, of `MEASURES`), and how to export it."""
    if run.marked_step is not None and by is None:
        step = run.marked_step
        yield f"{run.label}: step {step}, marked as the best"
    elif run.best_step is not None and by != "scores":
        losses = {step: loss for step, loss in run.held_out.items() if step in run.checkpoints}
        step, last = run.best_step, max(losses)
        yield f"{run.label}: step {step}, held-out loss {losses[step]:.4g}, the lowest of {len(losses)} checkpoints"
        if last != step:
            yield f"the last, step {last}, has {losses[last]:.4g}"
    elif by != "held-out" and (scores := checkpoint_scores(project, run)) and project.pipeline.ranking:
        step = best_of(scores)
        title = project.pipeline.ranking.title
        yield f"{run.label}: step {step}, {title} {scores[step]:.4g}, the best of {len(scores)} checkpoints"
    else:
        raise ValueError(
            f"{run.label}: nothing tells its {len(run.checkpoints)} checkpoints apart; hold data out (a new run with "
            "[train.validation] in project.toml), or score the results of several checkpoints: make evaluate"
        )
    yield f"to export it: latentmill export --run {run.label} --step {step}"


def checkpoint_scores(project: Project, run: TrainingRun) -> dict[int, float]:
    """Step -> score of a checkpoint, the higher the better; empty if nothing was scored."""
    from pipeline.commands.query import answer
    from pipeline.errors import NotBuilt

    if not project.pipeline.ranking:
        return {}
    try:
        rows = answer(project, project.pipeline.ranking.sql).to_pylist()
    except NotBuilt:
        return {}
    steps = run.adapters
    return {steps[row["adapter_id"]]: row["score"] for row in rows if row["adapter_id"] in steps and row["score"] is not None}


def best_of(scores: Mapping[int, float]) -> int:
    """The step with the highest score, the earliest of equal ones, as for the held-out loss."""
    return min(scores, key=lambda step: (-scores[step], step))
