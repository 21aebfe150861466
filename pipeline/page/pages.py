"""The pages of a project that consist of blocks: those of its pipeline, and the curves of all training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.project.runs import trains
from stages.page import Chart, Listing, Page

if TYPE_CHECKING:
    from pipeline.project.project import Project

POINTS = 400  # points of a curve, about


def training_page(project: Project) -> Page | None:
    """None if the pipeline does not train."""
    names = [name for name in project.stage_names if trains(project.stage(name).writes)]
    if not names:
        return None
    table = f"all_{names[0]}"
    last = f"(select greatest(1, max(step) // {POINTS}) from {table})"
    curve = (
        f"select run_name as series, step // {last} * {last} as x, {{}} as y from {table} where split = '{{}}' "
        "group by all having y is not null order by series, x"
    )
    smooth = (
        f"with points as (select run_name as series, (step - 1) // {last} * {last} + {last} as x, sum(loss) as loss, "
        f"count(*) as rows from {table} where split = 'train' and isfinite(loss) group by all) "
        "select series, x, sum(loss) over near / sum(rows) over near as y from points "
        "window near as (partition by series order by x rows between 9 preceding and current row) order by series, x"
    )
    own = [block for page in project.pipeline.pages if page.name == "training" for block in page.blocks]
    return Page(
        "training",
        "Training",
        (
            Listing(
                "Runs",
                "select coalesce(name, run) as run, state, steps, wanted_steps as of, loss, held_out_loss, best_step, "
                "round(seconds / 60, 1) as minutes, differs as settings_that_differ from runs",
            ),
            Chart("Loss, mean of the last ten points", smooth, "step", "loss"),
            Chart("Loss of held-out samples", curve.format("avg(loss)", "validation"), "step", "loss"),
            *(block for block in own if isinstance(block, Chart)),
            Chart("Learning rate", curve.format("max(lr)", "train"), "step", "learning rate"),
            Chart("Norm of the gradient", curve.format("avg(grad_norm)", "train"), "step", "norm", log=True),
            Chart("Time of a step", curve.format("avg(seconds)", "train"), "step", "seconds"),
            Chart("Peak memory of MLX", curve.format("max(peak_bytes) / 1e9", "train"), "step", "GB"),
            *(block for block in own if not isinstance(block, Chart)),
        ),
    )


def pages_of(project: Project) -> dict[str, Page]:
    """By name, in the order of the menu."""
    found = {page.name: page for page in project.pipeline.pages}
    training = training_page(project)
    if training:
        found = {name: page for name, page in found.items() if name != "training"} | {"training": training}
        # The page of curves takes the place of the pipeline's own page "training", whose blocks it holds, or comes last.
        order = (
            [page.name for page in project.pipeline.pages] if "training" in {p.name for p in project.pipeline.pages} else [*found]
        )
        found = {name: found[name] for name in order}
    return found
