"""Whether what is announced suffices: `python -m tests.bench.ballast --out FILE`, on one CUDA GPU.

Each case is measured with the whole GPU free, then again while this process holds all of the GPU's memory but what the case
announced and 5 % more. Rows are those of the benchmark, with `free_gb`, the memory that was free before.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stages import footprint
from tests.bench import environment
from tests.bench.cases import Case
from tests.bench.isolate import run_isolated
from tests.bench.measure import KERNELS

ABOVE = 1.05  # of what is announced
PIECES = 1 << 28, 1 << 21  # bytes that are taken at once: large ones first
MAKE = """\
import sys
from pathlib import Path
from stages.text_to_image.families import family
from tests.bench import true_files
true_files.write(family(sys.argv[1]), Path(sys.argv[2]), "text_encoder")
"""
FAMILY = "klein-base-4b"


def cases(weights: str) -> Iterator[Case]:
    common = Case(FAMILY, memory_limited=True, steps=24)
    yield replace(common, kind="autoencoder", dtype="float32", exact=True, steps=30)
    yield from (replace(common, kind="text_encoder", bits=bits, weights=weights, steps=30) for bits in (4, 16))
    yield from (replace(common, bits=bits) for bits in (4, 16))
    yield replace(common, plan="whole")
    yield from (replace(common, kind="draw", bits=bits, steps=40) for bits in (4, 16))
    yield replace(common, kind="decode", dtype="float32", steps=30)


def do(name: str, *given: object) -> None:
    if code := getattr(ctypes.CDLL("libcuda.so.1"), name)(*given):
        raise OSError(f"{name} failed with code {code}")


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


@contextmanager
def held_but(left: int) -> Iterator[None]:
    """Within it, this process holds all memory of the GPU but `left` bytes."""
    taken = []
    for piece in PIECES:
        while free_bytes() - piece >= left:
            taken.append(ctypes.c_uint64())
            do("cuMemAlloc_v2", ctypes.byref(taken[-1]), ctypes.c_size_t(piece))
    try:
        yield
    finally:
        for pointer in taken:
            do("cuMemFree_v2", pointer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/footprint.jsonl"))
    parser.add_argument("--commit", default=environment.commit())
    given = parser.parse_args()
    if footprint.gpu() is None:
        sys.exit("there is no CUDA GPU")
    context, run = ctypes.c_void_p(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    do("cuCtxSetCurrent", context)
    with tempfile.TemporaryDirectory() as folder, given.out.open("a", encoding="utf-8") as out:
        subprocess.run([sys.executable, "-c", MAKE, FAMILY, folder], check=True)
        for case in cases(folder):
            announced = 0.0
            for left in (free_bytes(), None):
                left = round(ABOVE * announced * 1e9) if left is None else left
                with held_but(left):
                    row = run_isolated(case, environment={KERNELS: f"{folder}/kernels"})
                announced = row.get("announced_gb", 0.0)
                row |= {"free_gb": left / 1e9, "run": run, "commit": given.commit, "weights": "files" if case.weights else ""}
                out.write(json.dumps(row) + "\n")
                out.flush()
                shown = ("s", "peak_gb", "estimated_gb", "announced_gb", "footprint_gb", "pool_gb", "pool_used_gb", "error")
                label = f"{case.kind} {case.bits} {case.plan}, {left / 1e9:.2f} GB free"
                print(label, {name: row[name] for name in shown if name in row}, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
