"""Commands that every pipeline has, one module each; those of one pipeline are in a folder of its name.

`latentmill --help` lists them by GENERIC in pipeline/cli.py, and those of a pipeline by the record OWN of its folder,
without an import of what they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

import stages


@dataclass(frozen=True)
class Own:
    """What one pipeline adds to the command line and the Python API, as "module:attribute", imported at its first use."""

    commands: Mapping[str, str] = field(default_factory=dict)  # command -> a click command; its help is the docstring
    methods: Mapping[str, str] = field(default_factory=dict)  # method of `Project` -> function(project, ...)
    template: str = ""  # a Template: what `latentmill init` asks for and writes
    hints: str = ""  # function(project, {stage: Need}) -> lines about the settings, for `plan`
    prepare: str = ""  # function(options of `init`) -> the same, with what was found on this machine
    unused: str = ""  # function(project) -> files outside the tables that the present settings do not use; `clean` deletes them
    probes: str = ""  # function(family, budget in bytes) -> {title: function() -> figures}: the probes of `doctor --measure`


def own(pipeline: str) -> Own:
    """OWN of pipeline.commands.NAME for a pipeline of this program, or of the module of a project's own pipeline."""
    stages.pipeline(pipeline)
    found: Own = getattr(import_module(f"{__name__}.{pipeline}" if pipeline in stages.PIPELINES else pipeline), "OWN", Own())
    return found
