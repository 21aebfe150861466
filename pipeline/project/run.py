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
    """One training run of a project. `stage` is the name of its stage. `recipe` is the name of its folder, 12 hex digits. `name`
    is the user's name for it, or "". `table` is the table with its rows and checkpoints. `record` is the content of run.json, a
    dict with entries such as "settings". `current` is True for the run of the present settings.
    """

    stage: str
    recipe: str
    name: str
    table: TableFolder
    record: Mapping[str, Any] = field(repr=False)
    current: bool = False

    @property
    def label(self) -> str:
        """Return the name of the run. If it has none, return its recipe, the 12 hex digits of its folder."""
        return self.name or self.recipe

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that the run was made with, as a dict. Keys are dotted, such as "train.lr"."""
        return flatten(self.record.get("settings", {}))

    @functools.cached_property
    def rows(self) -> pa.Table:
        """Return the rows that the run has written so far, as a table. There is one row per step, split and sample. The
        split is "train" or "validation". The run need not be finished.
        """
        return self.table.committed().select(self.table.schema.stored.names)

    @functools.cached_property
    def steps(self) -> pa.Table:
        """Return a table with one row per training step, in order. Its columns are `step`, `loss` (the mean over the
        step's samples), `lr` (the learning rate), `seconds` (the duration of the step) and `peak_bytes` (the peak
        memory of MLX so far, in bytes).
        """
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
        """Return the mean losses of the held-out samples, as a dict from step to loss. A step is left out if some of
        its held-out samples are not measured yet.
        """
        import pyarrow.compute as pc

        rows = self.rows.filter(pc.equal(self.rows["split"], "validation"))
        found = rows.group_by("step").aggregate([("loss", "mean"), ("loss", "count")]).to_pylist()
        whole = max((each["loss_count"] for each in found), default=0)
        return {each["step"]: each["loss_mean"] for each in sorted(found, key=lambda e: e["step"]) if each["loss_count"] == whole}

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints of the run: step -> folder."""
        paths = self.table.folder.glob("artifacts/checkpoints/step-*/state.json")
        return dict(sorted((int(path.parent.name.split("-")[1]), path.parent) for path in paths))

    @functools.cached_property
    def adapters(self) -> dict[str, int]:
        """The adapter files in the run's checkpoints, as a dict: sha256 of the file -> step of the checkpoint. Damaged
        checkpoints are left out.
        """
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
        """The step of the checkpoint with the lowest held-out loss. It is None if no checkpoint has a held-out loss.
        Step 0 is left out.
        """
        losses = {step: loss for step, loss in self.held_out.items() if step and step in self.checkpoints}
        return min(losses, key=lambda step: (losses[step], step), default=None)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one flat dict with dotted keys. For example, `{"train": {"ema": {"decay": 0.9}}}`
    becomes `{"train.ema.decay": 0.9}`. `prefix` is put before every key as it is, so it should end with a dot.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return found
