import sys

import click
import pytest

from tests.bench import foreign


def test_another_file_than_the_pinned_script_and_a_folder_with_an_earlier_run_are_refused(tmp_path, monkeypatch):
    (tmp_path / "changed.py").write_text("print()")
    for name, said in (("none.py", "SCRIPT must be the path of"), ("changed.py", "at commit 58eb52c080")):
        with pytest.raises(click.ClickException, match=said):
            foreign.check_script(tmp_path / name)
    monkeypatch.setattr(foreign, "check_script", lambda path: path)
    (tmp_path / "ours").mkdir()
    with pytest.raises(click.ClickException, match="--work must be a new or empty folder"):
        foreign.main.main(["--script", "s.py", "--work", str(tmp_path)], standalone_mode=False)


def test_a_failed_process_is_named_with_its_last_line_and_costs_leave_out_the_start(tmp_path):
    with pytest.raises(click.ClickException, match=r"exit status 1: ValueError: no \(all of it: .*log\)"):
        foreign.measure([sys.executable, "-c", "raise ValueError('no')"], tmp_path / "log")
    row = foreign.costs(foreign.Finished(14.0, 24.0, 0.5), foreign.Finished(2.0, 4.0, 0.4), 4)
    assert row == {"seconds_a_sample": 1.0, "cpu_seconds_a_sample": 20 / 12, "peak_gb": 0.5, "second_start_s": 2.0}


def test_the_script_trains_the_linears_and_the_shapes_that_ours_trains(tmp_path):
    words = foreign.script_arguments(tmp_path, tmp_path, [(96, 160), (128, 128)], 300, 0, 3e-3)
    assert words[words.index("--aspect_ratio_buckets") + 1] == "96,160;128,128"
    layers = words[words.index("--lora_layers") + 1].split(",")
    assert len(layers) == len(set(layers)) and "transformer_blocks.0.attn.to_out.0" in layers
    assert not any("modulation" in name or "embedder" in name for name in layers)
