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
    default="last",
    show_default=True,
    help="last, best or average of the run, a file, or none for the base. --run chooses another run.",
)
@click.option("--step", type=int, help="Draw with the checkpoint of this step.")
@click.option("--strength", type=float, default=1.0, show_default=True, help="Factor of the adapter: 1 as trained, 0 the base.")
@click.option("--size", metavar="WIDTHxHEIGHT", help="Pixels, multiples of 16.  [default: that of [samples]]")
@click.option("--steps", type=int, help="Denoising steps.  [default: that of [samples]]")
@click.option("--guidance", type=float, help="Guidance scale.  [default: that of [samples]]")
@with_project
def command(
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    seeds: tuple[int, ...],
    adapter: str,
    step: int | None,
    strength: float,
    size: str | None,
    steps: int | None,
    guidance: float | None,
    project: Project,
) -> None:
    """Draw prompts with the trained adapter. PROMPTS are used unchanged, so they should contain the trigger word. Every picture
    is a row of the table `generated`; a picture that was drawn before is not drawn again.
    """
    texts = [*prompts, *(read_prompts(prompt_file) if prompt_file else ())]
    if not texts:
        raise ValueError('generate needs a prompt, such as: latentmill generate "a cat" --seed 1; or --file PROMPTS.txt')
    given = {"steps": steps, "guidance": guidance, **parse_size(size)}
    wish = Wish(tuple(dict.fromkeys(texts)), seeds or (0,), adapter, step, strength, given)
    with Terminal("generate") as terminal:
        paths = list(generate(project.allow_downloads(), wish, terminal))
    for path in paths:
        click.echo(path)


@dataclass(frozen=True)
class Wish:
    """A request for pictures: every prompt is drawn with every seed. `adapter` is "last", "best", "average", "none" or
    the path of a file. `step` chooses a checkpoint; None takes the end of the run. With "best" it must be None.
    `strength` scales the adapter: 1 is as trained. `given` replaces settings of `[samples]`: "width" and "height" in
    pixels, "steps", "guidance". A setting that is missing or None is not replaced.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    adapter: str = "last"
    step: int | None = None
    strength: float = 1.0
    given: dict[str, Any] | None = None


def read_prompts(file: Path) -> list[str]:
    """Return the lines of a text file that are not blank. Raises ValueError if the file cannot be read or has no prompt."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--file {file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if not lines:
        raise ValueError(f"--file {file} has no prompt: one per line")
    return lines


def parse_size(size: str | None) -> dict[str, int]:
    """Return {"width": ..., "height": ...} for a text such as "768x512"; {} for None. Raises ValueError for another text."""
    if size is None:
        return {}
    width, _, height = size.lower().replace("×", "x").partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise ValueError(f"--size must be WIDTHxHEIGHT in pixels, such as 768x512, got {size!r}")
    return {"width": int(width), "height": int(height)}


def generate(project: Project, wish: Wish, console: Console) -> Iterator[Path]:
    """Draw the pictures that `wish` describes and yield the path of every file, prompt by prompt. Pictures that exist
    are not drawn again. Messages and progress go to `console`. Raises ValueError for a wrong setting or a missing
    adapter.

    The text encoder, the transformer and the autoencoder are loaded one after another. All pictures are drawn before
    the first path is yielded.
    """
    from pipeline.project.recipe import recipe_id
    from pipeline.store.table import TableFolder
    from pipeline.store.writer import Writer
    from schemas.text_to_image.generated import GENERATED

    rows, adapter = wanted_rows(project, wish)
    recipe = {
        "stage": GENERATED.name,
        "version": 1,
        "columns": {f.name: str(f.type) for f in GENERATED.batch},
        **_weights(project),
    }
    table = TableFolder(project.path / "tables" / GENERATED.name / recipe_id(recipe), GENERATED)
    with Writer(table, recipe) as writer:
        stored = {row["picture_id"]: row for row in writer.stored.to_pylist()}
        absent = [r for r in rows if not (table.folder / "artifacts" / r["path"]).is_file() or r["picture_id"] not in stored]
        if absent:
            for row, image in _draw(project, absent, adapter, console):
                from stages.text_to_image.samples.decoding import save_png

                facts = {name: row[name] for name in ("prompt", "seed", "step", "adapter_id", "strength", "steps", "guidance")}
                writer.write_artifact(row["path"], partial(save_png, image=image, metadata=facts))
                writer.append(GENERATED.table([row]).to_batches()[0])
            writer.finish(None, {})
    yield from (table.folder / "artifacts" / row["path"] for row in rows)


def wanted_rows(project: Project, wish: Wish) -> tuple[list[dict[str, Any]], Path | None]:
    """Return (rows, adapter file) for the pictures that `wish` describes. `rows` has one dict per prompt and seed, with
    the columns of the table `generated` except `seconds`. The file is None if the base model is used alone. Raises
    ValueError if a setting is out of range, if there are too many pictures, or if the adapter does not exist.
    """
    from stages.hashing import file_sha256
    from stages.models.weights import read_file

    if len(wish.prompts) * len(wish.seeds) > MOST:
        raise ValueError(f"generate draws at most {MOST} pictures at once, got {len(wish.prompts) * len(wish.seeds)}")
    given = {name: value for name, value in (wish.given or {}).items() if value is not None}
    config: SamplesConfig = replace(project.config.sections["samples"], seeds=tuple(dict.fromkeys(wish.seeds)), **given)
    if not -10 <= wish.strength <= 10:
        raise ValueError(f"--strength must be from -10 to 10, got {wish.strength}")
    adapter = adapter_file(project, wish) if wish.strength else None
    about = read_file(adapter)[1] if adapter else {}
    same: dict[str, Any] = {
        "adapter_id": file_sha256(adapter) if adapter else "",
        "step": int(about.get("step", 0)),
        "strength": float(wish.strength) if adapter else 0.0,
        "width": config.width,
        "height": config.height,
        "steps": project.family.sampling_steps if config.steps is None else config.steps,
        "guidance": float(project.family.guidance if config.guidance is None else config.guidance),
    }
    rows = [same | {"prompt": prompt, "seed": seed} for prompt in wish.prompts for seed in config.seeds]
    for row in rows:
        content = json.dumps([row, _weights(project)], sort_keys=True)
        row["picture_id"] = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        row["path"] = f"images/{row['picture_id'][:16]}.png"
    return rows, adapter


def adapter_file(project: Project, wish: Wish) -> Path | None:
    """Return the path of the adapter file that `wish.adapter` names. Return None if it is "none": the base model draws
    alone. Raises ValueError if the file does not exist, or if `project` has not trained such an adapter.
    """
    from pipeline.commands.export import WHICH, adapter_of

    if wish.adapter == "none":
        return None
    if wish.adapter in WHICH:
        return adapter_of(project, wish.step, lambda line: None, wish.adapter)
    path = Path(wish.adapter).expanduser()
    if not path.is_file():
        raise ValueError(f"--adapter must be {', '.join(WHICH)}, none or a file, got {wish.adapter!r}: there is no such file")
    return path


def _weights(project: Project) -> dict[str, Any]:
    """Return a dict that identifies the models with which pictures are drawn. "weights" maps each component to the
    sha256 of its files. "settings" holds the precision settings of the transformer. "text_precision" is the precision
    of the text encoder.

    A row and this dict together determine the picture.
    """
    samples, embeddings = (project.config.sections[name] for name in ("samples", "embeddings"))
    hashes = {name: project.weight_recipe(name)["sha256"] for name in COMPONENTS}
    settings = {name: getattr(samples, name) for name in ("precision", "base_bits", "base_bits_for") if hasattr(samples, name)}
    plain: dict[str, Any] = json.loads(
        json.dumps({"weights": hashes, "settings": settings, "text_precision": embeddings.precision})
    )
    return plain


def _draw(
    project: Project, rows: Sequence[dict[str, Any]], adapter: Path | None, console: Console
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Draw one picture per row and yield (row, picture), where the picture is a PIL image. A row is a dict of columns
    of the table `generated`. The yielded row has a further key "seconds", the time of its denoising. `adapter` is the
    adapter's file, or None to draw with the base model. All rows must have equal "steps", "guidance" and "strength".
    """
    import mlx.core as mx

    from pipeline.commands.generate import encode, release
    from stages.text_to_image.samples.decoding import decode
    from stages.text_to_image.samples.drawing import load_sampler

    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    console.say(f"{len(rows)} pictures of {len(prompts)} prompts")
    *encoded, empty_1TJ = encode(project, [*prompts, ""])
    texts = dict(zip(prompts, encoded, strict=True))
    settings, family = project.config.sections["samples"], project.family
    sampler = load_sampler(
        f"the adapter {adapter.name}" if adapter else "the base",
        project.component("transformer"),
        family,
        lambda: empty_1TJ,
        adapter,
        precision=settings.precision,
        packed=settings,
        steps=rows[0]["steps"],
        guidance=rows[0]["guidance"],
        strength=rows[0]["strength"],
    )
    latents: list[tuple[dict[str, Any], mx.array]] = []
    for number, row in enumerate(rows, 1):
        began = time.perf_counter()
        latent_1Chw = sampler.draw(texts[row["prompt"]], row["seed"], row["width"], row["height"])
        assert latent_1Chw is not None
        mx.eval(latent_1Chw)
        latents.append((row | {"seconds": time.perf_counter() - began}, latent_1Chw))
        console.progress(number, len(rows), "pictures")
    del sampler
    release()
    autoencoder = family.architecture.load_autoencoder(project.component("autoencoder"), family, mx.float32)
    for row, latent_1Chw in latents:
        yield row, decode(autoencoder, latent_1Chw)
    del autoencoder
    release()
