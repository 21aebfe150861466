"""`latentmill doctor` on this machine and on simulated Macs: facts, problems with their remedy, what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.commands import doctor
from pipeline.commands.doctor import Machine, command, problems
from pipeline.commands.text_to_image import memory
from stages.text_to_image.memory import capacities

GIB = 2**30
MAC = Machine(
    system="Darwin 25.2.0",
    macos="26.2",
    chip="Apple M3 Max",
    arch="arm64",
    python="3.12.4",
    memory=64 * GIB,
    mlx="0.32.4",
    device="Apple M3 Max",
    backend="Metal",
    blas="Accelerate",
    free_disk=int(500e9),
    files=2560,
    translated=False,
    budget=int(49e9),
)


def test_a_sound_mac_has_no_problem():
    for sound in ({}, {"chip": "Apple M5"}, {"macos": "26.0"}):
        assert list(problems(replace(MAC, **sound))) == [], "an M5 on a new enough macOS, an older chip on 26.0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"translated": True}, "runs under Rosetta: MLX needs an arm64 Python"),
        ({"arch": "x86_64"}, "runs under Rosetta: MLX needs an arm64 Python"),
        ({"macos": "13.6"}, "macOS 13.6 is too old for MLX: update to macOS 14"),
        ({"chip": "Apple M5", "macos": "26.0"}, "built for macOS 26.2 and may fail on 26.0: update macOS"),
        ({"mlx": "0.32.2"}, "MLX 0.32.2 keeps all attention scores"),
        ({"backend": "CPU"}, "MLX does not use the GPU"),
        ({"memory": 8 * GIB}, "less than 16 GB of memory"),
        ({"files": 256}, "only 256 files may be open: run `ulimit -n 4096`"),
        ({"free_disk": 10**10}, "30 are wanted: weights of klein-base-4b take 16.1 GB, "),
    ],
)
def test_each_problem_of_a_mac_is_one_line_with_its_remedy(change: dict[str, Any], said: str):
    (line,) = problems(replace(MAC, **change))
    assert said in line


def test_more_memory_never_fits_less():
    def fits(budget: float) -> dict[tuple[str, int], tuple[int, bool]]:
        return {(each.family, each.side): (each.bits or 0, not each.streamed) for each in capacities(int(budget))}

    small, large = fits(11e9), fits(98e9)
    assert small["klein-base-4b", 512] == (16, True) and small["dev", 512] == (4, False) and large["dev", 1024][0]
    assert all(large[key] >= bits for key, bits in small.items())


def test_measure_writes_one_json_file_and_a_probe_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda folder: replace(MAC, budget=int(20e9)))
    short = memory.probe
    monkeypatch.setattr(memory, "probe", lambda name, side, budget: short(name, side // 16, budget, 1))
    for each in (doctor.product, doctor.attention_gradient):
        monkeypatch.setattr(doctor, each.__name__, partial(each, 256))
    out = tmp_path / "mac.json"
    done = CliRunner().invoke(command, ["-p", str(tmp_path), "--measure", "--family", "tiny", "--out", str(out)])
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert [probe["probe"] for probe in written["probes"]][-2:] == ["training 512 px", "training 1024 px"]
    assert written["machine"]["chip"] == "Apple M3 Max"
    assert all("s" in probe or "tflops" in probe or "extra_bytes" in probe for probe in written["probes"])
    for each in ("product", "attention_gradient"):
        monkeypatch.setattr(doctor, each, dict)
    *_, failed = doctor.measure("klein-base-4b", 1000)
    assert "needs about" in failed["error"]
