"""Measure what the stage `checks` finds and costs: `python -m tests.bench.checks [--images 20000]`, which writes
data/docs/checks.md.

The planted sets are those of the tests: near-duplicates of 2,000 different pictures, and blurred and badly exposed
photographs.
"""

from __future__ import annotations

import json
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import numpy as np
from PIL import Image

from data.research.experiments.tables import markdown
from pipeline.commands.query import answer
from pipeline.project.project import Project
from stages.text_to_image.checks import SIDE, ChecksConfig, measure, measure_picture, near_pairs
from tests import projects
from tests.stages.text_to_image.checks import planted

PAGE = projects.ROOT / "data" / "docs" / "checks.md"
USUAL = ChecksConfig()
COPIES = 200  # near-duplicates of each kind
PX = 512  # pixels along a side of the pictures whose cost is measured
STAGES = ("images", "captions", "checks", "checks")


def thumbnails(pictures: Sequence[Image.Image]) -> np.ndarray:
    """Small grey copies, uint8 (pictures, 32, 32), which the stage `checks` compares to find near-duplicates."""
    found = [np.frombuffer(measure_picture(each.convert("L"))["thumbnail"], np.uint8) for each in pictures]
    return np.stack(found).reshape(-1, SIDE, SIDE)


def duplicates(count: int) -> str:
    """Recall by kind of copy, and precision, at several thresholds, among `count` different pictures."""
    originals = list(planted.different(count))
    chosen = np.random.default_rng(0).choice(count, COPIES, replace=False).tolist()
    groups = [*range(count), *(n for _ in planted.CHANGES for n in chosen)]
    copies = [change(originals[n]) for change in planted.CHANGES.values() for n in chosen]
    limits = (0.90, 0.92, USUAL.similarity, 0.96, 0.98)
    pairs = near_pairs(thumbnails([*originals, *copies]), min(limits))
    lines = []
    for limit in limits:
        found = [(i, j) for i, j, similarity in pairs if similarity >= limit]
        right = {j for i, j in found if i == groups[j]}
        firsts = range(count, len(groups), COPIES)
        kinds = [sum(first <= j < first + COPIES for j in right) / COPIES for first in firsts]
        precision = np.mean([groups[i] == groups[j] for i, j in found])
        lines.append((f"{limit:.2f}", f"{precision:.4f}", f"{len(right) / len(copies):.4f}", *(f"{kind:.3f}" for kind in kinds)))
    return markdown(("least similarity", "precision", "recall", *planted.CHANGES), lines)


def values(column: str, change: Callable[[Image.Image], Image.Image] | None = None, real: bool = False) -> list[float]:
    """A measured column, such as the blur, of every photograph after `change`; `real`: of all real pictures of the tests."""
    pictures = planted.real() if real else planted.photographs()
    return [float(measure_picture((change(each) if change else each).convert("L"))[column]) for each in pictures]


def roc() -> Iterator[tuple[str, ...]]:
    """Lines of a table about finding planted faults; (false, true) positive rates at the default and at the best threshold."""
    sharp, usual = values("blur", real=True), values("brightness")
    for radius in (1, 2, 3, 4, 6):
        marked = values("blur", lambda each, radius=radius: planted.blurred(each, radius))  # type: ignore[misc]
        yield line(f"blur, radius {radius} at 512 px", sharp, marked, USUAL.blur)
    for gain in (0.02, 0.05, 0.1, 0.2):
        marked = [-each for each in values("brightness", lambda each, gain=gain: planted.exposed(each, gain))]  # type: ignore[misc]
        yield line(f"{gain} of the light", [-each for each in usual], marked, -USUAL.dark)
    for gain in (2, 4, 8, 16):
        marked = values("brightness", lambda each, gain=gain: planted.exposed(each, gain))  # type: ignore[misc]
        yield line(f"{gain} times the light", usual, marked, USUAL.bright)


def line(name: str, normal: Sequence[float], marked: Sequence[float], limit: float) -> tuple[str, ...]:
    """`normal`, `marked`: the measured values of pictures without and with the fault, found if at least `limit`."""
    area = np.mean([(m > n) + 0.5 * (m == n) for n in normal for m in marked])
    best = max(sorted({*normal, *marked}), key=lambda each: rate(marked, each) - rate(normal, each))
    rates = [f"{rate(normal, each):.2f}, {rate(marked, each):.2f}" for each in (limit, best)]
    return name, f"{len(normal)}, {len(marked)}", f"{area:.3f}", rates[0], f"{rates[1]} ({abs(best):.2f})"


def rate(found: Sequence[float], limit: float) -> float:
    return float(np.mean([each >= limit for each in found]))


def cost(count: int) -> Iterator[tuple[str, ...]]:
    """Stage, seconds, CPU seconds and peak memory, for a folder of `count` different pictures."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "images").mkdir()
        (project / "project.toml").write_text('[project]\nfamily = "micro"\n')
        texts = [{"file_name": f"{n}.jpg", "text": f"picture {n} of {count * n}"} for n in range(count)]
        for n in range(count):
            planted.scene(n).resize((PX, PX), Image.Resampling.BILINEAR).save(project / "images" / f"{n}.jpg", quality=90)
        (project / "images" / "metadata.jsonl").write_text("\n".join(map(json.dumps, texts)))
        for n, name in enumerate(STAGES):
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            projects.latentmill_process(project, "run", name, "--only")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            again = ", nothing new" if name in STAGES[:n] else ""
            yield f"{name}{again}", f"{time.monotonic() - began:.0f}", f"{used:.0f}", f"{after.ru_maxrss / 1e6:.2f}"
        (found,) = answer(Project(project), "select count(*) as n from checks where duplicate_of is not null").to_pylist()
        yield f"near-duplicates named among {count:,} different pictures", str(found["n"]), "", ""


def decoding() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.jpg")
        planted.photographs()[0].resize((4000, 3000), Image.Resampling.BICUBIC).save(path, quality=90)
        times = []
        for _ in range(9):
            began = time.process_time()
            measure(path)
            times.append(time.process_time() - began)
    return f"A JPEG of 4000 x 3000 pixels takes {np.median(times):.3f} CPU seconds to decode and measure."


@click.command()
@click.option("--images", default=20_000, show_default=True, help="pictures whose cost is measured")
@click.option("--different", default=2_000, show_default=True, help="different pictures among which near-duplicates are")
def main(images: int, different: int) -> None:
    """Measure everything and write data/docs/checks.md. `images` is the number of pictures in the measurement of cost, and
    `different` the number in that of near-duplicates.
    """
    near, curves, large = duplicates(different), markdown(HEAD, roc()), decoding()
    lines = markdown(("stage", "seconds", "CPU seconds", "peak GB"), cost(images))
    machine = f"{platform.system()} {platform.machine()}, 2 cores"
    text = TEXT.format(different=different, near=near, curves=curves, images=images, px=PX, cost=lines, large=large)
    PAGE.write_text(text.replace("MACHINE", f"{machine}, {time.strftime('%-d %B %Y')}"))
    click.echo(f"wrote {PAGE}")


HEAD = ("planted fault", "pictures, faulty", "area under the curve", "at the default", "at the best threshold")
TEXT = """# What `latentmill lint` finds

`lint` finds nearly every copy of a picture that was rescaled, saved again, cropped a little, mirrored or relit, and hardly
ever names two different pictures. It finds a blur of two pixels or more at 512 px, and misses weaker blur and much of what is
only a little too dark or too bright.

`python -m tests.bench.checks` makes this page (MACHINE).
The planted sets are made from the test material: photographs, engravings, clip art, emoji, parts of them, and drawn scenes.

## Near-duplicates

{different:,} different pictures, and 200 copies of each of six kinds: half the size, JPEG at quality 40, less 5 % of each side,
mirrored, 1.25 times as bright, 0.7 times as bright. `[checks] similarity` is the threshold. The columns after *recall* are the
recall of each kind.

{near}

## Blur and exposure

A value above the threshold (for too little light, below) is a warning. *Area under the curve* is the area under the ROC curve:
the share of pairs of a usual and a faulty picture that the value orders rightly. The last two columns are the share of usual and
of faulty pictures that are named, at the default threshold and at the one with the fewest errors.

{curves}

## Cost

{images:,} different JPEG files of {px} x {px} pixels, each stage a process of its own, other programs beside it. The machine has
two cores, so the seconds depend on the other programs and the CPU seconds do not.

{cost}

{large}
"""

if __name__ == "__main__":
    main()
