"""A small project whose tables are written row by row without running a stage, so that every number is known.

Its images are used, or dropped by one stage each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from pipeline.store.table import TableFolder, Writer
from schemas.table import TableSchema
from stages.pipelines import Pipeline
from stages.text_to_image import PIPELINE
from stages.text_to_image.families import FAMILIES

RECIPE = "0123456789ab"
EMPTY = {pa.string(): "", pa.bool_(): False}


def table(name: str) -> TableSchema:
    return PIPELINE.stage(name).writes


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class FakeProject:
    """The part of a Project that query and follow use, over tables whose recipe is always RECIPE."""

    path: Path
    pipeline: Pipeline = PIPELINE
    stage_names: tuple[str, ...] = tuple(PIPELINE.stages)
    family: Any = FAMILIES["tiny"]

    def resource(self, name: str) -> Path:
        assert name == "image_folder"
        return self.path / "images"

    def folder(self, stage_name: str) -> TableFolder:
        return TableFolder(self.path / "tables" / stage_name / RECIPE, table(stage_name))

    current = folder

    def stage(self, stage_name: str) -> Any:
        return SimpleNamespace(result=None, writes=table(stage_name))


def write(project: FakeProject, stage_name: str, rows: list[dict[str, Any]], live: list[dict[str, Any]] | None = None) -> None:
    """Write a table; columns that a row leaves out are empty. With `live`, all rows but these are dead."""
    schema = table(stage_name).batch
    empty = {f.name: None if f.nullable else [] if pa.types.is_list(f.type) else EMPTY.get(f.type, 0) for f in schema}

    def whole(given: list[dict[str, Any]]) -> pa.Table:
        assert set().union(*given) <= set(empty)
        return pa.table({name: [row.get(name, empty[name]) for row in given] for name in empty}, schema)

    key = table(stage_name).key
    with Writer(project.folder(stage_name), {"stage": stage_name}) as writer:
        for batch in whole(rows).to_batches():
            writer.append(batch)
        for row in rows if table(stage_name).artifact else ():
            writer.write_artifact(row[table(stage_name).artifact], lambda path: path.write_bytes(b"a picture") and None)
        writer.finish(None if live is None else whole(live).select(list(key)), {})


IMAGES = {
    "a.jpg": None,
    "sub/b.png": None,
    "broken.jpg": "truncated",
    "copy-of-a.jpg": "duplicate",
    "mute.png": None,
    "thin.png": None,
    "late.png": None,
}
TRAINED = ("a.jpg", "sub/b.png")


def make(path: Path, stage_names: tuple[str, ...] = tuple(PIPELINE.stages)) -> FakeProject:
    """Write the tables of a project: a.jpg and sub/b.png are trained, every other image is dropped as its name tells."""
    project = FakeProject(path)
    for stage_name in stage_names:
        write(project, stage_name, *ROWS[stage_name]())
    return project


def _images() -> tuple[list[dict[str, Any]], ...]:
    rows = []
    for name, rejected in IMAGES.items():
        image_id = digest("a.jpg" if rejected == "duplicate" else name)
        size = {"width": 640, "height": 480, "bytes": 12_345, "frames": 1, "format": "JPEG", "mode": "RGB"}
        why = {
            "rejected": rejected,
            "detail": {"truncated": "ends after 99 bytes", "duplicate": "of a.jpg"}.get(rejected or "", ""),
        }
        rows.append({"path": name, "image_id": image_id, **size, **why})
    return (rows,)


def _captions() -> tuple[list[dict[str, Any]], ...]:
    texts = {
        "a.jpg": ["a red cat", "猫 on a\nsofa"],
        "sub/b.png": ["a blue dog"],
        "thin.png": ["a line"],
        "late.png": ["too late"],
    }
    rows = [
        {"caption_id": digest(t), "image_id": digest(name), "role": "caption", "text": t, "position": i, "source": "sidecar"}
        for name, told in texts.items()
        for i, t in enumerate(told)
    ]
    rows += [{"caption_id": digest(t), "role": role, "text": t} for t, role in (("", "empty"), ("a blue dog", "preview"))]
    return (rows,)


def _checks() -> tuple[list[dict[str, Any]], ...]:
    return (
        [
            {"image_id": digest(name), "path": name, "thumbnail": b"", "warnings": "blurred", "detail": "blur 0.7"}
            for name in TRAINED
        ],
    )


def _buckets() -> tuple[list[dict[str, Any]], ...]:
    rows = []
    for name in (*TRAINED, "mute.png", "thin.png", "late.png"):
        for r in (512, 768):
            why = "too_small" if name == "thin.png" or (r, name) == (768, "sub/b.png") else None
            crop = {"width": r, "height": r, "crop_x": 80.0, "crop_w": 480.0, "crop_h": 480.0, "scale": r / 480}
            row = {"image_id": digest(name), "resolution": r, "tokens": r * r // 256, "rejected": why}
            rows.append({**row, **crop, "crop_loss": 0.25 if name == "a.jpg" else 0.01})
    return (rows,)


def _latents() -> tuple[list[dict[str, Any]], ...]:
    words = [0x3F80, 0xBF80, 0x4000, 0x0000]  # 1, -1, 2, 0 as bfloat16
    rows = []
    for name in (*TRAINED, "late.png", "gone.png"):
        broken = {"rejected": "cannot be decoded"} if name == "late.png" else {"tensor": words, "shape": [1, 2, 2]}
        row = {"latent_id": digest("latent " + name), "image_id": digest(name), "width": 512, "height": 512}
        rows.append({**row, "dtype": "bfloat16", "mean": 0.5, "std": 1.118, "absmax": 2.0, **broken})
    return rows, rows[:-1]  # gone.png's row is dead


def _embeddings() -> tuple[list[dict[str, Any]], ...]:
    texts = {"a red cat": 9, "猫 on a\nsofa": 12, "a blue dog": 9, "": 5}
    rows = [
        {"caption_id": digest(t), "tokens": n, "dropped_tokens": 3 if n == 12 else 0, "shape": [1, 2], "tensor": [16256, 16256]}
        for t, n in texts.items()
    ]
    return (rows,)


def _train() -> tuple[list[dict[str, Any]], ...]:
    rows = []
    for step in range(1, 41):
        name = TRAINED[step % 2]
        sigma, dropped = (step % 20) / 20, step == 4
        row = {
            "step": step,
            "split": "train",
            "image_id": digest(name),
            "latent_id": digest("latent " + name),
            "dropped": dropped,
            "sigma": sigma,
        }
        caption = "" if dropped else "a red cat" if name == "a.jpg" else "a blue dog"
        rows.append({**row, "caption_id": digest(caption), "loss": 1.0 - sigma / 2 + (0.1 if name == "a.jpg" else 0.0)})
    for step, sample, loss in ((0, 0, 5.0), (0, 1, 3.0), (20, 0, 3.0), (20, 1, 1.0), (40, 0, 4.0), (40, 1, 1.0)):
        row = {"step": step, "split": "validation", "sample": sample, "image_id": digest("late.png"), "sigma": 0.3 + 0.4 * sample}
        rows.append({**row, "loss": loss})
    return (rows,)


def _samples() -> tuple[list[dict[str, Any]], ...]:
    common = {"caption_id": digest("a blue dog"), "prompt": "a blue dog", "width": 64, "height": 64}
    return ([{**common, "step": s, "adapter_id": digest(str(s)) if s else "", "path": f"previews/{s}.png"} for s in (0, 40)],)


def _scores() -> tuple[list[dict[str, Any]], ...]:
    kinds = [("base", 0), ("adapter", 40), ("real", 0)]
    return ([{"picture_id": digest(k), "kind": k, "step": s, "prompt": "a blue dog", "path": f"{k}.png"} for k, s in kinds],)


ROWS = {
    "images": _images,
    "captions": _captions,
    "checks": _checks,
    "descriptions": lambda: ([],),
    "drawings": lambda: ([],),
    "buckets": _buckets,
    "latents": _latents,
    "embeddings": _embeddings,
    "train": _train,
    "samples": _samples,
    "scores": _scores,
}
