"""Run the pipeline on files with the shapes of a released model: `python -m tests.bench.true_shapes klein-base-4b
FOLDER`.

The weights are random, so the pictures mean nothing; seconds and peaks are those of real files. FOLDER gets the weights
in the diffusers layout, in shards, or with `--single` as the makers' single files, and a project with two images. Each
step is a process of its own and prints one line of JSON per stage: seconds, MLX's peak memory and the largest memory of
the process that the system has counted. Where a stage loads a large model, the line has the seconds of the load, the
size of the weights in memory, and the peak while they were loaded. It also has the estimate that the stage announces,
and the peak of the memory that the system counts as the process's own, without mapped files. The step `again` loads the
transformer from its converted copy.

`--memory` keeps the tables in memory and in a file between processes, for a machine without Lance. `--spare`, with
`--memory` for a released family, writes a component right before the first stage that needs it, and deletes it after the
last. A disk without room for a
component in bfloat16 gets its matrices in fp8, with one scale each; `--fp8` always does.

`--load` is for a machine that is too slow to train and draw: captions are encoded, and the transformer is loaded and
packed, without training.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from data.research.experiments.in_memory import MemoryTables
from pipeline.project import outlook
from pipeline.project.project import Project
from stages.text_to_image import families
from stages.text_to_image.weights import CONVERTED
from tests import projects
from tests.bench import true_files
from tests.bench.environment import commit
from tests.bench.peaks import Meter, OwnMemory, Row, process_peak

LOAD, AGAIN = "load", "again"
# Stages of a process, with the component that they need.
STEPS = {
    ("images", "captions", "buckets", "latents"): "autoencoder",
    ("embeddings",): "text_encoder",
    ("train",): "transformer",
    (AGAIN,): "transformer",
    ("samples",): "transformer",
}
LOADING = {  # with --load
    ("images", "captions"): "",
    ("embeddings",): "text_encoder",
    (LOAD,): "transformer",
    (AGAIN,): "transformer",
}
COMPONENTS = ("transformer", "text_encoder", "autoencoder")
# Where each stage looks up the function that loads its large model.
LOADERS = {
    "embeddings": ("stages.text_to_image.embeddings.stage", "load_encoder"),
    "train": ("stages.text_to_image.train.task", "load_transformer"),
    "samples": ("stages.text_to_image.samples.drawing", "load_sampler"),
}
SPARE = 2_000_000_000  # bytes of the disk that stay free
SETTINGS = """
[project]
family = "{family}"
weights = "{weights}"
[captions]
preview_prompts = ["a red thing"]
[buckets]
resolutions = [{side}]
[embeddings]
precision = "{precision}"
bits = {bits}
[train]
precision = "{precision}"
steps = {steps}
rank = 16
base_bits = {bits}
checkpoint_every = {steps}
keep_converted = true
[samples]
base = false
precision = "{precision}"
base_bits = {bits}
width = {side}
height = {side}
steps = 2
"""


def load_only(project: Project, again: bool) -> None:
    """With `again`, its converted copy must exist, and it is read."""
    copies = project.path / CONVERTED
    assert bool(list(copies.glob("*.safetensors"))) == again, "the converted copy is read the second time"
    config = project.config.sections["train"]
    load = importlib.import_module("stages.text_to_image.train.task").load_transformer  # which may be measured
    family = project.family.without_references()  # as training loads it
    load(project.resource("transformer"), family, getattr(mx, config.precision), config, copies=copies, keep=True)


def run_stage(project: Path, name: str, tables: MemoryTables | None) -> Row:
    """Seconds and peaks in GB; "load" and "again" load the transformer alone. `tables`: in memory, None: on disk."""
    with OwnMemory() as own:
        row = timed_stage(project, name, tables)
    stage = "train" if name in (LOAD, AGAIN) else name
    if stage in LOADERS and (found := outlook.forecast(Project(project), stage)):
        row |= {"estimate_gb": round(found.peak / 1e9, 2), "own_before_gb": own.before, "own_peak_gb": own.peak}
    return row


def timed_stage(project: Path, name: str, tables: MemoryTables | None) -> Row:
    """Peaks as MLX and the system count them."""
    begun, meter, found = time.perf_counter(), Meter(), Row()
    mx.reset_peak_memory()
    if loader := LOADERS.get("train" if name in (LOAD, AGAIN) else name):
        module, function = importlib.import_module(loader[0]), loader[1]
        meter.count_copying()
        setattr(module, function, meter.timed(getattr(module, function), found))
    console = projects.Silent()
    if name in (LOAD, AGAIN):
        load_only(Project(project), name == AGAIN)
    elif tables is None:
        projects.build(project, name, console=console)
    else:
        tables.run(Project(project), name)
    row = {"stage": name, "seconds": round(time.perf_counter() - begun, 1), **found}
    row |= {"mlx_peak_gb": meter.highest(), "process_peak_gb": process_peak()}
    return row | {"said": console.lines[:2]} if console.lines else row


def run_step(project: Path, names: tuple[str, ...], in_memory: bool) -> None:
    """Prints one line of JSON for each stage; tables `in_memory` are kept in a file from one process to the next."""
    file, tables = project.parent / "tables.pickle", None
    if in_memory:
        tables = MemoryTables(project.parent / "artifacts")
        if file.exists():
            tables.rows, tables.files = pickle.loads(file.read_bytes())
    for name in names:
        sys.stdout.write(json.dumps(run_stage(project, name, tables)) + "\n")
        sys.stdout.flush()
    if tables:
        file.write_bytes(pickle.dumps((tables.rows, tables.files)))


def write_component(given: argparse.Namespace, weights: Path, component: str) -> Row:
    """If the disk has no room for bfloat16, the matrices are written in fp8."""
    begun, record = time.perf_counter(), families.family(given.family)
    weights.mkdir(parents=True, exist_ok=True)
    small = component == "autoencoder"
    fp8 = not small and (given.fp8 or shutil.disk_usage(weights).free < true_files.bytes_of(record, component) + SPARE)
    true_files.write(record, weights, component, fp8, given.single)
    path = true_files.path_of(record, weights, component, given.single)
    files = [path] if given.single else list(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    row = {"written": component, "seconds": round(time.perf_counter() - begun, 1), "form": "fp8" if fp8 else "bfloat16"}
    return row | {"files": len(files), "files_gb": round(size / 1e9, 2)}


def write_project(given: argparse.Namespace, project: Path, weights: Path) -> None:
    if not project.is_dir():
        projects.make(project, weights, images=2)
    settings = {
        "precision": "float32" if mx.default_device() == mx.cpu else "bfloat16",  # a CPU's fast matrix library has float32 only
        "family": given.family,
        "weights": weights.resolve(),
        "side": given.side,
        "bits": given.bits,
        "steps": given.steps,
    }
    (project / "project.toml").write_text(SETTINGS.format(**settings))


def report(given: argparse.Namespace, row: Row) -> None:
    about = {"family": given.family, "layout": "single files" if given.single else "diffusers", "machine": machine()}
    line = json.dumps({**about, "date": datetime.date.today().isoformat(), "commit": commit(), **row}) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(line)


def write_missing(given: argparse.Namespace, weights: Path, component: str) -> None:
    """ "" is no component."""
    if component and not true_files.path_of(families.family(given.family), weights, component, given.single).exists():
        report(given, write_component(given, weights, component))


def machine() -> str:
    """Such as "2 cores, 24 GB, Linux x86_64, no GPU"."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = "no GPU" if mx.default_device() == mx.cpu else mx.device_info().get("device_name", "GPU")
    return f"{os.cpu_count()} cores, {round(memory / 2**30)} GB, {platform.system()} {platform.machine()}, {gpu}"


def start(given: argparse.Namespace, names: tuple[str, ...]) -> bool:
    """In a process of their own. False if it fails, which is a line with `error`."""
    words = [sys.executable, "-m", "tests.bench.true_shapes", given.family, str(given.folder), "--step", *names]
    words += ["--memory"] if given.memory else []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                report(given, json.loads(line))
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if process.returncode:
        sys.stderr.write("\n".join(said[-20:]) + "\n")
        report(given, {"stage": names[-1], "error": (said or [f"exit {process.returncode}"])[-1]})
    return process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--components", nargs="*", choices=COMPONENTS, default=COMPONENTS)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fp8", action="store_true", help="matrices in fp8")
    parser.add_argument("--single", action="store_true", help="the makers' single files instead of diffusers' folders")
    parser.add_argument("--weights", type=Path, help="folder of the weights, on another disk")
    parser.add_argument("--memory", action="store_true", help="keep tables in memory")
    parser.add_argument("--spare", action="store_true", help="delete a component after its last stage")
    parser.add_argument("--load", action="store_true", help="encode captions and load the transformer, without training")
    parser.add_argument("--out", type=Path, help="add the lines to this file")
    parser.add_argument("--step", nargs="*", default=())
    given = parser.parse_args()
    project, weights = given.folder / "project", given.weights or given.folder / "weights"
    if given.step:
        run_step(project, tuple(given.step), given.memory)
        return
    write_project(given, project, weights)
    every = LOADING if given.load else STEPS
    steps = [(names, needed) for names, needed in every.items() if not needed or needed in given.components]
    # The runner looks for all components of a released model, to say what it has to download.
    for needed in () if given.spare else [needed for _, needed in steps]:
        write_missing(given, weights, needed)
    for place, (names, needed) in enumerate(steps):
        write_missing(given, weights, needed)
        if not start(given, names):
            sys.exit(1)
        if given.spare and needed not in ("", "autoencoder") and needed not in [other for _, other in steps[place + 1 :]]:
            path = true_files.path_of(families.family(given.family), weights, needed, given.single)
            path.unlink() if path.is_file() else shutil.rmtree(path)


if __name__ == "__main__":
    main()
