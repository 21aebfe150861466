"""Mistakes that people make in their first hour: each gets one line that says what to write instead."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pipeline import cli
from tests import projects

# Arguments after `latentmill`, or lines added to project.toml, and what the answer must say.
COMMANDS = [
    (["trian"], "did you mean train?"),
    (["run", "latent"], "did you mean latents?"),
    (["run"], "STAGE"),
    (["train", "--steps", "100"], "--steps"),
    (["status", "--set", "lr=1e-4"], "did you mean train.lr?"),
    (["status", "--set", "learning_rate=1e-4"], "did you mean train.lr?"),
    (["status", "--set", "buckets.resolutions=512"], "such as [512]"),
    (["query"], "latentmill query"),
    (["panel", "los"], "did you mean loss?"),
    (["follow"], " WHAT=TEXT"),
    (["export", "--run", "nothing"], "there is no run 'nothing'"),
    (["compare", "one"], "compare needs two runs or more"),
    (["buckets", "--only"], "make images PROJECT=/"),
]
SETTINGS = [
    ("[train]\nepochs = 10", "train.epochs is not a setting; did you mean steps?"),
    ("[train]\nmax_train_epochs = 10", "did you mean steps? (an epoch has pictures x repeats / batch_size steps)"),
    ("[train]\nsave_every_n_epochs = 1", "did you mean checkpoint_every?"),
    ("[train]\nsample_every_n_epochs = 1", "did you mean checkpoint_every? (previews are of checkpoints"),
    ("[train]\nkeep_tokens = 1", "did you mean captions.keep?"),
    ("[train]\noutput_name = 'x'", "train.output_name is not a setting: the files have the name of the project's folder"),
    ("[train]\nnoise_offset = 0.05", "train.noise_offset is not a setting: SD needs it"),
    ("[train]\nmin_snr_gamma = 5", "here train.noise chooses levels"),
    ("[train]\ncolor_aug = true", "colours are trained as the page shows them"),
    ("[train]\nclip_skip = 2", "no model here has CLIP"),
    ("[train]\nenable_bucket = true", "there are always buckets"),
    ("[train]\nnetwork_dropout = 0.1", "train.rank_dropout drops ranks"),
    ("[train]\nbatch = 2", "train.batch is not a setting; did you mean batch_size?"),
    ("[train]\nresolution = 512", "train.resolution is not a setting; did you mean buckets.resolutions?"),
    ("[train]\nnetwork_dim = 16", "train.network_dim is not a setting; did you mean rank?"),
    ("[samples]\nprompts = ['a cat']", "did you mean captions.preview_prompts?"),
    ("[training]\nsteps = 5", "[training] is not a section; did you mean train?"),
]


def answer(folder, arguments: list[str]) -> str:
    """The output of a command that must fail with exit code 2 and without a traceback."""
    runner = CliRunner()
    codes: list[int] = []
    with runner.isolation() as (out, err, _):
        codes.append(cli.exit_code(lambda: cli.cli.main([*arguments, "--project", str(folder)], standalone_mode=False)))
        text = (out.getvalue() + err.getvalue()).decode()
    assert codes == [2], text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(("arguments", "said"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_typical_mistake_on_the_command_line_is_answered_with_what_to_write(tmp_path, arguments, said):
    folder = projects.make(tmp_path / "project", tmp_path, images=1)
    assert said in " ".join(answer(folder, arguments).split())


@pytest.mark.parametrize(("text", "said"), SETTINGS)
def test_a_typical_mistake_in_project_toml_is_answered_with_the_right_setting(tmp_path, text, said):
    folder = projects.make(tmp_path / "project", tmp_path, images=1)
    (folder / "project.toml").write_text(f"{text}\n")
    assert said in answer(folder, ["status"])
