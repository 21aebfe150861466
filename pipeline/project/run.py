"""One training run of a project as a value: its settings, rows, losses, checkpoints and adapters."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.store.table import TableFolder


@dataclass(frozen=True)
class Run:
    stage: str
    recipe: str  # the name of its folder, 12 hex digits
    name: str  # that the user gave, or ""
    table: TableFolder
    record: Mapping[str, Any] = field(repr=False)  # the content of run.json
    current: bool = False  # the run of the present settings

    @property
    def label(self) -> str:
        return self.name or self.recipe

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted keys, such as "train.lr"."""
        return flatten(self.record.get("settings", {}))

    @functools.cached_property
    def rows(self) -> pa.Table:
        """One row per step, split ("train", "validation") and sample, of an unfinished run too."""
        return self.table.committed().select(self.table.schema.stored.names)

    @functools.cached_property
    def steps(self) -> pa.Table:
        """One row per training step: step, loss (mean of its samples), lr, seconds, peak_bytes (so far)."""
        import pyarrow.compute as pc

        rows = self.rows.filter(pc.equal(self.rows["split"], "train"))
        found = rows.group_by("step").aggregate([("loss", "mean"), ("lr", "max"), ("seconds", "max"), ("peak_bytes", "max")])
        return (
            found.select(["step", "loss_mean", "lr_max", "seconds_max", "peak_bytes_max"])
            .rename_columns(["step", "loss", "lr", "seconds", "peak_bytes"])
            .sort_by("step")
        )

    @functools.cached_property
    def held_out(self) -> dict[int, float]:
        """step -> mean loss, without steps whose samples are not all measured yet."""
        import pyarrow.compute as pc

        rows = self.rows.filter(pc.equal(self.rows["split"], "validation"))
        found = rows.group_by("step").aggregate([("loss", "mean"), ("loss", "count")]).to_pylist()
        whole = max((each["loss_count"] for each in found), default=0)
        return {each["step"]: each["loss_mean"] for each in sorted(found, key=lambda e: e["step"]) if each["loss_count"] == whole}

    @property
    def checkpoints(self) -> dict[int, Path]:
        paths = self.table.folder.glob("artifacts/checkpoints/step-*/state.json")
        return dict(sorted((int(path.parent.name.split("-")[1]), path.parent) for path in paths))

    @functools.cached_property
    def adapters(self) -> dict[str, int]:
        """sha256 of an adapter file in a checkpoint -> step."""
        found = {}
        for step, folder in self.checkpoints.items():
            try:
                files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["files"]
                found.update({files[name]["sha256"]: step for name in files if name.startswith("adapter")})
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged, or being deleted
        return found

    @property
    def best_step(self) -> int | None:
        """The checkpoint with the lowest held-out loss, except step 0."""
        losses = {step: loss for step, loss in self.held_out.items() if step and step in self.checkpoints}
        return min(losses, key=lambda step: (losses[step], step), default=None)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"ema": {"decay": 0.9}}} -> {"train.ema.decay": 0.9}."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return found
