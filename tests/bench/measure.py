"""The benchmark's command: `python -m tests.bench.measure --help`.

Every case runs in a process of its own and gives one row. Rows are lines of JSON, which DuckDB reads as a table:
select * from 'build/bench.jsonl'.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import tempfile
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
@click.option(
    "--gpu", is_flag=True, help="klein 4B beside PyTorch and MLX's plain graph; dev, klein 9B, the encoders, the loader."
)
@click.option("--ranks", "several", is_flag=True, help="klein 4B on one and two GPUs, a batch of one image on each.")
@click.option("--shapes", default="", help="Every stage of that family at 1024 and 512 px and every bits; PyTorch beside.")
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
    gpu: bool,
    several: bool,
    shapes: str,
    limit: float,
    commit: str | None,
    table: Path | None,
    out: Path,
) -> None:
    """Measure cases, print a line for each, and add its row to --out. Without options: a few small cases for any CPU."""
    if table:
        click.echo("\n".join(page([json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()])))
        return
    listed = [*suites.comparison(), *suites.large()] if gpu else []
    listed += suites.ranks() if several else []
    listed += suites.shapes(shapes) if shapes else []
    torch = importlib.util.find_spec("torch") is not None
    chosen = [*map(Case.from_json, cases), *(case for case in listed if case.backend == "mlx" or torch)]
    measure(chosen or list(suites.quick()), limit, environment.commit() if commit is None else commit, out)


def measure(cases: list[Case], limit_s: float, commit: str, out: Path) -> None:
    """Measure cases one after another as one run, and append each row to `out` as soon as it is measured. ClickException at the
    end if any failed. A case is stopped after `limit_s` seconds.

    Rows of one run carry the same `run` (its start) and may be compared. On CUDA a run starts without compiled kernels,
    so that its first case shows the cost of a first step.
    """
    about = {"run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit}
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    click.echo(terminal_line(None))
    with tempfile.TemporaryDirectory() as kernels:
        for case in cases:
            row = run_isolated(case, limit_s, {KERNELS: kernels}) | about
            failed += "error" in row
            click.echo(terminal_line(row))
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    click.echo(f"{len(cases)} rows added to {out}")
    if failed:
        raise click.ClickException(f"{failed} of {len(cases)} cases failed")


if __name__ == "__main__":
    main()
