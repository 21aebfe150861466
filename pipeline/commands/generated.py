"""`latentmill generate`: draws prompts with an adapter into the table `generated`, whose rows `clean` keeps."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.choose_adapter import find_adapter, pair_strengths
from pipeline.options import with_project
from pipeline.terminal import Terminal

if TYPE_CHECKING:
    import mlx.core as mx

    from pipeline.project.project import Project
    from pipeline.runner import Console
    from stages.text_to_image.samples.config import SamplesConfig

MOST = 10_000  # pictures of one call
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
@click.option(
    "--reference",
    "references",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A picture to start from, for an adapter of edit training; may be repeated.",
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
    references: tuple[Path, ...],
    size: str | None,
    steps: int | None,
    guidance: float | None,
    project: Project,
) -> None:
    """Draw prompts with the trained adapter. PROMPTS are used unchanged, so they should contain the trigger word. Every
    picture is a row of the table `generated`; a picture that was drawn before is not drawn again.
    """
    texts = [*prompts, *(read_prompts(prompt_file) if prompt_file else ())]
    if not texts:
        raise ValueError('generate needs a prompt, such as: latentmill generate "a cat" --seed 1; or --file PROMPTS.txt')
    given = {"steps": steps, "guidance": guidance, **parse_size(size)}
    chosen = tuple(pair_strengths(adapters, strengths))
    wish = Wish(tuple(dict.fromkeys(texts)), seeds or (0,), chosen, step, given, references)
    with Terminal("generate") as terminal:
        paths = list(generate(project.allow_downloads(), wish, terminal))
    for path in paths:
        click.echo(path)


@dataclass(frozen=True)
class Wish:
    """A request for pictures."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)  # every prompt is drawn with every seed
    # (a text of `find_adapter` or "none", strength); the changes of several are added
    adapters: tuple[tuple[str, float], ...] = (("last", 1.0),)
    step: int | None = None  # checkpoint; None: the end of the run; must be None with "best"
    given: dict[str, Any] | None = None  # width, height (pixels), steps, guidance; None or missing: the setting of [samples]
    references: tuple[Path, ...] = ()  # images that the model sees while it draws


def read_prompts(file: Path) -> list[str]:
    """The lines that are not blank. Raises ValueError if the file cannot be read or has none."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--file {file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if not lines:
        raise ValueError(f"--file {file} has no prompt: one per line")
    return lines


def parse_size(size: str | None) -> dict[str, int]:
    """Width and height in pixels of a text such as "768x512"; {} for None. Raises ValueError."""
    if size is None:
        return {}
    width, _, height = size.lower().replace("×", "x").partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise ValueError(f"--size must be WIDTHxHEIGHT in pixels, such as 768x512, got {size!r}")
    return {"width": int(width), "height": int(height)}


def generate(project: Project, wish: Wish, console: Console) -> Iterator[Path]:
    """Draw the pictures that do not exist yet, and yield the path of each, prompt by prompt. Raises ValueError for a wrong
    setting.

    All are drawn before the first path is yielded.
    """
    from pipeline.project.recipe import recipe_id
    from pipeline.store.table import TableFolder
    from pipeline.store.writer import Writer
    from schemas.text_to_image.generated import GENERATED

    # A picture's id is a hash of everything that decides it, so a picture with that id is not drawn again.
    rows, adapters = wanted_rows(project, wish)
    recipe = {
        "stage": GENERATED.name,
        "version": 1,
        "columns": GENERATED.recorded,
        **_weights(project),
    }
    table = TableFolder(project.path / "tables" / GENERATED.name / recipe_id(recipe), GENERATED)
    with Writer(table, recipe) as writer:
        stored = {row["picture_id"]: row for row in writer.stored.to_pylist()}
        absent = [r for r in rows if not (table.folder / "artifacts" / r["path"]).is_file() or r["picture_id"] not in stored]
        if absent:
            for row, image in _draw(project, absent, adapters, wish.references, console):
                from stages.text_to_image.samples.decoding import save_png

                facts = {name: row[name] for name in ("prompt", "seed", "step", "adapter_id", "strength", "steps", "guidance")}
                writer.write_artifact(row["path"], partial(save_png, image=image, metadata=facts))
                writer.append(GENERATED.table([row]).to_batches()[0])
            writer.finish(None, {})
    yield from (table.folder / "artifacts" / row["path"] for row in rows)


def wanted_rows(project: Project, wish: Wish) -> tuple[list[dict[str, Any]], list[tuple[Path, float]]]:
    """The rows of `generated`, without `seconds`, one per prompt and seed, and the (file, strength) pairs of the adapters.

    Raises ValueError if a setting is out of range, there are too many pictures, or an adapter does not exist.
    """
    if len(wish.prompts) * len(wish.seeds) > MOST:
        raise ValueError(f"generate draws at most {MOST} pictures at once, got {len(wish.prompts) * len(wish.seeds)}")
    given = {name: value for name, value in (wish.given or {}).items() if value is not None}
    config: SamplesConfig = replace(project.config.sections["samples"], seeds=tuple(dict.fromkeys(wish.seeds)), **given)
    chosen = [(text, strength) for text, strength in wish.adapters if strength and text != "none"]
    adapters = [(find_adapter(project, text, wish.step), strength) for text, strength in chosen]
    same: dict[str, Any] = {
        **_facts(adapters),
        "width": config.width,
        "height": config.height,
        "steps": project.family.sampling_steps if config.steps is None else config.steps,
        "guidance": float(project.family.guidance if config.guidance is None else config.guidance),
    }
    if wish.references:
        from stages.text_to_image.samples.references import reference_id

        same["reference_id"] = reference_id(wish.references)
    rows = [same | {"prompt": prompt, "seed": seed} for prompt in wish.prompts for seed in config.seeds]
    for row in rows:
        content = json.dumps([row, _weights(project)], sort_keys=True)
        row["picture_id"] = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        row["path"] = f"images/{row['picture_id'][:16]}.png"
    return rows, adapters


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
    samples, embeddings = (project.config.sections[name] for name in ("samples", "embeddings"))
    hashes = {name: project.weight_recipe(name)["sha256"] for name in COMPONENTS}
    settings = {name: getattr(samples, name) for name in ("precision", "base_bits", "base_bits_for") if hasattr(samples, name)}
    # As JSON gives it back, with lists for tuples: equal to the recipe that is stored.
    plain: dict[str, Any] = json.loads(
        json.dumps({"weights": hashes, "settings": settings, "text_precision": embeddings.precision})
    )
    return plain


def _draw(
    project: Project,
    rows: Sequence[dict[str, Any]],
    adapters: Sequence[tuple[Path, float]],
    references: Sequence[Path],
    console: Console,
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield (row with `seconds` of denoising, PIL image). All rows must have equal steps and guidance."""
    import mlx.core as mx

    from pipeline.commands.generate import encode, encode_files, release
    from stages.text_to_image import converted
    from stages.text_to_image.packing import STREAMED
    from stages.text_to_image.samples.decoding import decode
    from stages.text_to_image.samples.drawing import load_sampler

    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    console.say(f"{len(rows)} pictures of {len(prompts)} prompts")
    *encoded, empty_1TJ = encode(project, [*prompts, ""])
    texts = dict(zip(prompts, encoded, strict=True))
    beside = encode_files(project, references)
    settings, family = project.config.sections["samples"], project.family
    sampler = load_sampler(
        " with ".join(["the base", *(f"the adapter {file.name}" for file, _ in adapters)]),
        project.component("transformer"),
        family,
        lambda: empty_1TJ,
        adapters,
        precision=settings.precision,
        packed=settings,
        folder=project.path / STREAMED,
        copies=project.path / converted.FOLDER,
        steps=rows[0]["steps"],
        guidance=rows[0]["guidance"],
    )
    latents: list[tuple[dict[str, Any], mx.array]] = []
    for number, row in enumerate(rows, 1):
        began = time.perf_counter()
        latent_1Chw = sampler.draw(texts[row["prompt"]], row["seed"], row["width"], row["height"], references=beside)
        assert latent_1Chw is not None
        # MLX is lazy: without this, the time is that of building the graph.
        mx.eval(latent_1Chw)
        latents.append((row | {"seconds": time.perf_counter() - began}, latent_1Chw))
        console.progress(number, len(rows), "pictures")
    # Text encoder, transformer and autoencoder are in memory one after another.
    del sampler
    release()
    autoencoder = family.architecture.load_autoencoder(project.component("autoencoder"), family, mx.float32)
    for row, latent_1Chw in latents:
        yield row, decode(autoencoder, latent_1Chw)
    del autoencoder
    release()
