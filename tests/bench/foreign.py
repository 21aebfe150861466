"""diffusers' own training script beside ours, on `micro`: `SCRIPT=path/of/the/script python -m tests.bench.foreign`.

The script is train_dreambooth_lora_flux2_klein.py of huggingface/diffusers at the commit below. It runs unmodified, in a process
of its own, on the training images of `data/projects/example` with the settings that our run has. Its file is then measured by
our code:
loss of held-out images, and scores of previews. It needs the packages datasets and peft. A stand-in serves where torchvision is
not installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

COMMIT = "58eb52c0803ea9af3abec60841c2a093bdf1f951"
SHA256 = "2c746004af6d4aa569d9bff3d32fce70afcb885cf00c7e00ab6abf9beda42225"
NAME = "examples/dreambooth/train_dreambooth_lora_flux2_klein.py"
ROOT = Path(__file__).parents[2]
EXAMPLE, MICRO = ROOT / "data/projects/example", ROOT / "data/assets/micro"
HELD = ("avocado.webp", "fire-truck.webp", "guitar.webp", "mushroom.webp")  # images that neither trains on
BEFORE = ("images", "captions", "buckets", "latents", "embeddings")
# Runs the script with the stand-in, which transformers must not take for torchvision: it asks once whether there is one.
LAUNCH = """
import runpy, sys
from transformers.utils import is_torchvision_available
is_torchvision_available()
sys.path.append(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BATCH, RANK, WARMUP = 4, 32, 20
Row = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """Seconds, CPU seconds, and peak memory in GB."""

    seconds: float
    cpu_seconds: float
    peak_gb: float


def check_script(path: Path) -> Path:
    """Raises ClickException if it is not the file that the comparison was written for."""
    if not path.is_file():
        raise click.ClickException(f"SCRIPT must be the path of {NAME}, got {str(path)!r}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise click.ClickException(
            f"SCRIPT must be {NAME} at commit {COMMIT[:10]} (sha256 {SHA256[:12]}...), got {found[:12]}..."
        )
    return path.resolve()


def measure(command: list[str], log: Path, **variables: str) -> Finished:
    """Output goes to `log`. Raises ClickException if the command fails."""
    began = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **variables})
        _, status, used = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        last = (log.read_text().strip().splitlines() or [""])[-1]
        raise click.ClickException(f"exit status {code}: {last} (all of it: {log})")
    return Finished(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9)


def our_settings(steps: int, seed: int, prompts: int) -> list[str]:
    """Those that differ from `data/projects/example`."""
    known = tomllib.loads((EXAMPLE / "project.toml").read_text())["captions"]["preview_prompts"]
    return [
        f"captions.preview_prompts={json.dumps(known[:prompts])}",
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.batch_size={BATCH}",
        f"train.rank={RANK}",
        f"train.schedule.warmup_steps={WARMUP}",
        f"train.schedule.decay_steps={max(1, steps - WARMUP)}",
        f"train.validation.paths={json.dumps(HELD)}",
        f"train.validation.every={steps}",
        'train.noise.shift="none"',  # the script's levels: logit-normal, without a shift
        "train.caption_dropout=0.05",
        "samples.first_prompts=0",  # all of them
    ]


def make_project(folder: Path, initial: Path | None = None) -> Path:
    if not folder.exists():
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("tables", "exports", ".*"))
    if initial:
        shutil.copyfile(initial, folder / "initial.safetensors")
    return folder


def run_ours(folder: Path, stage: str, changes: list[str]) -> Finished:
    given = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "pipeline", "run", stage, "--only", "--project", str(folder), *given]
    return measure(command, folder / f"{stage}.log")


def write_dataset(project: Path, folder: Path, changes: list[str]) -> list[tuple[int, int]]:
    """Returns the (height, width) of the buckets."""
    from pipeline.project.project import Project

    folder.mkdir(exist_ok=True)
    tables = Project(project, changes)
    images, captions, buckets = (tables.current(name).rows().to_pylist() for name in ("images", "captions", "buckets"))
    texts = {row["image_id"]: row["text"] for row in captions if row["role"] == "caption"}
    lines = []
    for row in images:
        if row["rejected"] is None and Path(row["path"]).name not in HELD:
            name = Path(row["path"]).name
            shutil.copyfile(project / "images" / row["path"], folder / name)
            lines.append(json.dumps({"file_name": name, "caption": texts[row["image_id"]]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return sorted({(row["height"], row["width"]) for row in buckets if row["rejected"] is None})


def script_arguments(data: Path, out: Path, sizes: list[tuple[int, int]], steps: int, seed: int, lr: float) -> list[str]:
    from stages.models.flux2.transformer import Flux2Config
    from stages.text_to_image.families import family

    micro = family("micro")
    shapes = Flux2Config.from_dict(dict(micro.transformer)).shapes()
    inside = [name.removesuffix(".weight") for name, shape in shapes.items() if "transformer_blocks." in name and len(shape) == 2]
    values = {
        "pretrained_model_name_or_path": MICRO,
        "dataset_name": data,
        "caption_column": "caption",
        "instance_prompt": "ohwx",
        "output_dir": out,
        "aspect_ratio_buckets": ";".join(f"{height},{width}" for height, width in sizes),
        "train_batch_size": BATCH,
        "max_train_steps": steps,
        "rank": RANK,
        "lora_alpha": RANK,
        "lora_layers": ",".join(inside),
        "learning_rate": lr,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": WARMUP,
        "weighting_scheme": "logit_normal",
        "caption_dropout": 0.05,
        "max_sequence_length": micro.text_tokens,
        "guidance_scale": 1,
        "mixed_precision": "no",
        "checkpointing_steps": 10 * steps,
        "seed": seed,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    layers = ["--text_encoder_out_layers", *map(str, micro.text_layers)]
    return [*words, *layers, "--use_aspect_ratio_buckets", "--cache_latents", "--skip_final_inference"]


def run_script(script: Path, arguments: list[str], log: Path) -> Finished:
    start = [] if _installed("torchvision") else ["-c", LAUNCH, str(ROOT / "tests/bench/standin")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return measure([sys.executable, *start, str(script), *arguments], log, **offline)


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def results(folder: Path, changes: list[str], step: int) -> Row:
    """Mean loss of held-out images after `step`; of previews: AUC against the base's, agreement, nearness to real pictures."""
    from data.research.experiments.agreement import with_agreement
    from pipeline.commands.text_to_image.evaluate import auc
    from pipeline.project.project import Project

    project = Project(folder, changes)
    trained = project.current("train").rows().to_pylist()
    held = [row["loss"] for row in trained if (row["split"], row["step"]) == ("validation", step)]
    scores = project.current("scores").rows().to_pylist()
    own, base = ([row for row in scores if row["kind"] == kind] for kind in ("adapter", "base"))
    style = [np.array([row["style"] for row in rows], np.float64) for rows in (base, own)]
    previews, trigger = project.current("samples").folder / "artifacts", project.config.sections["captions"].trigger
    texts = with_agreement([row for row in scores if row["kind"] != "real"], previews, previews, trigger)
    mean = {"agreement": float(np.mean([row["agreement"] for row in texts if row["kind"] == "adapter"]))}
    mean |= {"real": float(np.mean([row["real"] for row in own]))}
    return {"held_out_loss": float(np.mean(held)), "style_auc": auc(*style), **mean}


def costs(whole: Finished, start: Finished, steps: int) -> Row:
    """`whole`: the run of `steps` steps; `start`: one of one step with all caches in place."""
    samples = max(1, steps - 1) * BATCH
    return {
        "seconds_a_sample": (whole.seconds - start.seconds) / samples,
        "cpu_seconds_a_sample": (whole.cpu_seconds - start.cpu_seconds) / samples,
        "peak_gb": whole.peak_gb,
        "second_start_s": start.seconds,
    }


def compare(script: Path, work: Path, steps: int, seed: int, lr: float, prompts: int) -> dict[str, Row]:
    ours, changes = make_project(work / "ours"), [*our_settings(steps, seed, prompts), f"train.lr={lr}"]
    for stage in BEFORE:
        run_ours(ours, stage, changes)
    whole = run_ours(ours, "train", changes)
    for stage in ("samples", "scores"):
        run_ours(ours, stage, changes)
    start = run_ours(ours, "train", [*our_settings(1, seed + 1, prompts), f"train.lr={lr}"])
    rows = {"ours": results(ours, changes, steps) | costs(whole, start, steps)}

    sizes = write_dataset(ours, work / "dataset", changes)
    whole = run_script(script, script_arguments(work / "dataset", work / "out", sizes, steps, seed, lr), work / "script.log")
    start = run_script(script, script_arguments(work / "dataset", work / "out1", sizes, 1, seed, lr), work / "script1.log")
    theirs = make_project(work / "theirs", work / "out/pytorch_lora_weights.safetensors")
    # Our code measures the file at step 0. The one step that follows does not move it.
    measured = [*our_settings(1, seed, prompts), 'train.initial="initial.safetensors"', "train.lr=1e-12"]
    for stage in (*BEFORE, "train", "samples", "scores"):
        run_ours(theirs, stage, measured)
    return {**rows, "diffusers": results(theirs, measured, 0) | costs(whole, start, steps)}


@click.command()
@click.option("--script", envvar="SCRIPT", required=True, type=click.Path(path_type=Path), help=f"The path of {NAME}.")
@click.option("--steps", default=300, show_default=True, help="Training steps of each program.")
@click.option("--seed", default=0, show_default=True, help="Seed of each program.")
@click.option("--lr", default=3e-3, show_default=True, help="Learning rate of each program.")
@click.option("--prompts", default=40, show_default=True, help="Preview prompts that are drawn and scored, at most 40.")
@click.option("--work", default=ROOT / "build/foreign", type=click.Path(path_type=Path), help="Folder for projects and logs.")
def main(script: Path, steps: int, seed: int, lr: float, prompts: int, work: Path) -> None:
    """Train `micro` on the example with diffusers' script and with ours, and print both rows."""
    script = check_script(script)
    work = work.resolve()
    if work.is_dir() and any(work.iterdir()):
        raise click.ClickException(f"--work must be a new or empty folder, got {work}: what is trained already takes no time")
    work.mkdir(parents=True, exist_ok=True)
    for name, row in compare(script, work, steps, seed, lr, prompts).items():
        click.echo(json.dumps({"program": name, "steps": steps, **{key: round(value, 4) for key, value in row.items()}}))


if __name__ == "__main__":
    main()
