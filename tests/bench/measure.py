"""The benchmark's command: `python -m tests.bench.measure --help`.

Every case runs in a process of its own and gives one row. Rows are lines of JSON, which DuckDB reads as a table:
select * from 'build/bench.jsonl'.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from pathlib import Path

import click

from tests.bench import environment, suites
from tests.bench.cases import Case
from tests.bench.isolate import LIMIT_S, run_isolated
from tests.bench.labels import terminal_line
from tests.bench.page import page

KERNELS = "MLX_PTX_CACHE_DIR"  # CUDA: the folder in which MLX keeps compiled kernels


@click.command()
@click.option("--case", "cases", multiple=True, help="A case as a JSON object; fields left out have defaults. May be repeated.")
@click.option("--family", default="", help="Training steps of that family: every plan, bits and resolution.")
@click.option("--comparison", is_flag=True, help="klein 4B beside PyTorch and MLX's plain graph.")
@click.option("--large", is_flag=True, help="dev and klein 9B at 4 and 8 bits, the encoders, the loader.")
@click.option("--stages", "beside", is_flag=True, help="klein 4B: the stages beside training, and PyTorch beside them.")
@click.option("--gpu", is_flag=True, help="--comparison and --large.")
@click.option("--ranks", "several", is_flag=True, help="klein 4B on one and two GPUs, a batch of one image on each.")
@click.option("--bars", "bars", is_flag=True, help="klein 4B, every stage at 1024 px, and dev, each at 4 bits; PyTorch beside.")
@click.option("--shapes", default="", help="Every stage of that family at 1024 and 512 px and every bits; PyTorch beside.")
@click.option("--within", default=0.0, help="Seconds that all cases may take together; later cases are left out.  [default: any]")
@click.option("--limit", default=LIMIT_S, show_default=True, help="Seconds that one case may take.")
@click.option("--commit", envvar="LATENTMILL_COMMIT", help="Commit of the code, where git cannot say it.")
@click.option(
    "--table",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measure nothing: print the rows of this file as a Markdown page.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="build/bench.jsonl",
    show_default=True,
    help="File that rows are added to.",
)
def main(
    cases: tuple[str, ...],
    family: str,
    comparison: bool,
    large: bool,
    beside: bool,
    gpu: bool,
    several: bool,
    bars: bool,
    shapes: str,
    within: float,
    limit: float,
    commit: str | None,
    table: Path | None,
    out: Path,
) -> None:
    """Measure cases, print a line for each, and add its row to --out. Without options: a few small cases for any CPU."""
    if table:
        click.echo("\n".join(page([json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()])))
        return
    chosen = [Case.from_json(case) for case in cases]
    chosen += suites.comparison() if comparison or gpu else []
    chosen += suites.large() if large or gpu else []
    chosen += suites.stages_beside_training() if beside else []
    chosen += suites.ranks() if several else []
    chosen += suites.bars() if bars else []
    chosen += suites.shapes(shapes) if shapes else []
    chosen += suites.training(family) if family else []
    measure(chosen or list(suites.quick()), limit, environment.commit() if commit is None else commit, out, within)


def measure(cases: list[Case], limit_s: float, commit: str, out: Path, within_s: float = 0.0) -> None:
    """Measure cases one after another as one run, and append each row to `out` as soon as it is measured. ClickException at the
    end if any failed. A case is stopped after `limit_s` seconds. After `within_s` seconds (0: any time) the case that is measured
    is stopped, and later cases are left out.

    Rows of one run carry the same `run` (its start) and may be compared. On CUDA a run starts without compiled kernels,
    so that its first case shows the cost of a first step.
    """
    about = {"run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit}
    out.parent.mkdir(parents=True, exist_ok=True)
    failed, done, began = 0, 0, time.monotonic()
    click.echo(terminal_line(None))
    with tempfile.TemporaryDirectory() as kernels:
        for case in cases:
            left = within_s - (time.monotonic() - began) if within_s else limit_s
            if left <= 0:
                break
            row = run_isolated(case, min(limit_s, left), {KERNELS: kernels}) | about
            failed, done = failed + ("error" in row), done + 1
            click.echo(terminal_line(row))
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    click.echo(f"{done} rows added to {out}")
    if done < len(cases):
        click.echo(f"{len(cases) - done} cases were left out: {within_s:g} seconds are over")
    if failed:
        raise click.ClickException(f"{failed} of {done} cases failed")


if __name__ == "__main__":
    main()
