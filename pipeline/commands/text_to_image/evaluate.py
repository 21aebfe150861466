"""`latentmill evaluate`: scores previews of a finished run, and compares base, adapters and real pictures, with intervals."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from pipeline.commands.run import bring_up_to_date
from pipeline.options import with_project
from pipeline.project import runs
from pipeline.project.outlook import needs, outlook
from pipeline.project.project import Project
from pipeline.terminal import format_table, say_aside, tell
from schemas.text_to_image import CAPTIONS, EMBEDDINGS, IMAGES, SAMPLES, SCORES, TRAIN
from stages.intervals import bootstrap
from stages.tuner.checkpoint import ADAPTER

HEAD = ("", "pictures", "style", "real")

Row = dict[str, Any]
Groups = dict[str, list[Row]]  # name of a group of pictures, such as "base" -> their rows in the table scores
Pairs = list[tuple[np.ndarray, np.ndarray]]  # per prompt: values of the base's pictures, values of the adapter's


@click.command("evaluate")
@with_project
def command(project: Project) -> None:
    """Draw all preview prompts with the newest finished run, and score the pictures. The report compares the base model,
    each adapter and real pictures. Nothing is trained: a run is scored as it is, and if pictures, captions or settings
    have changed since, a line says what `make train` would do. --run takes another run.
    """
    choose_finished(project)
    bring_up_to_date(project, [each.name for each in (IMAGES, CAPTIONS, EMBEDDINGS, SAMPLES, SCORES)])
    for line in evaluate(project):
        tell(line)


def choose_finished(project: Project) -> None:
    """Use the run of the present settings if it is finished, else the newest that is, and all preview prompts."""
    found = [run for run in runs.find_runs(project) if run.table.exists]
    finished = [run for run in found if (run.table.folder / "artifacts" / ADAPTER).is_file()]
    if project.fixed:
        finished = [run for run in finished if run.table.folder == project.fixed.table.folder]
    if not finished:
        raise ValueError("there is no finished run to score; make train finishes one")
    run = max(finished, key=lambda run: run.current)  # the newest of equals
    project.overrides = ("samples.first_prompts=0", *project.overrides)
    if not project.fixed and (to_do := changes(project)):
        since = "pictures, captions or settings have changed since, and make train would do"
        say_aside(f"the run {run.label} is scored as it is; {since}: {', '.join(to_do)}")
        # A run brings the preview prompts of its time.
        prompts = json.dumps(project.config.sections[CAPTIONS.name].preview_prompts, ensure_ascii=False)
        project.overrides = (f"captions.preview_prompts={prompts}", *project.overrides)
    runs.choose(project, run.recipe, project.overrides)


def changes(project: Project) -> list[str]:
    """What `make train` would do before previews, such as "1 caption"; empty if the run of the present settings is finished."""
    names = [*project.chain(TRAIN.name), TRAIN.name]
    found = [each for each in needs(project, outlook(project)) if each.stage_name in names]
    return [each.to_do for each in found if each.missing] if found[-1].missing else []


def evaluate(project: Project) -> Iterator[str]:
    """A report on the table `scores`: means by group, and each adapter against the base. Raises NotBuilt."""
    groups = group_rows(project.rows(SCORES, "evaluate").to_pylist())
    if not groups:
        yield "there is no picture to compare: no previews and no references"
        return
    cells = [summary_cells(name, rows) for name, rows in groups.items()]
    yield from format_table(HEAD, cells, right=HEAD[1:]).splitlines()
    yield ""
    yield "style: 0 is the base, 1 the training images; real: 0 is the base, 1 the references"
    yield from missing_scores(groups)
    for name, rows in groups.items():
        if name not in ("base", "real") and "base" in groups:
            yield from comparisons(name, groups["base"], rows)


def missing_scores(groups: Groups) -> Iterator[str]:
    """Why the table shows dashes."""
    base = groups.get("base", [])
    if not base:
        yield "a dash: there are no previews of the base; set base = true in [samples]"
    elif len({row["prompt"] for row in base}) == 1:
        yield (
            "a dash: a picture is compared with the base's pictures of other prompts, and there is one prompt only: add a second "
            "to [captions] preview_prompts, then make evaluate"
        )
    elif "real" not in groups:
        yield "a dash: there are no real pictures; [scores] references names their folder"


def group_rows(rows: list[Row]) -> Groups:
    found: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[("base", "adapter", "real").index(row["kind"]), row["step"], row["adapter_id"]].append(row)
    names = {key: ("base", f"step {key[1]} ({key[2][:8]})", "real")[key[0]] for key in found}
    return {names[key]: found[key] for key in sorted(found)}


def summary_cells(name: str, rows: list[Row]) -> tuple[str, ...]:
    scores = (values(rows, column) for column in ("style", "real"))
    return (name, str(len(rows)), *(f"{score.mean():.2f}" if len(score) else "-" for score in scores))


def values(rows: list[Row], column: str) -> np.ndarray:
    return np.array([row[column] for row in rows if row[column] is not None], float)


def comparisons(name: str, base: list[Row], adapter: list[Row]) -> Iterator[str]:
    """For each score, the AUC of adapter against base with a 95 % bootstrap interval."""
    for column, meaning in (("style", "style above the base's"), ("real", "nearer to the references than the base's")):
        pairs = pair_by_prompt(base, adapter, column)
        # A score that a prompt lacks, for the base or the adapter, has no line.
        if pairs and all(len(one) and len(other) for one, other in pairs):
            value, low, high = auc_interval(pairs)
            yield f"{name}: {meaning}, AUC {value:.3f} ({low:.3f} to {high:.3f})"


def pair_by_prompt(base: list[Row], adapter: list[Row], column: str) -> Pairs:
    """(values of the base, of the adapter) for each prompt that both have drawn."""
    prompts: tuple[dict[str, list[Row]], dict[str, list[Row]]] = (defaultdict(list), defaultdict(list))
    for side, rows in zip(prompts, (base, adapter), strict=True):
        for row in rows:
            side[row["prompt"]].append(row)
    shared = [prompt for prompt in prompts[0] if prompt in prompts[1]]
    return [(values(prompts[0][prompt], column), values(prompts[1][prompt], column)) for prompt in shared]


def auc(base: np.ndarray, adapter: np.ndarray) -> float:
    """Probability that a random adapter's score is higher than a random base's; equal ones count half."""
    above, equal = adapter[:, None] > base[None], adapter[:, None] == base[None]
    return float(np.mean(above + 0.5 * equal))


def auc_interval(pairs: Pairs) -> tuple[float, float, float]:
    """(value, low, high) over the scores of all prompts."""

    def measure_prompts(chosen: Any) -> float:
        return auc(*(np.concatenate([pairs[place][side] for place in chosen]) for side in (0, 1)))

    # Prompts are resampled, not pictures: the pictures of one prompt depend on each other.
    return measure_prompts(range(len(pairs))), *bootstrap(len(pairs), measure_prompts)
