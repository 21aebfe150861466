"""Commands of the pipeline retrieval, and the project.toml with which its projects begin."""

import json
from collections.abc import Mapping

from pipeline.commands import Own
from stages.models.family import choose
from stages.pipelines import Option, Template
from stages.settings import toml_string

HERE = __name__
TEXT = """\
# A latentmill project. Every setting has a default; `latentmill plan` tells what each table will need.

[project]
pipeline = "retrieval"
family = {family}
{weights}
[sources]
roots = [{code}]  # folders, or packages such as "package:stdlib"; only read, never written

[units]
min_lines = 1  # of code: 2 leaves out functions of one line

# Without [train], the code is indexed by the encoder as it is. With it, the encoder is tuned to this code first, and the tuned
# one is searched if it answers held-out docstrings better, by more than chance.
# [train]
{train}
"""
TUNING = {"steps": 40, "batch_size": 64, "lr": 0.001}  # the short recipe of data/docs/library.md


def project_toml(options: Mapping[str, str]) -> str:
    """`options`: code, family, and weights for others than the family's. Raises ValueError for an unknown family."""
    from stages.retrieval.families import FAMILIES

    record = choose(FAMILIES, options["family"])
    settings = TUNING | dict(record.begin.get("train", {}))
    train = "\n".join(f"# {key} = {json.dumps(value)}" for key, value in settings.items())  # JSON is TOML here
    weights = f"weights = {toml_string(options['weights'])}\n" if options.get("weights") else ""
    return TEXT.format(family=toml_string(record.name), weights=weights, code=toml_string(options["code"]), train=train)


TEMPLATE = Template(
    options=(
        Option("code", "The folder of source code; only read.", default=None, kind="folder"),
        Option("family", "The encoder; `latentmill families` lists them.", default="retriever-micro"),
    ),
    write=project_toml,
)
OWN = Own(
    commands={
        "find": f"{HERE}.find:command",
        "mcp": f"{HERE}.mcp:command",
        "search": f"{HERE}.search:command",
        "evaluate": f"{HERE}.evaluate:command",
        "export": f"{HERE}.export:command",
    },
    template=f"{HERE}:TEMPLATE",
)
