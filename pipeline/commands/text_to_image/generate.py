"""`latentmill generate` draws pictures into the table `generated`, whose rows `clean` keeps; `project.adapter()` draws one."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.adapters import STRENGTH_FOR, adapter_of, find_adapter, pair_strengths
from pipeline.options import with_project
from pipeline.terminal import Say, Terminal, silent, tell
from stages.run import Report
from stages.settings import several
from stages.untrusted import read_utf8

if TYPE_CHECKING:
    import mlx.core as mx
    from PIL.Image import Image

    from pipeline.project.project import Project
    from pipeline.project.stage_run import Write
    from pipeline.terminal import Quiet
    from stages.run import Run
    from stages.text_to_image.samples.config import SamplesConfig

MOST = 10_000  # pictures of one call
MOST_BYTES = 256_000_000  # of a file of prompts
COMPONENTS = ("transformer", "text_encoder", "tokenizer", "autoencoder")


@click.command("generate")
@click.argument("prompts", nargs=-1)
@click.option("--file", "prompt_file", type=click.Path(path_type=Path), help="A text file with one prompt per line.")
@click.option("--seed", "seeds", type=int, multiple=True, help="Seed of the starting noise; may be repeated.  [default: 0]")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    help="last, best or average of the run, best@RUN of another run, a file, or none for the base; may be repeated.  "
    "[default: last]",
)
@click.option("--step", type=int, help="Draw with the checkpoint of this step.")
@click.option(
    "--strength",
    "strengths",
    type=float,
    multiple=True,
    help="Factor of an adapter: 1 as trained, 0 the base; once for each adapter.  [default: 1]",
)
@STRENGTH_FOR
@click.option(
    "--reference",
    "references",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A picture to start from, for an adapter of edit training; may be repeated.",
)
@click.option(
    "--family",
    default="",
    help="The model that draws: the project's, or its distilled twin, such as klein-4b for klein-base-4b, with its own steps and "
    "guidance.  [default: that of [samples]]",
)
@click.option("--size", metavar="WIDTHxHEIGHT", help="Pixels, multiples of 16.  [default: that of [samples]]")
@click.option("--steps", type=int, help="Denoising steps.  [default: that of [samples]]")
@click.option("--guidance", type=float, help="Guidance scale.  [default: that of [samples]]")
@with_project
def command(
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    seeds: tuple[int, ...],
    adapters: tuple[str, ...],
    step: int | None,
    strengths: tuple[float, ...],
    strength_for: dict[str, float],
    references: tuple[Path, ...],
    family: str,
    size: str | None,
    steps: int | None,
    guidance: float | None,
    project: Project,
) -> None:
    """Draw prompts with the trained adapter. PROMPTS are used unchanged, so they should contain the trigger word. Every
    picture is a row of the table `generated`; a picture that was drawn before is not drawn again.
    """
    lines = read_utf8(prompt_file, MOST_BYTES).splitlines() if prompt_file else ()
    texts = [*prompts, *filter(None, map(str.strip, lines))]
    if not texts:
        raise ValueError('generate needs a prompt, such as: latentmill generate "a cat" --seed 1; or --file PROMPTS.txt')
    given = {"steps": steps, "guidance": guidance, "strength_for": strength_for or None, **parse_size(size)}
    chosen = tuple(pair_strengths(adapters, strengths))
    wish = Wish(tuple(dict.fromkeys(texts)), seeds or (0,), chosen, step, given, references, family)
    project.fetch = True
    with Terminal("generate") as terminal:
        paths = list(generate(project, wish, terminal))
    for path in paths:
        tell(str(path))


@dataclass(frozen=True)
class Wish:
    prompts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)  # every prompt is drawn with every seed
    # (a text of `find_adapter` or "none", strength); the changes of several are added
    adapters: tuple[tuple[str, float], ...] = (("last", 1.0),)
    step: int | None = None  # checkpoint; None: the end of the run; must be None with "best"
    # width, height (pixels), steps, guidance; None or missing: the setting of [samples]
    given: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[Path, ...] = ()  # images that the model sees while it draws
    family: str = ""  # that draws; "": as [samples] says


def parse_size(size: str | None) -> dict[str, int]:
    """Width and height in pixels of a text such as "768x512"; {} for None. Raises ValueError."""
    if size is None:
        return {}
    width, _, height = size.lower().replace("×", "x").partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise ValueError(f"--size must be WIDTHxHEIGHT in pixels, such as 768x512, got {size!r}")
    return {"width": int(width), "height": int(height)}


def generate(project: Project, wish: Wish, console: Quiet) -> Iterator[Path]:
    """Draw the pictures that do not exist yet, all before the first path is yielded; paths come prompt by prompt."""
    from pipeline.errors import Stopped
    from pipeline.process import interruptible
    from pipeline.project.recipe import recipe_id
    from pipeline.store.table import TableFolder, Writer
    from schemas.text_to_image import GENERATED

    project = drawn_by(project, wish.family)
    # A picture's id is a hash of everything that decides it, so a picture with that id is not drawn again.
    rows, adapters, config = wanted_rows(project, wish, console.say)
    recipe = {"stage": GENERATED.name, "version": 1, "columns": GENERATED.recorded, **_weights(project)}
    table = TableFolder(project.path / "tables" / GENERATED.name / recipe_id(recipe), GENERATED)
    artifacts = table.folder / "artifacts"
    with interruptible(console.say) as stop, Writer(table, recipe) as writer:
        stored = set(writer.stored["picture_id"].to_pylist())
        absent = [row for row in rows if not (artifacts / row["path"]).is_file() or row["picture_id"] not in stored]
        if absent:
            from stages.text_to_image.sampler import Adapters
            from stages.text_to_image.samples.drawing import Picture, draw_pictures, latent_path, save_png

            prompts = several(len({row["prompt"] for row in absent}), "prompt")
            console.say(f"{several(len(absent), 'picture')} of {prompts}, {drawn_with(project, adapters)}")
            report = Report(console.say, console.note, console.progress, stop.is_set)
            run = open_drawing(project, config, report, artifacts, writer.write_artifact)
            family = project.family_of("samples").name
            label = " with ".join(["the base", *(f"the adapter {file.name}" for file, _ in adapters)])
            pictures = [Picture(Path(row["path"]).stem, row["prompt"], row["seed"], wish.references, row) for row in absent]
            group = Adapters(label, files=lambda: adapters), pictures
            for drawn in draw_pictures(run, [group], lambda: "", partial(encode_prompts, project, report)):
                row = {**drawn.picture.row, "seconds": drawn.seconds}
                facts = {name: row[name] for name in ("prompt", "seed", "step", "adapter_id", "strength", "steps", "guidance")}
                facts["family"] = family
                writer.write_artifact(row["path"], partial(save_png, image=drawn.image, metadata=facts))
                writer.append(GENERATED.record_batch([row]))
                writer.flush()
                latent_path(run, drawn.picture).unlink()
            release()
            writer.finish(None, {})
            if stop.is_set() and (left := len(absent) - writer.rows_written):
                kept = f"{writer.rows_written} new pictures are kept, and the latents of those that were drawn"
                raise Stopped(f"generate: stopped; {kept}; {left} are still to do. Run the same command to go on.")
    yield from (artifacts / row["path"] for row in rows)


def drawn_with(project: Project, adapters: Sequence[tuple[Path, float]]) -> str:
    """Such as "with step 60 of run first"; a file that is no run's has its own name."""
    from pipeline.project.runs import find_runs
    from stages.models.weights import read_file

    labels = {run.table.folder.resolve(): run.label for run in find_runs(project)}
    names = []
    for file, _ in adapters:
        run = next((labels[each] for each in file.resolve().parents if each in labels), "")
        names.append(f"step {read_file(file)[1].get('step', '?')} of run {run}" if run else file.name)
    return f"with {' and '.join(names)}" if names else "without an adapter"


def drawn_by(project: Project, family: str) -> Project:
    """The project with another model in [samples], its steps and guidance. "": as it is. ValueError for one that does not fit."""
    if not family or family == project.family_of("samples").name:
        return project
    found = project.changed("samples", family=family, weights="", steps=None, guidance=None)
    found.family_of("samples")
    return found


def open_drawing(project: Project, config: SamplesConfig, report: Report, artifacts: Path, write: Write) -> Run[SamplesConfig]:
    """A run of the stage `samples` with settings of its own. Raises ValueError if drawing needs more memory than it may take."""
    from pipeline.project.outlook import outlook
    from stages.memory import refusal
    from stages.text_to_image.samples.memory import forecast

    seen = outlook(project, stage="samples")
    found = forecast(replace(seen, sections={**seen.sections, "samples": config}))
    if found.peak > seen.budget:
        raise ValueError(refusal("generate", found.peak, seen.budget, found.find_remedy()))
    run = project.open("samples", report, artifacts=artifacts, write=write)
    run.config, run.reuse = config, lambda name, load: load()  # a model that stays in memory would be in the way of other stages
    return run


def encode_prompts(project: Project, report: Report, prompts: Sequence[str]) -> Callable[[str], mx.array]:
    """A function from a prompt to its embedding, bfloat16 (1, tokens with padding, features)."""
    import mlx.core as mx

    from stages.text_to_image.embeddings.stage import encode_texts

    run = project.open("embeddings", report)
    run.reuse = lambda name, load: load()
    encoded = itertools.chain.from_iterable(encode_texts(run, prompts))
    # Fewer if the user asked to stop: then nothing is drawn.
    found = {prompt: mx.array(each.words).view(mx.bfloat16)[None] for prompt, each in zip(prompts, encoded, strict=False)}
    return found.__getitem__


def release() -> None:
    import mlx.core as mx

    # Models may hold reference cycles, and MLX's cache keeps freed buffers.
    gc.collect()
    mx.clear_cache()


def wanted_rows(
    project: Project, wish: Wish, say: Say = silent
) -> tuple[list[dict[str, Any]], list[tuple[Path, float]], SamplesConfig]:
    """The rows of `generated`, without `seconds`, one per prompt and seed; (file, strength) of the adapters; the settings."""
    if len(wish.prompts) * len(wish.seeds) > MOST:
        raise ValueError(f"generate draws at most {MOST} pictures at once, got {len(wish.prompts) * len(wish.seeds)}")
    config, family = _settings(project, tuple(dict.fromkeys(wish.seeds)), wish.given), project.family_of("samples")
    chosen = [(text, strength) for text, strength in wish.adapters if strength and text != "none"]
    adapters = [(find_adapter(project, text, wish.step, say), strength) for text, strength in chosen]
    same: dict[str, Any] = {
        **_facts(adapters),
        "width": config.width,
        "height": config.height,
        "steps": family.sampling_steps if config.steps is None else config.steps,
        "guidance": float(family.guidance if config.guidance is None else config.guidance),
    }
    if wish.references:
        from stages.text_to_image.imaging.decode import BACKGROUND
        from stages.text_to_image.samples.drawing import reference_id

        same["reference_id"] = reference_id(wish.references, config.background or BACKGROUND)
    rows = [same | {"prompt": prompt, "seed": seed} for prompt in wish.prompts for seed in config.seeds]
    for row in rows:
        decides = [row, _weights(project), *([config.strength_for] if config.strength_for and adapters else [])]
        content = json.dumps(decides, sort_keys=True)
        row["picture_id"] = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        row["path"] = f"images/{row['picture_id'][:16]}.png"
    return rows, adapters, config


def _settings(project: Project, seeds: tuple[int, ...], given: Mapping[str, Any]) -> SamplesConfig:
    config: SamplesConfig = project.config.sections["samples"]
    return replace(config, seeds=seeds, **{name: value for name, value in given.items() if value is not None})


def _facts(adapters: Sequence[tuple[Path, float]]) -> dict[str, Any]:
    """For no adapter: "", 0, 0.0. For several: "1*3f...+0.5*9c...", the step of the first, 1.0."""
    from stages.hashing import file_sha256
    from stages.models.weights import read_file

    if not adapters:
        return {"adapter_id": "", "step": 0, "strength": 0.0}
    (file, strength), *others = adapters
    ids = [file_sha256(each) for each, _ in adapters]
    together = "+".join(f"{strength:g}*{each}" for each, (_, strength) in zip(ids, adapters, strict=True))
    step = int(read_file(file)[1].get("step", 0))
    return {"adapter_id": together if others else ids[0], "step": step, "strength": 1.0 if others else float(strength)}


def _weights(project: Project) -> dict[str, Any]:
    """What identifies the models; with a row, it determines the picture."""
    from stages.text_to_image.beneath import content_of, drawn_of

    samples, embeddings = (project.config.sections[name] for name in ("samples", "embeddings"))
    hashes = {name: project.weight_recipe(name, "samples")["sha256"] for name in COMPONENTS}
    settings = {name: getattr(samples, name) for name in ("precision", "base_bits", "base_bits_for")}
    found = {"weights": hashes, "settings": settings, "text_precision": embeddings.precision}
    # Unrecorded at 16 bits, as in the recipe of `embeddings`: pictures of earlier versions keep their ids.
    found |= {"text_bits": embeddings.bits} if embeddings.bits != 16 else {}
    found |= {"family": drawing.name} if (drawing := project.family_of("samples")) is not project.family else {}
    found |= {"beneath": beneath} if (beneath := content_of(drawn_of(samples.beneath), project.path)) else {}
    # As JSON gives it back, with lists for tuples: equal to the recipe that is stored.
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def adapter(project: Project, which: str = "last", step: int | None = None) -> Adapter:
    """An adapter that the project trained, to draw images with it.

    `which` is "last" (as trained), "average" (the moving average, [train.ema]) or "best" (by validation loss,
    [train.validation]). `step` is a checkpoint; None takes the end of the run. Raises ValueError, with the checkpoints, if
    there is none.
    """
    from stages.models.weights import read_file

    project.refresh()
    path = adapter_of(project, step, which=which)
    return Adapter(project, path, int(read_file(path)[1]["step"]))


@dataclass(frozen=True)
class Adapter:
    """A trained adapter that draws images with `generate`."""

    project: Project
    path: Path
    step: int  # at which it was saved

    def generate(
        self,
        prompt: str,
        *,
        seed: int = 0,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        strength: float = 1.0,
        others: Sequence[tuple[Adapter | Path, float]] = (),
        references: Sequence[Path] = (),
        family: str = "",
    ) -> Image:
        """Draw one image. `prompt` is used unchanged, so it should contain the trigger word.

        None takes `width`, `height` (pixels), `steps` and `guidance` from [samples]; the image then equals the preview of
        that prompt and seed. `strength` is 1 as trained, 0 the base model. `others` are further (adapter or file, strength)
        pairs, whose changes are added. `references` are images to start from, for adapters trained to edit. `family` draws
        instead of that of [samples], such as the distilled twin, with its own steps and guidance. Raises ValueError if a size
        is not a multiple of 16 or a value is out of bounds.
        """
        from stages.text_to_image.sampler import Adapters
        from stages.text_to_image.samples.drawing import Picture, draw_pictures

        project, report = drawn_by(self.project, family), Report()
        given = {"width": width, "height": height, "steps": steps, "guidance": guidance}
        config = _settings(project, (seed,), given)
        further = [(each.path if isinstance(each, Adapter) else each, factor) for each, factor in others]
        group = Adapters(f"step {self.step}", files=lambda: [(self.path, strength), *further])
        picture = Picture("picture", prompt, seed, tuple(references))
        # Weights of blocks that stay on disk do not belong into the system's temporary folder, which may be memory.
        with TemporaryDirectory(prefix="drawing-", dir=project.path if config.stream_blocks else None) as folder:

            def write(name: str, save: Callable[[Path], None]) -> Path:
                path = Path(folder, "artifacts", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                save(path)
                return path

            run = open_drawing(project, config, report, Path(folder, "artifacts"), write)
            (drawn,) = draw_pictures(run, [(group, [picture])], lambda: "", partial(encode_prompts, project, report))
        release()
        return drawn.image
