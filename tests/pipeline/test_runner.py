"""What a run reports about itself."""

import pytest

from pipeline import runner
from pipeline.project.project import Project
from stages.text_to_image import embeddings, latents
from stages.text_to_image.embeddings.memory import encoder_memory
from tests import projects


def fail(monkeypatch, owner, name, *calls):
    """These calls of a function, counted from 1, raise what MLX does if an allocation fails."""
    real, count = getattr(owner, name), iter(range(1, 1000))

    def failing(*given):
        if next(count) in calls:
            raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")
        return real(*given)

    monkeypatch.setattr(owner, name, failing)


def test_after_an_allocation_failed_a_stage_computes_what_is_left_and_gives_up_when_it_gets_no_further(
    tmp_path, tiny_weights, monkeypatch
):
    folder = projects.make(tmp_path / "project", tiny_weights, images=3)
    projects.edit(folder, "[embeddings]", "[latents]\nbatch_size = 1\n\n[embeddings]")
    other = projects.copied(folder, tmp_path / "other")
    for each in (folder, other):
        projects.build(each, "images", "captions", "buckets")
    projects.build(other, "latents")
    console = projects.Silent()
    with monkeypatch.context() as patched:
        fail(patched, latents, "encode", 2, 4, 5)
        with pytest.raises(RuntimeError, match="out of memory"):
            projects.build(folder, "latents", console=console)
    assert sum(line.startswith("latents: not enough memory (cudaMallocAsync") for line in console.lines) == 2
    assert projects.build(folder, "latents")["latents"].written == projects.content(other, "latents").num_rows - 2
    assert projects.content(folder, "latents").equals(projects.content(other, "latents"))


def test_the_text_encoder_goes_on_layer_by_layer_after_its_layers_did_not_fit_together(tmp_path, tiny_weights, monkeypatch):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    projects.build(folder, "images", "captions")
    project, asked = Project(folder), []
    family, real = project.family, embeddings.stage.load_encoder
    granted = encoder_memory(project.config.sections["embeddings"], family, None, True).peak
    monkeypatch.setattr(runner, "peak_mlx", lambda: granted)

    def load(*given):
        asked.append(given[-1])
        return real(*given)

    monkeypatch.setattr(embeddings.stage, "load_encoder", load)
    fail(monkeypatch, embeddings.stage, "load_encoder", 1)
    assert projects.build(folder, "embeddings")["embeddings"].written
    assert asked == [True]
