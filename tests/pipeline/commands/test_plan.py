"""`latentmill plan`: what stages need, computed from shapes; what cannot fit is refused with the nearest settings that do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands.plan import make_plan
from pipeline.project.outlook import announcement, downloads, licence_note
from pipeline.project.project import Project
from pipeline.project.runs import choose, differences, find_runs, flatten, present_settings
from pipeline.store import disk
from stages.memory import PROGRAM_BYTES
from stages.text_to_image import length
from tests import projects

CHAIN = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples")
KLEIN = '[project]\nfamily = "{}"\n[captions]\npreview_prompts = ["a fox"]\n[buckets]\nresolutions = [{}]\n'


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    """These plans are of models that this machine's disk may not have room for."""
    monkeypatch.setattr(disk, "free_bytes", lambda folder: int(1e15))


def klein(folder: Path, more: str = "", side: int = 1024, family: str = "klein-base-4b") -> Project:
    folder.mkdir(exist_ok=True)
    (folder / "images").mkdir(exist_ok=True)
    (folder / "project.toml").write_text(KLEIN.format(family, side) + more)
    return Project(folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    """A finished project, never changed."""
    folder = projects.make(tmp_path_factory.mktemp("built") / "p", tiny_weights, images=2)
    projects.edit(folder, "[64, 96]", "[64]")
    projects.build(folder, *CHAIN)
    return folder


def test_before_the_first_run_the_plan_counts_pictures_texts_steps_previews_and_what_is_downloaded(tmp_path):
    project = klein(tmp_path, "[train]\nbatch_size = 4\n")
    assert not projects.report(project, int(60e9))[1], "it has no pictures"
    projects.add_image(tmp_path, "a.png", 1)
    plain, _ = projects.report(project, int(30e9))
    assert any(line.startswith("to download, about: transformer 7.75 GB") for line in plain)
    assert not (tmp_path / "tables").exists()
    shown = {line.split()[0]: line for line in plain}
    assert "1 crop " in shown["latents"] and "3 texts " in shown["embeddings"]  # before weights are downloaded
    assert "1 file " in shown["images"] and "1500 steps " in shown["train"] and "6000" not in shown["train"]
    assert "2 previews " in shown["samples"]  # of the base and of the last checkpoint, before there is one


def test_before_training_the_plan_counts_the_previews_and_says_that_all_steps_are_warm_up(tmp_path):
    project = klein(tmp_path, '[train]\nsteps = 25\ncheckpoint_every = 10\n[samples]\ncheckpoints = "all"\n')
    projects.add_image(tmp_path, "a.png", 1)
    lines, _ = projects.report(project, int(60e9))
    assert any(line.startswith("samples") and "4 previews " in line for line in lines)  # of the base and steps 10, 20 and 25
    measured = Project(tmp_path, {"train.validation.every": 5})  # the best of steps 5 to 20 are kept too
    assert projects.planned(measured)["samples"].to_do == "up to 6 previews"
    folders = "".join(f'[[images.folder]]\npath = "{name}"\ntrigger = "{name}"\n' for name in ("sks", "ohwx"))
    file = tmp_path / "project.toml"
    file.write_text(file.read_text().replace('"a fox"', '"{trigger} here", "a sofa"') + folders)
    assert projects.planned(Project(tmp_path))["samples"].to_do == "12 previews"  # three prompts, of two triggers
    assert "train: all 25 steps are warm-up, below the full rate: lower [train.schedule] warmup_steps (100)" in lines


def test_a_licence_that_is_not_free_is_said_with_what_will_be_downloaded_and_only_then(tmp_path):
    project = klein(tmp_path, family="klein-base-9b")
    said = (
        r"FLUX\.2 klein base 9B has the licence FLUX non-commercial: not for commercial use\. Read it at https://\S+klein-base-9B"
    )
    assert re.fullmatch(said, licence_note(project)) and licence_note(project, "train") in projects.report(project, int(60e9))[0]
    assert licence_note(project, "images") == "" and licence_note(klein(tmp_path / "free")) == ""
    projects.add_image(tmp_path, "a.png", 1)
    console = projects.Silent()
    with pytest.raises(ValueError, match=r"FLUX\.2-klein-base-9B"):
        projects.build(tmp_path, "images", "captions", "checks", "buckets", "latents", console=console)
    assert console.lines[-1] == licence_note(project)


def test_the_plan_says_what_the_twin_saves_and_foresees_its_download_and_memory_instead_of_the_bases(tmp_path, built):
    lines, _ = projects.report(klein(tmp_path / "k"), int(60e9))
    assert 'previews: 100 passes each; 4 with [samples] family = "klein-4b"' in lines
    project = klein(tmp_path / "k", '[samples]\nfamily = "klein-4b"\n')
    assert "previews: klein-4b takes 4 passes each, klein-base-4b would take 100" in projects.report(project, int(60e9))[0]
    assert downloads(project, "samples")["transformer of klein-4b"].hub == "black-forest-labs/FLUX.2-klein-4B"
    assert "transformer" not in downloads(project, "samples") and set(downloads(project, "train")) == {"transformer"}
    lines, _ = projects.report(Project(built, {"samples.family": "tiny-distilled"}))
    (told,) = [line for line in lines if line.startswith("previews: ")]
    assert re.fullmatch(r"previews: .* takes 2 passes each, tiny would take 8; by the last run about .* a preview in.*", told)


def test_an_automatic_number_of_steps_is_explained_by_plan_and_written_into_the_run(tmp_path, tiny_weights, monkeypatch):
    monkeypatch.setattr(length, "LEAST", 2)
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    projects.edit(folder, "steps = 6", 'steps = "auto"\npasses = 2')
    lines, _ = projects.report(Project(folder))
    assert 'train: steps = "auto" is 4 steps: 2 pictures x 2 passes, in batches of 1' in lines
    projects.build(folder, "images", "captions", "checks", "buckets", "latents", "embeddings", "train")
    (run,) = find_runs(Project(folder))
    assert run.settings["train.steps"] == 4 and not differences(run, flatten(present_settings(Project(folder), "train")))
    chosen = Project(folder)
    choose(chosen, run.recipe)
    assert chosen.config.sections["train"].steps == 4 and chosen.current("train").exists


def test_the_plan_of_a_released_model_warns_of_many_passes_over_few_pictures(tmp_path):
    project = klein(tmp_path, "[train]\nsteps = 3000\nrank = 128\n")
    for number in range(3):
        projects.add_image(tmp_path, f"{number}.png", number)
    lines = [line for line in projects.report(project, int(60e9))[0] if line.startswith("train: ")]
    assert len(lines) == 2 and "3 pictures are each drawn 1000 times in 3000 steps" in lines[0] and "rank 128" in lines[1]


def test_what_cannot_fit_is_refused_and_the_named_settings_do_fit(tmp_path):
    budget = int(7e9)
    lines, fits = projects.report(klein(tmp_path), budget)
    assert not fits
    (samples,) = [line for line in lines if line.startswith("samples needs about")]
    assert "[samples] base_bits = 8 would need" in samples or "[samples] base_bits = 4 would need" in samples
    bits = int(samples.split("base_bits = ")[1].split()[0])
    more = f'[samples]\nbase_bits = {bits}\n[train]\nbase_bits = 4\n[train.optimizer]\nkind = "adamw8bit"\n'
    projects.add_image(tmp_path, "a.png", 1)
    again, fits = projects.report(klein(tmp_path, more, 512), budget)
    assert fits, again
    nothing, _ = projects.report(klein(tmp_path), int(1e8))
    assert any("too much as well; choose a smaller family" in line for line in nothing)


@pytest.mark.proof("besides arrays, a stage takes less memory than the plan says of the program")
def test_besides_arrays_a_stage_takes_less_memory_than_the_plan_says_of_the_program(tmp_path, cases):
    folder = projects.make(tmp_path / "p", projects.ROOT / "data" / "assets" / "micro", images=2)
    projects.edit(folder, 'family = "tiny"', 'family = "micro"')
    projects.build(folder, "images", "captions", "buckets")
    for name in ("embeddings", "latents")[: cases(1, 2)]:
        projects.latentmill_process(folder, "run", name, "--only")
        run = Project(folder).current(name).manifest()["facts"]["run"]
        assert 0.1 * PROGRAM_BYTES < run["peak_rss"] - run["peak_mlx"] < PROGRAM_BYTES, run


def test_after_a_change_the_plan_counts_what_the_next_run_then_writes(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    projects.edit(folder, "steps = 6", "steps = 2")
    projects.edit(folder, "[64, 96]", "[64]")
    projects.build(folder, *CHAIN)
    caption = folder / "images" / "picture0.txt"
    text, again = caption.read_text(), "all anew: a new run, since settings, data or weights differ"
    first = Project(folder).current("train").folder.name

    def change(old: str, new: str) -> Callable[[], None]:
        return lambda: projects.edit(folder, old, new)

    nothing = dict.fromkeys(CHAIN, 0)
    anew = {"train": 2, "samples": 2}
    changes: list[tuple[str, Callable[[], object], dict[str, int | None]]] = [
        ("a caption", lambda: caption.write_text("other words"), {"captions": 1, "embeddings": 1, **anew}),
        ("the caption put back", lambda: caption.write_text(text), {"captions": 1}),
        ("a setting of buckets", change("[64]", "[96]"), {"buckets": 2, "latents": 2, **anew}),
        ("a preview prompt", change("a red thing", "a blue thing"), {"captions": 1, "embeddings": 1, "samples": 2}),
    ]
    for what, do, counts in changes:
        do()
        found = projects.planned(Project(folder))
        foretold = {name: found[name].missing for name in CHAIN}
        if what == "a caption":  # of the base's and the last checkpoint's previews, the base's are stored
            last = Project(folder, {"samples.checkpoints": "last"})
            assert projects.planned(last)["samples"].to_do == "up to 2 previews"
        # Memory is that of the new size before its crops are made; the last run tells the time of that size alone.
        size = (112, 80) if "[96]" in (folder / "project.toml").read_text() else (80, 48)
        assert [found[name].forecast.size for name in ("latents", "train")] == [size, size], what
        made = projects.written(projects.build(folder, *CHAIN))
        assert foretold == nothing | counts, what
        most = {"samples"} if foretold["train"] else set()  # the base's preview is stored
        assert all(found[name].to_do == "up to 2 previews" and made[name] <= 2 for name in most), what
        assert {name: count if name in most else made[name] for name, count in foretold.items()} == foretold, what
        note = f"the earlier run {first} as it is" if what == "the caption put back" else again if foretold["train"] else ""
        assert found["train"].note == note, what
    assert not any("Time is known" in line for line in projects.report(Project(folder))[0]), "nothing is left to do"
    # A row's time is that of the last run only with as many passes.
    for name, value, known in (("seeds", [7], True), ("steps", 9, False), ("references", ["images/picture0.png"], False)):
        need = projects.planned(Project(folder, {f"samples.{name}": value}))["samples"]
        assert need.missing and (need.seconds is not None) == known, name


def test_the_plan_counts_the_previews_of_every_checkpoint_that_the_run_will_hold(tmp_path, built):
    folder = projects.duplicate(built, tmp_path / "p")

    def foretold(**settings: int) -> list[str]:
        changed = {name.replace("_", ".", 1): value for name, value in settings.items()}
        found = projects.planned(Project(folder, changed))
        return [found[name].to_do for name in ("train", "samples")]

    projects.edit(folder, "steps = 6", "steps = 3")  # an end that the grid of 2 steps does not have
    projects.build(folder, "train")
    projects.edit(folder, "steps = 3", "steps = 6")
    assert foretold() == ["0 steps", "1 preview"], "of the base and the steps 2, 3, 4, 6, that of step 3 is not drawn yet"
    assert foretold(samples_steps=3) == ["0 steps", "5 previews"]
    assert foretold(train_steps=9, samples_steps=3) == ["3 steps", "up to 7 previews"]  # steps 8 and 9 too
    changed = {"train_steps": 7, "train_checkpoint_every": 7, "samples_steps": 3}
    assert foretold(**changed) == ["1 step", "up to 6 previews"]
    assert foretold(**changed, samples_base=False) == ["1 step", "up to 5 previews"]
    for old, new in (("steps = 6", "steps = 7"), ("checkpoint_every = 2", "checkpoint_every = 7"), ("steps = 2", "steps = 3")):
        projects.edit(folder, old, new)
    assert projects.build(folder, "train", "samples")["samples"].written == 6


def test_the_plan_ends_with_2_if_a_stage_will_stop_at_a_mistake(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    assert projects.report(Project(folder))[1]
    (folder / "images" / "picture0.txt").write_bytes(b"caf\xe9")
    lines, fits = projects.report(Project(folder))
    assert not fits and any("is not UTF-8" in line for line in lines)
    assert make_plan(Project(folder)).plain()["fits"], "into memory and on the disk, whatever a stage stops at"
    (folder / "images" / "picture0.txt").write_text("words")
    wrong = {"buckets.where": "blurr < 1", "images.folder": "nowhere"}  # the table checks is not there yet
    for (name, value), told in zip(wrong.items(), ('"blurr"', "nowhere"), strict=True):
        lines, fits = projects.report(Project(folder, {name: value}))
        assert not fits and any(told in line for line in lines), lines


def test_a_stage_that_cannot_fit_is_refused_before_its_weights_are_loaded(built, monkeypatch):
    from stages.tuner.blockwise import device

    monkeypatch.setattr(device, "device_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"latents needs about .* GB of memory, more than the .* that it may take: "):
        announcement(Project(built), "latents", 4, "4 crops")


def test_a_disk_without_the_room_is_refused_before_work_begins_with_what_is_needed_and_what_is_free(tmp_path, built, monkeypatch):
    project = klein(tmp_path / "klein")
    (tmp_path / "klein" / "hf").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "klein" / "hf"))
    monkeypatch.setattr(disk, "free_bytes", lambda folder: int(9e9))
    lines, fits = projects.report(project, int(60e9))
    (told,) = [line for line in lines if " on the disk of " in line]
    # 16.1 GB of weights and 1.93 GB of checkpoints, on one disk.
    assert not fits and re.match(r"what is to do needs about 18.* GB on .*, and 9 GB are free there: free 9.* GB more$", told)
    with pytest.raises(ValueError, match=r"train needs about 9.68 GB on .*, and 9 GB are free there: free 67. MB more"):
        projects.build(tmp_path / "klein", "train")
    folder = projects.without(built, tmp_path / "p", "latents")
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match=r"latents needs about .* kB on the disk of .*tables, and 1 kB are free there"):
        projects.build(folder, "latents")
    assert not Project(folder).current("latents").committed().num_rows


def test_plan_and_doctor_fit_a_terminal_of_80_columns_and_need_no_weights(tmp_path):
    folder = klein(tmp_path / "p").path
    for arguments in (["plan", "--verbose", "--memory", "7", "--project", str(folder)], ["doctor"]):
        code, text = projects.in_terminal([sys.executable, "-m", "pipeline", *arguments], 80)
        lines = text.splitlines()
        assert code == (2 if arguments[0] == "plan" else 0) and len(lines) > 8, text
        assert max(map(len, lines)) <= 80, text
        assert not any(line.endswith(" ") for line in lines)
        assert "computes no block twice" in " ".join(text.split())  # the words of the table are explained
    assert not (folder / "tables").exists()


def test_the_plan_of_a_retriever_needs_no_weights_and_names_what_is_downloaded(tmp_path):
    (tmp_path / "project.toml").write_text('[project]\npipeline = "retrieval"\nfamily = "xtr-base-en"\n')
    lines, fits = projects.report(Project(tmp_path), int(60e9))
    assert not fits and "to download: encoder, tokenizer; from google/xtr-base-en" in lines
