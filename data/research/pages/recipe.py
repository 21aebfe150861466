"""Write the generated parts of data/docs/recipe.md: `make pages`.

The generated parts are the tables of our settings and defaults, read from the code, beside the facts about other trainers in
rivals.toml. They stand between `<!-- NAME: generated -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from data import DOCS
from data.research.pages.settings import defaults
from pipeline.commands.settings import chosen, in_toml
from stages.tuner.config import OptimizerConfig
from stages.tuner.optimizers import METHODS

FILE = DOCS / "recipe.md"
CHANGES = {"setting": "a new run", "selects": "another length", "runtime": "no difference"}  # kind of setting -> effect
RIVALS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("rivals.toml").read_text(encoding="utf-8"))
GENERATED = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str) -> str:
    """Return the text `page` with every generated part replaced. Raises KeyError for a part that no function generates."""
    return GENERATED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", page)


def write() -> None:
    """Update data/docs/recipe.md."""
    FILE.write_text(render(FILE.read_text(encoding="utf-8")), encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table; vertical bars in cells are escaped."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *escaped])


def settings_tables() -> str:
    """Return one table in Markdown for each section of [train]: default, meaning, trainers with the same default, effect of
    a change.
    """
    sections: dict[str, list[list[str]]] = {}
    for entry in chosen("text_to_image", "train"):
        title = f"### [{entry.section}]" + (", off unless the project file has it" if entry.optional else "")
        choices = f"; one of {', '.join(f'`{choice}`' for choice in entry.choices)}" if entry.choices else ""
        same = RIVALS["same_default"].get(entry.key, "")
        bounds = f"; {entry.bounds}" if entry.bounds else ""
        sections.setdefault(title, []).append(
            [f"`{entry.name}`", _quoted(entry.default), entry.doc + bounds + choices, same, CHANGES[entry.kind]]
        )
    head = ["setting", "default", "meaning", "same default in", "a change makes"]
    return "\n\n".join(f"{title}\n\n{markdown(head, rows)}" for title, rows in sections.items())


def _quoted(default: Any) -> str:
    return in_toml(default) if default is None else f"`{in_toml(default)}`"


def optimizer_tables() -> str:
    """Return one table in Markdown for each optimizer: the values of a run whose project file sets none, and their sources."""
    return "\n\n".join(f"### {kind}\n\n{_optimizer_table(kind)}" for kind in METHODS)


def _optimizer_table(kind: str) -> str:
    made: Any = OptimizerConfig(kind=kind).method()  # type: ignore[arg-type]
    settable = {field.name for field in dataclasses.fields(OptimizerConfig)}
    numbers = {"lr": made.usual_lr} | {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    sources = RIVALS["optimizer"][kind] | {"weight_decay": RIVALS["same_default"]["train.optimizer.weight_decay"]}
    rows = []
    for name, value in numbers.items():
        section = "`[train]`" if name == "lr" else "`[train.optimizer]`" if name in settable else "nothing"
        rows.append([f"`{name}`", _quoted(value), sources[name], section])
    return markdown(["number", "default", "from", "set by"], rows)


def rivals_table() -> str:
    """Return a table in Markdown with our defaults beside those of other trainers."""
    values = defaults()
    rows = [
        [row["name"], re.sub(r"\{([\w.]+)\}", lambda found: values[found[1]], row["ours"]), *row["theirs"]]
        for row in RIVALS["defaults"]
    ]
    return markdown(["", "latentmill", *RIVALS["trainers"]], rows)


def noise_names_table() -> str:
    """Return a table in Markdown with the names that other trainers give to our distributions of noise levels."""
    names = sorted({name for own in RIVALS["noise_names"].values() for name in own})
    rows = [
        [trainer, *(f"our `{own[name]}`" if name in own else "" for name in names)]
        for trainer, own in RIVALS["noise_names"].items()
    ]
    return markdown(["trainer", *(f"its `{name}`" for name in names)], rows)


def mflux_table() -> str:
    return markdown(["mflux 0.24.0 has", "read in"], [[each["what"], each["source"]] for each in RIVALS["mflux"]])


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings_tables,
    "optimizers": optimizer_tables,
    "rivals": rivals_table,
    "names": noise_names_table,
    "mflux": mflux_table,
}


if __name__ == "__main__":
    write()
