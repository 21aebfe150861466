"""Wrong input on the command line: one clear line, exit code 2, and nothing is lost."""

import shutil
from pathlib import Path

import pytest

from pipeline.commands.init import new_project
from pipeline.project.project import Project
from tests import projects

USER = 2


@pytest.fixture
def project(tmp_path, tiny_weights) -> Path:
    return projects.make(tmp_path / "project", tiny_weights, images=3)


def refused(folder: Path, *arguments: str) -> str:
    """The one line that begins with "error: ", of exit code 2."""
    code, out, err = projects.said(*arguments, "--project", str(folder))
    assert code == USER, f"{code}\n{out}\n{err}"
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    return lines[0]


def test_a_missing_folder_of_the_project_or_of_images_is_named_and_a_mistake_in_the_file_stops_before_anything_is_written(
    project, tmp_path
):
    assert "nowhere" in refused(tmp_path / "nowhere", "run", "images", "--only")
    projects.edit(project, "resolutions", "resolution")
    assert "did you mean resolutions?" in refused(project, "run", "images", "--only")
    assert not (project / "tables").exists()
    projects.edit(project, "resolution", "resolutions")
    (project / "images").rename(project / "pictures")
    assert "images" in refused(project, "run", "images", "--only")


def test_missing_and_truncated_weights_are_refused_with_the_name_of_the_file(project, tmp_path, tiny_weights):
    weights = Path(shutil.copytree(tiny_weights, tmp_path / "weights"))
    projects.edit(project, str(tiny_weights), str(weights))
    projects.build(project, "images", "captions", "buckets")
    file = next((weights / "vae").glob("*.safetensors"))
    whole = file.read_bytes()
    for share in (0.0, 0.999):
        file.write_bytes(whole[: int(len(whole) * share)])
        assert file.name in refused(project, "run", "latents", "--only")
    (weights / "vae").rename(weights / "away")
    assert "vae" in refused(project, "run", "latents", "--only")
    (weights / "away").rename(weights / "vae")
    file.write_bytes(whole)
    projects.latentmill(project, "run", "latents", "--only")
    shutil.rmtree(weights)
    assert "weights" in refused(project, "run", "embeddings", "--only")


def test_init_overwrites_no_project_and_a_failed_one_leaves_no_file(tmp_path, project):
    text = (project / "project.toml").read_text()
    code, _, err = projects.said("init", str(project), "--images", str(project / "images"))
    assert code == USER and "exists already" in err and (project / "project.toml").read_text() == text
    options = {"images": str(project / "images"), "family": "tiny"}
    with pytest.raises(ValueError, match="placeholder"):
        new_project(tmp_path / "new", options | {"trigger": "{caption}"})
    assert not (tmp_path / "new" / "project.toml").exists()
    said = new_project(tmp_path / "my cats", options | {"trigger": "sks"})
    assert said[-1].endswith(f"make train PROJECT='{tmp_path}/my cats'")


def test_init_finds_weights_relative_to_the_current_folder_and_the_image_folder_is_named_without_dots(
    tmp_path, project, tiny_weights, monkeypatch
):
    monkeypatch.chdir(tiny_weights.parent)
    new, images = tmp_path / "deep" / "new", project / "images"
    new_project(new, {"images": str(images), "family": "tiny", "weights": tiny_weights.name})
    assert Project(new).component("autoencoder", fetch=False).is_relative_to(tiny_weights.resolve())
    projects.edit(new, str(images), "../../project/images")
    (tmp_path / "link").symlink_to(new)
    for place in (new, tmp_path / "link"):
        found = Project(place).resource("image_folder")
        assert ".." not in found.parts and found.samefile(images)


# Arguments after `latentmill`, or lines added to project.toml, and what the answer must say.
COMMANDS = [
    (["train", "--steps", "100"], "--steps"),
    (["status", "--set", "learning_rate=1e-4"], "did you mean train.lr?"),
    (["status", "--set", "buckets.resolutions=512"], "such as [512]"),
    (["export", "--run", "nothing"], "there is no run 'nothing'"),
    (["buckets", "--only"], "make images PROJECT=/"),
]
SETTINGS = [
    ("[train]\nepochs = 10", "train.epochs is not a setting; did you mean steps?"),
    ("[train]\nmax_train_epochs = 10", "did you mean steps? (an epoch has pictures x repeats / batch_size steps)"),
    ("[train]\nsample_every_n_epochs = 1", "did you mean checkpoint_every? (previews are of checkpoints"),
    ("[train]\nnoise_offset = 0.05", "train.noise_offset is not a setting: SD needs it"),
    ("[train]\nmin_snr_gamma = 5", "here train.noise chooses levels"),
    ("[train]\nresolution = 512", "train.resolution is not a setting; did you mean buckets.resolutions?"),
    ("[samples]\nprompts = ['a cat']", "did you mean captions.preview_prompts?"),
    ("[training]\nsteps = 5", "[training] is not a section; did you mean train?"),
]


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [*(("", *each) for each in COMMANDS), *((text, ["status"], said) for text, said in SETTINGS)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_typical_mistake_is_answered_with_what_to_write(tmp_path, text, arguments, said):
    folder = projects.make(tmp_path / "project", tmp_path, images=1)
    if text:
        (folder / "project.toml").write_text(f"{text}\n")
    assert said in " ".join(projects.latentmill(folder, *arguments, code=USER).split())
