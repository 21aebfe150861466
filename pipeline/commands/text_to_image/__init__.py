"""Commands of the pipeline text_to_image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands import Own

if TYPE_CHECKING:
    from pipeline.project.project import Project

HERE = __name__
OWN = Own(
    commands={
        "lint": f"{HERE}.dataset:lint",
        "crops": f"{HERE}.dataset:crops",
        "captions": f"{HERE}.dataset:captions",
        "segments": f"{HERE}.training:segments_command",
        "replay": f"{HERE}.training:replay_command",
        "memory": f"{HERE}.memory:command",
        "generate": f"{HERE}.generate:command",
        "adapter": f"{HERE}.describe:command",
        "evaluate": f"{HERE}.evaluate:command",
        "export": f"{HERE}.export:command",
        "publish": f"{HERE}.publish:command",
        **{name: f"{HERE}.combine:{name}_command" for name in ("merge", "average", "resize", "extract")},
    },
    methods={"adapter": f"{HERE}.generate:adapter"},
    template="stages.text_to_image.template:TEMPLATE",
    hints=f"{HERE}.hints:hints",
    prepare=f"{HERE}.hints:prepare",
    unused=f"{HERE}:unused_files",
    probes=f"{HERE}.memory:probes",
)


def unused_files(project: Project) -> list[Path]:
    """Converted copies of a transformer, gigabytes each, that neither [train] nor [samples] loads as they are now."""
    import mlx.core as mx

    from stages.text_to_image import weights

    folder = project.path / weights.CONVERTED
    if not folder.is_dir():
        return []
    try:
        transformer = project.component("transformer", fetch=False)
    except ValueError:  # it is unknown which weights the copies are of
        return []
    sections = project.config.sections
    readers = [(getattr(mx, each.precision), each) for each in (sections["train"], sections["samples"])]
    return weights.unused_copies(folder, transformer, project.family, readers)
