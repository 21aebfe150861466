"""A training step once more, beside what the table says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.project.project import Project


def replay_run(project: Project, step: int, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """A line per sample of the step: its loss now, and as it was logged."""
    from stages.text_to_image.train.replay import replay

    stage = project.stage("train")
    table = project.built(stage.writes, "replay")
    context = project.context(stage, artifacts=table.folder / "artifacts", stored=table.rows(), progress=progress)
    context.pending = context.stored.slice(0, 0)
    found = replay(context, step)
    for one in found:
        logged = "not logged" if one.logged is None else f"logged {one.logged:.9g}"
        yield f"sample {one.sample}: image {one.image_id[:12]}, sigma {one.sigma:.4f}, loss {one.loss:.9g}, {logged}"
    same = all(one.loss == one.logged for one in found)
    yield f"step {step}: {'the same to the bit' if same else 'not to the bit: another machine, plan or version wrote it'}"
