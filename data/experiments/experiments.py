"""Four experiments on micro: what the average of the weights, caption dropout, several resolutions and preservation do.

    python -m data.experiments.experiments WORK [OUT]

trains the runs of runs.py in the folder WORK, some 20 minutes on two cores, and writes results.jsonl and the strips of
pictures into OUT, this folder by default. What is done already is not done again. Then `report.py` writes the page.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from data.experiments import report, results, runs
from data.experiments.judging import HeldOut, Looks, checkpoints
from data.experiments.strips import strip
from pipeline.project.project import Project
from stages.tuner.checkpoint import ADAPTER, EMA

LOG = logging.getLogger("experiments")
HERE = Path(__file__).parent
SEEDS = [0, 1, 2, 3, 4, 5]  # of the empty prompt
# Which previews: who draws, the kind of prompt, guidance, side.
DROPPED = ("base", "dropout 0", "plain", "dropout 0.5")
HELD = ("preserved, dropout 0", "preserved")
AXIS = ("base", "all", 3.0, 128)  # where style begins
PREVIEWS = [
    *((run, "trigger", guidance, 128) for guidance in (3.0, 1.0, 5.0) for run in DROPPED),
    *((run, "trigger", guidance, 128) for guidance in (3.0, 1.0, 5.0) for run in HELD),
    ("two sizes", "trigger", 3.0, 128),
    *((run, "empty", 3.0, 128) for run in (*DROPPED, *HELD)),
    *((run, kind, 3.0, 128) for kind in ("none", "class") for run in ("base", "plain", "preserved")),
    *((run, "trigger", 3.0, 192) for run in ("base", "plain", "two sizes")),
]

Row = dict[str, Any]


def losses(projects: dict[str, Project], folder: Path) -> list[Row]:
    """The held-out loss of the base, of every run, and of every checkpoint of the noisy one with its average."""
    held = HeldOut(runs.build(folder, runs.EVERYTHING, runs.BEFORE))
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
    """Draw them: rows with the picture's file."""
    prompts = runs.prompts(kind)
    seeds = SEEDS if kind == "empty" else [0]
    of = "plain" if run == "base" else run
    drawn = (f"samples.guidance={guidance}", f"samples.width={side}", f"samples.height={side}", f"samples.seeds={seeds}")
    who = ("samples.base=true", "samples.checkpoints=[]") if run == "base" else ("samples.base=false",)
    changes = (*runs.RUNS[of], f"captions.preview_prompts={json.dumps(prompts)}", *drawn, *who)
    project = runs.build(folder, changes, ("captions", "embeddings", "samples"))
    table = project.current("samples")
    about = {"what": "picture", "run": run, "kind": kind, "guidance": guidance, "side": side}
    rows = [
        about | {"prompt": row["prompt"], "seed": row["seed"], "path": str(table.folder / "artifacts" / row["path"])}
        for row in table.rows().to_pylist()
    ]
    LOG.info("drew %s", about)
    return sorted(rows, key=lambda row: (prompts.index(row["prompt"]), row["seed"]))


def judged(rows: list[Row], axis: list[Row]) -> list[Row]:
    """The previews with their scores, without their files. `axis`: the base's previews of all subjects."""
    looks = Looks([(runs.subject_of(row["prompt"]), Path(row["path"])) for row in axis])
    same = {asked(row): Path(row["path"]) for row in rows if row["run"] == "base"}
    made = []
    for row in rows:
        subject = runs.subject_of(row["prompt"])
        about = {name: row[name] for name in ("what", "run", "kind", "guidance", "side", "seed")}
        beside = None if row["run"] == "base" else same.get(asked(row))
        made.append(about | {"subject": subject} | looks.judge(row, subject, beside))
    return made


def asked(row: Row) -> tuple[Any, ...]:
    """All of a preview but who draws it."""
    return tuple(row[name] for name in ("prompt", "seed", "guidance", "side"))


def main(work: Path, out: Path) -> None:
    """All of it."""
    folder = runs.make(work / "experiments")
    projects = {run: runs.train(folder, run) for run in runs.RUNS}
    about: list[Row] = [{"what": "data", "sha256": runs.fingerprint()}]
    about += [{"what": "run", "run": run, "set": runs.settings(run)} for run in runs.RUNS]
    measured = losses(projects, folder)
    axis = previews(folder, *AXIS)
    drawn = [row for preview in PREVIEWS for row in previews(folder, *preview)]
    rows = [*about, *measured, *judged(drawn, axis)]
    out.mkdir(parents=True, exist_ok=True)
    (out / results.FILE).write_text("".join(json.dumps(rounded(row)) + "\n" for row in rows))
    strip(drawn, out)
    report.write(out)


def rounded(row: Row) -> Row:
    """Numbers to five digits."""
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else HERE)
