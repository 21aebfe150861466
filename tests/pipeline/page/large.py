"""A large project whose tables are written without running a stage: 5,000 images, 20,000 steps, 80 checkpoints with previews."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pyarrow as pa
from PIL import Image

from pipeline.store.table import Writer
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject, digest

IMAGES, STEPS, EVERY, PROMPTS = 5000, 20_000, 250, 8


def fill(folder: Path) -> None:
    """The first pictures have one mistake each: blurred, small, near-duplicate, without caption."""
    (folder / "images").mkdir(exist_ok=True)
    (folder / "project.toml").write_text('[project]\nfamily = "tiny"\n')
    project, draw = FakeProject(folder), random.Random(0)
    ids = [digest(str(n)) for n in range(IMAGES)]
    Image.new("RGB", (96, 64), (90, 90, 160)).save(folder / "images" / "00000.png")
    for n in range(1, IMAGES):
        os.link(folder / "images" / "00000.png", folder / "images" / f"{n:05}.png")
    paths = [f"{n:05}.png" for n in range(IMAGES)]
    tables.write(
        project, "images", [{"path": p, "image_id": each, "width": 96, "height": 64} for p, each in zip(paths, ids, strict=True)]
    )
    captions = [
        {"image_id": each, "caption_id": each, "role": "caption", "text": f"a thing, number {n}", "source": "sidecar"}
        for n, each in enumerate(ids)
        if n != 4
    ]
    tables.write(project, "captions", captions)
    warned = {1: "blurred", 2: "small, border", 3: "near_duplicate"}
    checks = [
        {"image_id": each, "path": paths[n], "thumbnail": b"", "duplicate_of": ids[0] if n == 3 else None}
        | {"warnings": warned.get(n, ""), "detail": warned.get(n, "")}
        for n, each in enumerate(ids)
    ]
    tables.write(project, "checks", checks)
    _train(project, ids, draw)
    _samples(project)


def _train(project: FakeProject, ids: list[str], draw: random.Random) -> None:
    common = {"split": "train", "seconds": 1.0, "peak_bytes": 1_000_000, "lr": 1e-4, "grad_norm": 0.5}
    rows = [
        common | {"step": step, "image_id": ids[step % IMAGES], "sigma": draw.random(), "loss": 0.2 + draw.random()}
        for step in range(1, STEPS + 1)
    ]
    tables.write(project, "train", rows)
    record = {"name": "long", "started": "2026-01-01T00:00:00", "recipe": {"stage": "train"}, "settings": {}}
    run = project.folder("train").folder
    (run / "run.json").write_text(json.dumps(record))
    for step in range(EVERY, STEPS + 1, EVERY):  # a checkpoint says which adapter it has
        checkpoint = run / "artifacts" / "checkpoints" / f"step-{step:06}"
        checkpoint.mkdir(parents=True)
        state = {"files": {"adapter.safetensors": {"sha256": digest(f"step {step}")}}}
        (checkpoint / "state.json").write_text(json.dumps(state))


def _samples(project: FakeProject) -> None:
    prompts = [f"a thing of another kind, prompt {n}" for n in range(PROMPTS)]
    schema = tables.table("samples").batch
    empty = {"seed": 0, "width": 64, "height": 64, "seconds": 1.0}
    with Writer(project.folder("samples"), {"stage": "samples"}) as writer:
        for step in range(0, STEPS + 1, EVERY):
            name, picture = f"step{step:06}.png", Image.new("RGB", (64, 64), (step // 100 % 256, 80, 80))
            writer.write_artifact(name, picture.save)
            adapter = digest(f"step {step}") if step else ""
            rows = [
                empty | {"step": step, "adapter_id": adapter, "caption_id": digest(text), "prompt": text, "path": name}
                for text in prompts
            ]
            writer.append(pa.RecordBatch.from_pylist(rows, schema=schema))
        writer.finish(None, {})
