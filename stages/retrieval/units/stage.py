"""The stage `units`: parse every used source file once, and yield a row per function, method, class or window of lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from schemas.retrieval import SOURCES, UNITS
from stages.hashing import text_sha256
from stages.retrieval import texts
from stages.retrieval.texts import Row
from stages.retrieval.units.configuration import config_units
from stages.retrieval.units.prose import markdown_units, notebook_units, shell_units
from stages.retrieval.units.python import python_units
from stages.retrieval.units.syntax import can_parse, syntax_units
from stages.retrieval.units.unit import Unit, package_of, windows
from stages.run import Run
from stages.settings import COUNT, WHOLE, Section, runtime, setting
from stages.stage import Stage
from stages.untrusted import read_bytes

KEPT = ("unit_id", "path", "source_id", "language", "module")  # the columns on which the freshness of a row depends


@dataclass(frozen=True)
class UnitsConfig(Section):
    min_lines: int = setting(
        2,
        "fewest lines of code in a body, docstring excluded; shorter functions say little to a search",
        unit="lines",
        bounds=(0, WHOLE[1]),
    )
    classes: bool = setting(True, "a class is a unit too: its first lines and the signatures of its methods")
    undocumented: bool = setting(True, "functions and classes without a docstring are units too, and statements outside of them")
    window: int = setting(
        40,
        "lines of a window, where a file cannot be parsed or a section is longer; each overlaps the next by half",
        unit="lines",
        bounds=(2, 10_000),
    )
    max_characters: int = setting(
        6000, "characters of a document; the rest is beyond what an encoder reads", unit="characters", bounds=(100, 1_000_000)
    )
    batch_size: int = runtime(32, "files per record batch, which a kill can lose", unit="files", bounds=COUNT)


def wanted_units(run: Run[UnitsConfig]) -> pa.Table:
    """The columns KEPT of every unit. Raises ValueError if no file is used, or one has changed since `sources` read it."""
    sources = _used(run)
    if not sources:
        raise ValueError("no source file is used: see `select path, skipped, detail from sources`, or set sources.roots")
    stored = run.output.stored.select([*KEPT, "kind"])
    # The packages of a language have been installed since: its files are parsed again.
    parsed = pa.array([name for name in stored["language"].unique().to_pylist() if can_parse(name)], pa.string())
    stored = stored.filter(pc.invert(pc.and_(pc.equal(stored["kind"], "lines"), pc.is_in(stored["language"], parsed))))
    files, known = _files(UNITS.select(sources, KEPT[1:])), _files(stored)
    new = pc.invert(pc.is_in(files, known)).to_pylist()
    parsing = (source for source, parse in zip(sources, new, strict=True) if parse)
    # Only these columns: the texts of a large folder take a gigabyte.
    made = UNITS.select([{name: row[name] for name in KEPT} for source in parsing for row in unit_rows(run, source)], KEPT)
    return pa.concat_tables([stored.filter(pc.is_in(known, files)).select(list(KEPT)).cast(made.schema), made])


def _files(rows: pa.Table) -> pa.Array:
    """What the units of a file depend on, as one string per row."""
    return pc.binary_join_element_wise(*(rows[name].combine_chunks() for name in KEPT[1:]), "\0")


READERS: dict[str, Callable[[str, int], list[Unit] | None]] = {
    "markdown": markdown_units,
    "bash": shell_units,
    "notebook": lambda text, window: notebook_units(text),
    **{name: partial(config_units, name) for name in texts.DATA.values()},
}
CEILING = 64 * 2**20  # bytes: as sources.max_bytes
SHORT = ("code", "section")  # units that may have one line
CODE = ("function", "method", "class", "code")  # units that [units] `undocumented` is about


def _used(run: Run[UnitsConfig]) -> list[Row]:
    rows = [row for row in run.inputs.rows(SOURCES).to_pylist() if row["skipped"] is None]
    return sorted(rows, key=lambda row: str(row["path"]))


def parse_units(run: Run[UnitsConfig]) -> Iterator[pa.RecordBatch]:
    pending = set(run.output.pending["unit_id"].to_pylist())
    paths = set(run.output.pending["path"].to_pylist())
    sources = [row for row in _used(run) if row["path"] in paths]
    for some in run.report.batches(sources, run.config.batch_size, "files"):
        yield UNITS.record_batch(row for source in some for row in unit_rows(run, source) if row["unit_id"] in pending)


def unit_rows(run: Run[UnitsConfig], source: Row) -> list[Row]:
    """Raises ValueError if the file cannot be read, or has changed since `sources` read it."""
    file = run.root / Path(source["file"]).expanduser()
    try:
        content = read_bytes(file, CEILING)
    except ValueError as error:
        raise ValueError(f"{error}: run make sources") from None
    if hashlib.sha256(content).hexdigest() != source["source_id"]:
        raise ValueError(f"{file} has changed since its row in sources was written: run make sources")
    units = find_units(texts.decode(content), source["language"], run.config)
    kept = (unit for unit in units if run.config.undocumented or unit.docstring or unit.kind not in CODE)
    found = [_row(unit, source, run.config.max_characters) for unit in kept]
    return list({row["unit_id"]: row for row in found}.values())


def find_units(text: str, language: str, config: UnitsConfig) -> list[Unit]:
    """Units of at least `min_lines` lines of code, and SHORT ones; windows of lines where the text cannot be parsed."""
    read = READERS.get(language)
    if read is not None:
        found = read(text, config.window)
    elif language == "python":
        found = python_units(text, classes=config.classes, window=config.window)
    else:
        found = syntax_units(text, language, classes=config.classes, window=config.window)
    units = windows(text, config.window) if found is None else found
    return [unit for unit in units if unit.code_lines >= config.min_lines or unit.kind in SHORT]


def _row(unit: Unit, source: Row, max_characters: int) -> Row:
    # What the encoder reads, such as "json.decoder JSONDecoder.decode(self, s): ...".
    text = f"{source['module']} {unit.qualified_name}{unit.rest}".strip()[:max_characters].rstrip()
    text_id = texts.text_id("document", text)
    query = texts.first_sentence(unit.docstring) if unit.docstring else None
    named = unit.kind not in ("cell", "lines") and unit.qualified_name != unit.place
    title = query or (" ".join(texts.words(unit.qualified_name)) if named else "")
    return {
        "unit_id": text_sha256(source["path"], unit.qualified_name, f"{unit.first_line} {unit.last_line}", text_id),
        **{name: source[name] for name in KEPT[1:]},
        "package": package_of(source["path"]),
        **{name: value for name, value in vars(unit).items() if name != "rest"},
        "query": query,
        "text": text,
        "text_id": text_id,
        "words": " ".join(texts.words(f"{unit.name} {text}")),
        "docstring_words": " ".join(texts.words(unit.docstring)),
        "title": title,
        "title_id": texts.text_id("document", title) if title else "",
    }


STAGE = Stage(
    reads=(SOURCES,),
    writes=UNITS,
    unit="function",
    config=UnitsConfig,
    wants=wanted_units,
    run=parse_units,
    ships=False,
    # 2: five more languages, functions that JavaScript assigns to a name; the syntax tree says where a name ends. 3: statements
    # outside of functions, Markdown, notebooks, functions of the shell; a file that does not parse keeps its other functions.
    version=4,  # 4: what stands behind macros of C and C++
)
