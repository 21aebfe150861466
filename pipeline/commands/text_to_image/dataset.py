"""`latentmill lint`, `crops` and `captions`: looking at images and captions before training, and editing the captions."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.query import FORMAT, answer, answer_panel, format_answer, say_answer, write_answer
from pipeline.commands.run import bring_up_to_date, summary
from pipeline.options import JSON, with_project
from pipeline.project.project import Project
from pipeline.project.weights import NotFetched
from pipeline.store.lock import texts_lock
from pipeline.terminal import Terminal, tell
from stages.settings import several

if TYPE_CHECKING:
    from stages.text_to_image.captions.stage import Doubt

CAPTIONS = """
select path, captions.image_id, position, text from captions
join images on images.image_id = captions.image_id and images.rejected is null
where role = 'caption' order by path, position
"""
MOST_ALIKE = 3  # pictures of which lint says the same, one per line
LINT = ("path", "warnings", "detail", "duplicate_of", "blur")  # columns of an answer in CSV or JSON


@click.command("lint")
@FORMAT
@JSON
@with_project
def lint(style: str, as_json: bool, project: Project) -> int:
    """Look for mistakes in the images and captions. Errors keep a run from starting: caption files that cannot be read,
    images without a caption unless captions.missing says what they get. Files that cannot be used are left out.
    Warnings are near-duplicates, blur, bad exposure, borders, small or very long pictures; no caption, an empty file
    or the trigger alone, two files that differ, a file that is newer than an edit, equal captions, captions without the
    trigger or too long for the text encoder. What is said of many images is one line; --format csv or json has a row
    for each. Images with warnings are still used. To exclude images, set the condition `where` in the section
    [buckets]. The table `checks` is brought up to date first. The exit code is 2 if there are errors.
    """
    from stages.text_to_image.captions.stage import NO_CAPTION, caption_doubts, caption_problems
    from stages.text_to_image.checks import warnings_now
    from stages.text_to_image.imaging.usable import first_names

    bring_up_to_date(project, ["images"], quiet=True)
    problems = caption_problems(project.open("captions"))
    left_out = answer(project, "select path, rejected, detail from images where rejected is not null order by path").to_pylist()
    if problems:
        warned = warnings_now(project.open("checks"))
    else:
        rest = [name for name in project.chain("checks") if name != "images"]
        bring_up_to_date(project, [*rest, "checks"], quiet=True)
        warned = answer_panel(project, "checks").to_pylist()
    rows = [{"path": path, "warnings": "error", "detail": text} for path, text in problems]
    rows += [row | {"warnings": row["rejected"], "detail": f"not used: {row['detail'] or row['rejected']}"} for row in left_out]
    by_path = {row["path"]: row for row in warned}
    for doubt in [*caption_doubts(project.open("captions")), *([] if problems else too_long(project))]:
        row = by_path.setdefault(doubt.path or doubt.detail, {"path": doubt.path, "warnings": "", "detail": ""})
        row |= {"warnings": _joined(", ", row["warnings"], doubt.name), "detail": _joined("; ", row["detail"], doubt.detail)}
    warned = list(by_path.values())
    rows += warned
    style = "json" if as_json else style
    if style != "table":
        say_answer(format_answer(LINT, [tuple(row.get(name) for name in LINT) for row in rows], style), style)
        return 2 if problems else 0
    for same in _alike(rows):
        first, names = same[0], [each["path"] for each in same]
        said = [first_names(names), *([first["warnings"]] if first in warned else []), first["detail"]]
        tell(": ".join(filter(None, said)) + (f" ({first['duplicate_of']})" if first.get("duplicate_of") else ""))
    bare = sum(NO_CAPTION in row["warnings"] for row in warned)
    tell(
        f"{several(len(problems), 'error')}, {several(len(left_out), 'file')} not used, "
        f"{several(sum(bool(row['path']) for row in warned), 'image')} with warnings"
        + (f", {bare} of them without a caption" if bare else "")
    )
    return 2 if problems else 0


def too_long(project: Project) -> Iterator[Doubt]:
    """Captions whose end the text encoder will not read; none while its tokenizer is not on this machine."""
    from schemas.text_to_image import IMAGES
    from stages.models.text.tokenisation import PromptTokenizer
    from stages.text_to_image.captions.stage import Doubt, wanted_captions

    most = project.family.text_tokens
    texts = [row for row in wanted_captions(project.open("captions")).to_pylist() if row["role"] == "caption"]
    # A token has a letter or more, except of a few scripts; loading the tokenizer takes time.
    texts = [row for row in texts if len(row["text"].encode()) > most / 2]
    if not texts:
        return
    with suppress(NotFetched):
        tokenized = PromptTokenizer(project.component("tokenizer", fetch=False), project.family)
        images = project.rows(IMAGES, "lint", ["image_id", "path"]).to_pylist()
        paths = {row["image_id"]: row["path"] for row in reversed(images)}
        for row in texts:
            if dropped := tokenized(row["text"]).dropped:
                detail = f"{several(dropped, 'token')} too long for the text encoder, which reads {most}: the end is cut off"
                yield Doubt(paths[row["image_id"]], "cut_caption", f"the caption is {detail}")


def _alike(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Rows that say the same, together if they are more than MOST_ALIKE."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["warnings"], row["detail"], row.get("duplicate_of")), []).append(row)
    for group in groups.values():
        yield from [group] if len(group) > MOST_ALIKE else [[row] for row in group]


def _joined(sign: str, *texts: str) -> str:
    return sign.join(filter(None, texts))


@click.command("crops")
@click.argument("out", required=False, type=click.Path(path_type=Path, file_okay=False))
@with_project
def crops(out: Path | None, project: Project) -> None:
    """Draw all crops on contact sheets. A sheet is a PNG file with at most 40 images of one resolution. The most
    cropped images come first. What is cut away is faded. OUT is a new or empty folder for the sheets. Without OUT, the
    sheets are written into the folder exports/crops of the project. The earlier content of this folder is deleted. The
    table `buckets` is brought up to date first.
    """
    # Without a condition over the table `checks`, crops depend on no caption.
    where = project.config.sections["buckets"].where
    bring_up_to_date(project, [*(project.chain("buckets") if where else ["images"]), "buckets"], quiet=True)
    written = write_crops(project, out)
    more = f" and {len(written) - 1} more" if len(written) > 1 else ""
    tell(f"wrote {written[0]}{more}")


def write_crops(project: Project, out: Path | None = None) -> list[Path]:
    """`out` must be new or empty; None: exports/crops, emptied first. Raises NotBuilt, or ValueError if no image has a crop."""
    from stages.text_to_image.sheets import QUESTION, draw_sheets

    rows = answer(project, QUESTION).to_pylist()
    if not rows:
        raise ValueError("no image has a crop: all are rejected or too small; latentmill panel unused says why")
    folder = out or project.path / "exports" / "crops"
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be a new folder, but it has files")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in draw_sheets(rows, project.resource("image_folder"), project.config.sections["latents"].background):
        page.save(folder / name)
        written.append(folder / name)
    return written


@click.command("captions")
@click.option(
    "--edit", type=click.Path(path_type=Path, dir_okay=False), help="Write all captions into this CSV file, to edit them."
)
@click.option("--apply", type=click.Path(path_type=Path, dir_okay=False), help="Read the edited CSV file back into the project.")
@click.option("--sidecars", is_flag=True, help="Write the edited captions into the caption files beside the images.")
@click.option("--undo-sidecars", is_flag=True, help="Give the caption files of the last --sidecars their old content.")
@click.option("--take-files", is_flag=True, help="Drop the edits of captions whose files have changed since.")
@with_project
def captions(
    edit: Path | None, apply: Path | None, sidecars: bool, undo_sidecars: bool, take_files: bool, project: Project
) -> None:
    """Run the stage captions: find the captions of the images. With --edit, all captions are also written into a CSV
    file with the columns path, image_id, position and text. Change the column text in a spreadsheet or an editor. Then
    read the file back with --apply. Edited captions are stored in the project. Only --sidecars and --undo-sidecars
    write caption files of the user.
    """
    from pipeline import runner
    from stages.text_to_image.captions import edits

    if sum(map(bool, (edit, apply, sidecars, undo_sidecars, take_files))) > 1:
        raise ValueError("give one of --edit, --apply, --sidecars, --undo-sidecars and --take-files")
    if sidecars or undo_sidecars or take_files:
        change, run = edits.undo_sidecars if undo_sidecars else edits.write_sidecars, project.open("captions")
        change = edits.take_files if take_files else change
        with texts_lock(project.path):
            tell(change(run))
    if apply:
        tell(f"{several(read_captions(project, apply), 'caption')} changed")
    bring_up_to_date(project, project.chain("captions"))
    with Terminal("captions") as terminal:
        outcome = runner.run(project, "captions", terminal)
    tell(summary(outcome))
    project.refresh()
    if edit:
        if edit.exists():
            raise ValueError(f"{edit} exists already; choose another name, or read it back with --apply")
        count = write_answer(project, CAPTIONS, edit, "csv")
        tell(f"wrote {count} captions to {edit}; edit the column text, then run: latentmill captions --apply {edit}")


def read_captions(project: Project, file: Path) -> int:
    """Store the changed texts of an edited file, return their number. A wrong row raises ValueError, and nothing is stored."""
    from stages.text_to_image.captions.edits import write_edits
    from stages.untrusted import read_utf8

    present = {f"{row['image_id']}:{row['position']}": row["text"] for row in answer(project, CAPTIONS).to_pylist()}
    reader = csv.DictReader(io.StringIO(read_utf8(file, 256_000_000), newline=""), strict=True)
    edits: dict[str, str | None] = {}
    try:
        missing = {"image_id", "position", "text"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"{file}: must have the columns image_id, position and text, got {', '.join(reader.fieldnames or ())}"
            )
        for row in reader:
            where, key = f"{file}, line {reader.line_num}", f"{row['image_id']}:{row['position']}"
            if key not in present or None in row or row["text"] is None:
                raise ValueError(
                    f"{where}: names no caption of this project; keep the columns image_id and position as they were"
                )
            if not row["text"].strip():
                raise ValueError(f"{where}: a caption must have a letter; delete the line to keep the caption")
            if row["text"].strip() != present[key].strip():
                edits[key] = row["text"]
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: not valid CSV: {error}") from None
    if edits:
        with texts_lock(project.path):
            write_edits(project.path, edits)
    return len(edits)
