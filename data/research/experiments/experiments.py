"""Four experiments with micro: the average of the weights, caption dropout, several resolutions, and preservation.

    python -m data.research.experiments.experiments WORK [OUT]

trains the runs of runs.py in the folder WORK (20 minutes on two cores) and writes results.jsonl, the picture sheets and the page
into OUT, which is this folder by default. Tables that are up to date are not computed again.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from data.research.experiments import report, results, runs
from data.research.experiments.held_out import HeldOutLoss, checkpoints
from data.research.experiments.scoring import Scorer
from data.research.experiments.sheets import write_sheets
from pipeline.project.project import Project
from stages.tuner.checkpoint import ADAPTER, EMA

LOG = logging.getLogger("experiments")
SEEDS = [0, 1, 2, 3, 4, 5]  # seeds of the empty prompt
# Previews: (run, kind of prompt, guidance, side in pixels).
DROPOUT_RUNS = ("base", "dropout 0", "plain", "dropout 0.5")
PRESERVED_RUNS = ("preserved, dropout 0", "preserved")
STYLE_ZERO = ("base", "all", 3.0, 128)  # the previews whose mean style is 0
PREVIEWS = [
    *((run, "trigger", guidance, 128) for guidance in (3.0, 1.0, 5.0) for run in DROPOUT_RUNS),
    *((run, "trigger", guidance, 128) for guidance in (3.0, 1.0, 5.0) for run in PRESERVED_RUNS),
    ("two sizes", "trigger", 3.0, 128),
    *((run, "empty", 3.0, 128) for run in (*DROPOUT_RUNS, *PRESERVED_RUNS)),
    *((run, kind, 3.0, 128) for kind in ("none", "class") for run in ("base", "plain", "preserved")),
    *((run, "trigger", 3.0, 192) for run in ("base", "plain", "two sizes")),
]

Row = dict[str, Any]


def losses(projects: dict[str, Project], folder: Path) -> list[Row]:
    """Measure the held-out loss of the base model, of every run, and of every checkpoint of the run "noisy" with its moving
    average. Return one row per measurement. `projects` maps a run's name to its project. `folder` is the work folder.
    """
    held = HeldOutLoss(runs.build(folder, runs.BOTH_SIZES, runs.BEFORE))
    rows = [{"what": "loss", "run": "base", "step": 0, **found} for found in held.measure(None)]
    for run, project in projects.items():
        if run == "noisy":
            for saved in checkpoints(project):
                for name in (ADAPTER, EMA):
                    about = {"what": "loss", "run": run, "step": saved.step, "average": name == EMA}
                    rows += [about | found for found in held.measure(saved, name, ("own",), (128,))]
        else:
            saved = checkpoints(project)[-1]
            rows += [{"what": "loss", "run": run, "step": saved.step, **found} for found in held.measure(saved)]
        LOG.info("measured %s", run)
    return rows


def previews(folder: Path, run: str, kind: str, guidance: float, side: int) -> list[Row]:
    """Draw the previews of a run and return one row per picture, with its file in `path`. `folder` is the work folder.
    `run` is the name of the run; "base" draws without an adapter. `kind` is the kind of prompt, such as "trigger".
    `guidance` is the guidance scale. `side` is the side of a picture in pixels.
    """
    prompts = runs.prompts(kind)
    seeds = SEEDS if kind == "empty" else [0]
    of = "plain" if run == "base" else run
    drawn = (f"samples.guidance={guidance}", f"samples.width={side}", f"samples.height={side}", f"samples.seeds={seeds}")
    adapter = ("samples.base=true", "samples.checkpoints=[]") if run == "base" else ("samples.base=false",)
    changes = (*runs.RUNS[of], f"captions.preview_prompts={json.dumps(prompts)}", *drawn, *adapter)
    project = runs.build(folder, changes, ("captions", "embeddings", "samples"))
    table = project.current("samples")
    about = {"what": "picture", "run": run, "kind": kind, "guidance": guidance, "side": side}
    rows = [
        about | {"prompt": row["prompt"], "seed": row["seed"], "path": str(table.folder / "artifacts" / row["path"])}
        for row in table.rows().to_pylist()
    ]
    LOG.info("drew %s", about)
    return sorted(rows, key=lambda row: (prompts.index(row["prompt"]), row["seed"]))


def scored(rows: list[Row], base_rows: list[Row]) -> list[Row]:
    """Return the preview rows with scores instead of files. `base_rows` are the base's previews of all subjects."""
    scorer = Scorer([(runs.subject_of(row["prompt"]), Path(row["path"])) for row in base_rows])
    same = {request(row): Path(row["path"]) for row in rows if row["run"] == "base"}
    found = []
    for row in rows:
        subject = runs.subject_of(row["prompt"])
        about = {name: row[name] for name in ("what", "run", "kind", "guidance", "side", "seed")}
        base = None if row["run"] == "base" else same.get(request(row))
        found.append(about | {"subject": subject} | scorer.score(Path(row["path"]), subject, base))
    return found


def request(row: Row) -> tuple[Any, ...]:
    """Return (prompt, seed, guidance, side) of a preview. Two previews with equal values differ only in the model that drew
    them.
    """
    return tuple(row[name] for name in ("prompt", "seed", "guidance", "side"))


def main(work: Path, rows_file: Path, page: Path) -> None:
    """Train, measure and draw everything; write the rows into `rows_file`, charts and tables into the folder `page`."""
    folder = runs.make_project(work / "experiments")
    projects = {run: runs.train(folder, run) for run in runs.RUNS}
    about: list[Row] = [{"what": "data", "sha256": runs.fingerprint()}]
    about += [{"what": "run", "run": run, "set": runs.settings(run)} for run in runs.RUNS]
    measured = losses(projects, folder)
    style_zero = previews(folder, *STYLE_ZERO)
    drawn = [row for preview in PREVIEWS for row in previews(folder, *preview)]
    rows = [*about, *measured, *scored(drawn, style_zero)]
    page.mkdir(parents=True, exist_ok=True)
    rows_file.write_text("".join(json.dumps(rounded(row)) + "\n" for row in rows))
    write_sheets(drawn, page)
    report.write(page, results.read(rows_file))


def rounded(row: Row) -> Row:
    """Round the numbers of a row to five digits."""
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), results.FILE, report.FOLDER)
