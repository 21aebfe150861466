"""The stage `sources`: one row per file of the roots, with the reason if the file has no units. The roots are only read."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from schemas.retrieval import SOURCES
from stages.retrieval import texts
from stages.retrieval.texts import Row
from stages.run import Run
from stages.settings import COUNT, Section, nearest, runtime, selects, setting, several
from stages.stage import Stage
from stages.untrusted import Folders, open_regular, read_bytes

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


PACKAGE = "package:"  # "package:requests" is the installed package requests
STANDARD_LIBRARY = "stdlib"  # "package:stdlib" is the standard library of the running Python
NOT_LIBRARY = ("/site-packages/", "/dist-packages/")  # folders in the standard library's folder that do not belong to it


@dataclass(frozen=True)
class Root:
    name: str  # first part of the paths of its files
    path: Path
    given: str  # the user's entry, or the absolute path of an installed package
    exclude: tuple[str, ...] = ()  # patterns of .gitignore
    own_rules: bool = True  # the .gitignore files in and above it apply


def find_roots(given: Iterable[str], project: Path) -> list[Root]:
    """Roots of equal names have the folder above in their names too. Raises ValueError if one does not exist, or comes twice."""
    roots: dict[Path, Root] = {}
    for text in given:
        root = _package(text.removeprefix(PACKAGE)) if text.startswith(PACKAGE) else _folder(text, project)
        if (place := root.path.resolve()) in roots:
            raise ValueError(f"sources.roots must be different folders, files or packages, got {root.name!r} twice")
        roots[place] = root
    folders: dict[str, set[Path]] = {}
    for place, root in roots.items():
        folders.setdefault(root.name, set()).add(_folder_of(place))
    found = {
        place: root if len(folders[root.name]) == 1 else replace(root, name="-".join(_folder_of(place).parts[-2:]))
        for place, root in roots.items()
    }
    named: dict[str, Path] = {}
    for place, root in found.items():
        if (other := named.setdefault(root.name, _folder_of(place))) != _folder_of(place):
            raise ValueError(f"sources.roots: {other} and {_folder_of(place)} end in equal names; name their common folder")
    return list(found.values())


def _folder_of(place: Path) -> Path:
    return place.parent if place.is_file() else place


def _folder(text: str, project: Path) -> Root:
    folder = project / Path(text).expanduser()
    if folder.exists():
        return Root(_folder_of(folder.resolve()).name, folder, text)
    try:
        others = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        others = []
    hint = nearest(folder.name, others, '"{}"') or f"; an installed package is named {PACKAGE}NAME"
    raise ValueError(f"source folder {folder} does not exist: set sources.roots{hint}")


def _package(name: str) -> Root:
    exclude: tuple[str, ...] = ()
    if name == STANDARD_LIBRARY:
        place, exclude = sysconfig.get_path("stdlib"), NOT_LIBRARY
    else:
        try:
            spec = find_spec(name) if name.isidentifier() else None
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise ValueError(
                f"sources.roots: there is no installed package {name!r}; {PACKAGE}{STANDARD_LIBRARY} is Python's library"
            )
        place = next(iter(spec.submodule_search_locations or ()), spec.origin or "")
        if not spec.submodule_search_locations and not Path(place).is_file():
            raise ValueError(f"sources.roots: package {name!r} has no source files")
    return Root(name, Path(place), place, exclude, own_rules=False)


FILE_COLUMNS = ("path", "root", "file", "module", "bytes", "mtime_ns", "inode")  # by these values an unchanged file is recognised
CONTAINERS = ("src", "lib", "python")  # folders of a repository in which packages lie
RULES = ".gitignore"
CACHES = ("__pycache__/", "*.pyc", "*.pyo", "*.egg-info/", "*.dist-info/")  # never sources, whatever the rules say


def scan(root: Root, exclude: Iterable[str] = ()) -> list[Row]:
    """FILE_COLUMNS of every file, by path; only .gitignore files are opened. Hidden files are left out, links to folders are
    followed. Raises ValueError if the root cannot be read, or a pattern of sources.exclude is wrong.
    """
    if root.path.is_file():
        return [_row(root, root.path.name, root.path.stat())]
    fixed, wrong = _spec([*CACHES, *root.exclude, *exclude])
    if wrong:
        raise ValueError(f"sources.exclude must hold patterns of .gitignore: {wrong}")
    layers = _layers_above(root.path) if root.own_rules else []
    rows = [_row(root, name, status) for name, status in _walk(root, fixed, layers)]
    return sorted(rows, key=lambda row: str(row["path"]))


# The rules of a .gitignore file in the root's folder a/: ("", "a/"), which is removed from names; of one above the root src:
# ("src/", ""), which is put before names.
Layer = tuple[str, str, "GitIgnoreSpec"]


def _walk(root: Root, fixed: GitIgnoreSpec, layers: list[Layer]) -> Iterator[tuple[str, os.stat_result]]:
    """(path relative to the root, status). Of a folder that cannot be read, and of rules that cannot be used, there is a row
    too. Raises ValueError if the root cannot be read.
    """
    folders = Folders(root.path)
    # To folders. They come last: of a folder that is reached without a link, too, the files have their own path.
    links: list[tuple[os.DirEntry[str], str, list[Layer]]] = []

    def opened(folder: str, layers: list[Layer]) -> tuple[Iterator[os.DirEntry[str]], str, list[Layer]]:
        """`folder` is relative to the root, "" or with a final slash."""
        place = root.path / folder
        entries = folders.entries(place)
        if root.own_rules and (place / RULES).is_file():
            layers = [*layers, ("", folder, _read_rules(place / RULES)[0])]
        return iter(entries), folder, layers

    try:
        waiting = [opened("", layers)]
    except ValueError as error:
        raise ValueError(f"source folder {root.path} {error}: change its permissions, or exclude it") from None
    while waiting or links:  # without recursion: folders may be nested a thousand deep
        if waiting:
            entries, folder, layers = waiting[-1]
            entry = next(entries, None)
            if entry is None:
                waiting.pop()
                continue
            is_folder, is_file = _kind(entry)
            name = f"{folder}{entry.name}{'/' if is_folder else ''}"
            if entry.name == RULES and is_file and root.own_rules and _read_rules(Path(entry.path))[1]:
                yield name, entry.stat()
            if entry.name.startswith(".") or fixed.match_file(name) or _ignored(name, layers):
                continue
            if is_folder and entry.is_symlink():
                links.append((entry, name, layers))
                continue
        else:
            (entry, name, layers), is_folder, is_file = links.pop(0), True, False
        if is_folder:
            try:
                waiting.append(opened(name, layers))
            except ValueError:
                yield name, entry.stat(follow_symlinks=False)
        elif is_file or entry.is_symlink():
            yield name, entry.stat(follow_symlinks=is_file)


def _kind(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    try:
        return entry.is_dir(), entry.is_file()
    except OSError:  # a link to itself
        return False, False


def _ignored(name: str, layers: list[Layer]) -> bool:
    # The innermost file with a pattern that matches decides.
    for above, below, rules in reversed(layers):
        path = above + name.removeprefix(below)
        # A rule for what lies in a folder matches "a/" too, and would count more than one for "a" after it.
        found = [rules.check_file(each) for each in {path, path.rstrip("/") or path}]
        decided = [each for each in found if each.include is not None]
        if decided:
            return bool(max(decided, key=lambda each: each.index or 0).include)
    return False


def _layers_above(folder: Path) -> list[Layer]:
    """Rules of the .gitignore files above `folder` within its repository, outermost first."""
    folder = folder.resolve()
    above = [folder, *folder.parents]
    top = next((place for place in above if (place / ".git").exists()), None)
    if top is None or top == folder:
        return []
    places = above[1 : above.index(top) + 1][::-1]
    layers = [
        (f"{PurePosixPath(folder.relative_to(place))}/", "", _read_rules(place / RULES)[0])
        for place in places
        if (place / RULES).is_file()
    ]
    # The user named this folder: that counts more than a rule that ignores it.
    return [] if _ignored("", layers) else layers


def _read_rules(file: Path) -> tuple[GitIgnoreSpec, str]:
    """The rules, and what is wrong with those that are not used, or ""."""
    try:
        return _spec(read_bytes(file, RULES_BYTES).decode(errors="replace").splitlines())
    except ValueError as error:
        return _spec([])[0], str(error)


def _spec(lines: Iterable[str]) -> tuple[GitIgnoreSpec, str]:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of "[[", which means itself
        return _read_spec(lines)


def _read_spec(lines: Iterable[str]) -> tuple[GitIgnoreSpec, str]:
    from pathspec import GitIgnoreSpec

    patterns, wrong = [], ""
    for number, line in enumerate(lines, 1):
        if number > RULES_LINES or line.split("/").count("**") > STARS:
            wrong = wrong or f"line {number}: at most {RULES_LINES} lines are read, and {STARS} ** in a line"
            continue
        try:
            for found in GitIgnoreSpec.from_lines([line]).patterns:
                pattern = found.regex and re.compile(_linear(found.regex.pattern))
                patterns.append(type(found)(pattern, found.include) if pattern else found)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            wrong = wrong or f"line {number}, {line[:80]!r}: {' '.join(str(error).split())[:100]}"
    return GitIgnoreSpec(patterns), wrong


RULES_BYTES, RULES_LINES, STARS = 1_000_000, 5_000, 3
STAR = "[^/]*"  # in pathspec's regular expressions
BETWEEN = re.compile(r"(?:\[\^/\]|\[[^\]/]*\]|\\.|[^/()\[\]\\])+")  # two stars of one name


def _linear(pattern: str) -> str:
    """The same without going back from one star of a name to the one before: 16 of them took 80 s for a name.

    The first place of what stands between two stars is enough, since the second star takes what follows.
    """
    made, *parts = pattern.split(STAR)
    for number, part in enumerate(parts, 1):
        if number == len(parts) or (part and not BETWEEN.fullmatch(part)):
            made += STAR + part
        elif part:  # else there are two stars, which say what one says
            made += f"(?>{STAR}?{part})"
    return made


def _row(root: Root, name: str, status: os.stat_result) -> Row:
    # A table cannot hold a name that is not UTF-8. The row gets the escaped name, under which no file will be found.
    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    file = root.given if root.path.is_file() else str(PurePosixPath(root.given, name))
    inode = status.st_ino & (2**63 - 1)  # as int64
    # An edit can put the time of modification back, not that of the change.
    state = {"bytes": status.st_size, "mtime_ns": max(status.st_mtime_ns, status.st_ctime_ns), "inode": inode}
    return {"path": f"{root.name}/{name}", "root": root.name, "file": file, "module": module_of(root, name), **state}


def module_of(root: Root, name: str) -> str:
    """Dotted, without leading folders src, lib and python; below a package root with the root's name."""
    parts = list(PurePosixPath(name).with_suffix("").parts)
    while len(parts) > 1 and parts[0] in CONTAINERS:
        parts = parts[1:]
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    # api.py in a package requests is requests.api, in a folder src it is api.
    is_package = (root.path / "__init__.py").is_file()
    return ".".join([root.name, *parts] if is_package or not parts else parts)


# fmt: off
LANGUAGES = {
    ".py": "python", ".pyi": "python", ".pyw": "python", ".rs": "rust", ".go": "go", ".java": "java", ".kt": "kotlin",
    ".kts": "kotlin", ".scala": "scala", ".swift": "swift", ".c": "c", ".h": "c", ".cc": "cpp", ".cpp": "cpp", ".cxx": "cpp",
    ".hpp": "cpp", ".hh": "cpp", ".hxx": "cpp", ".cuh": "cpp", ".cjs": "javascript", ".mts": "typescript", ".cts": "typescript",
    ".cs": "csharp", ".js": "javascript", ".mjs": "javascript", ".jsx": "javascript", ".ts": "typescript", ".tsx": "tsx",
    ".rb": "ruby", ".rake": "ruby", ".php": "php", ".lua": "lua", ".jl": "julia", ".r": "r", ".hs": "haskell", ".ml": "ocaml",
    ".ex": "elixir", ".exs": "elixir", ".erl": "erlang", ".clj": "clojure", ".sh": "bash", ".lean": "lean", ".zig": "zig",
    ".sql": "sql", ".m": "objc", ".mm": "objc", ".metal": "cpp", ".cu": "cpp", ".pl": "perl", ".dart": "dart", ".bash": "bash",
    ".zsh": "bash", ".md": "markdown", ".markdown": "markdown", ".ipynb": "notebook", **texts.DATA,
}
# What the first line of a script without a suffix names after #!, without its version.
PROGRAMS = {
    "python": "python", "pypy": "python", "sh": "bash", "bash": "bash", "dash": "bash", "ksh": "bash", "zsh": "bash",
    "ruby": "ruby", "perl": "perl", "php": "php", "lua": "lua", "node": "javascript", "deno": "typescript",
    "ts-node": "typescript", "Rscript": "r", "julia": "julia", "swift": "swift", "elixir": "elixir", "escript": "erlang",
}
# fmt: on
SHEBANG = re.compile(rb"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?([A-Za-z][A-Za-z-]*)")
HEADER = ".h"  # the suffix of headers of C, of which many are C++
# What only a header of C++ holds.
# [^\S\n] and not \s: blank lines must not be read again from each of them.
CPP = re.compile(
    r"^[^\S\n]*(?:namespace\b|template\s*<|class\s+\w|using\s+\w|(?:public|private|protected)\s*:|#[^\S\n]*include\s*<\w+>)|\bstd::",
    re.MULTILINE,
)
VENDORED = frozenset(
    {"vendor", "vendored", "_vendor", "_vendored", "third_party", "thirdparty", "node_modules", "extern", "_bundled", "bundled"}
)
GENERATED = re.compile(r"do not (edit|modify)|@generated|auto-?generated|generated by|generated from", re.IGNORECASE)
GENERATED_LINES = 4  # a generated file says so in its first lines
LONG_LINES = 300  # characters per line, on average: such a file was written by a program
LOCK = re.compile(r"(?:^|[-_.])lock\.(?:json|ya?ml|toml)$|^npm-shrinkwrap\.json$", re.IGNORECASE)  # names of lock files
DATA_BYTES = 64_000  # of a file of configuration: a larger one holds data, of which a repository may have any amount
PROSE = ("markdown", "notebook")  # a paragraph may be one line, and a picture in a notebook is one
BINARY_BYTES = 8192  # a zero among the first bytes marks a binary file, as in git
UNREAD = {"source_id": "", "lines": 0, "skipped": None, "detail": ""}


def examine(file: Path, row: Row, config: SourcesConfig) -> Row:
    """The row of the table `sources`. A file that is not used has the reason in `skipped`; nothing is raised."""
    found = {**row, **UNREAD, "language": _by_suffix(row)}
    if not PurePosixPath(row["path"]).suffix:
        found["language"] = _of_script(file)
    skipped, detail = _read(file, found, config) or (None, "")
    return found | {"skipped": skipped, "detail": detail}


def _by_suffix(row: Row) -> str:
    return LANGUAGES.get(PurePosixPath(row["path"]).suffix.lower(), "")


def _of_script(file: Path) -> str:
    """The language that the first line of a script names, or ""."""
    try:
        with open_regular(file) as opened:
            named = SHEBANG.match(opened.readline(200))
    except (OSError, ValueError):
        return ""
    return PROGRAMS.get(named[1].decode(), "") if named else ""


def _read(file: Path, row: Row, config: SourcesConfig) -> tuple[str, str] | None:
    """Fill in what the file's bytes say: (value of `skipped`, sentence for the user), or None if the file is used."""
    place, wanted = PurePosixPath(row["path"]), set(config.languages or LANGUAGES.values())
    if row["path"].endswith("/"):
        return "unreadable", "the folder cannot be read, or leads above the folder that is searched or to one of the system"
    if place.name == RULES:
        return "unreadable", f"not all rules are used: {_read_rules(file)[1]}"
    unwanted = "language", f"sources.languages has {', '.join(config.languages)}"
    header = place.suffix.lower() == HEADER  # may turn out to be C++ once it is read
    if not row["language"]:
        return "language", "neither its suffix nor a first line #! is of a known language"
    if not wanted & {row["language"], "cpp" if header else row["language"]}:
        return unwanted
    if vendored := VENDORED.intersection(part.lower() for part in place.parts[1:-1]):
        return "vendored", f"it lies in a folder {min(vendored)}, which holds copies of other projects"
    if row["bytes"] > config.max_bytes:
        return "too_large", f"{row['bytes']} bytes: more than sources.max_bytes = {config.max_bytes}"
    if row["language"] in texts.DATA.values() and row["bytes"] > DATA_BYTES:
        return "too_large", f"{row['bytes']} bytes: more than the {DATA_BYTES} of a file of configuration"
    if LOCK.search(place.name):
        return "generated", "its name is that of a lock file"
    if not row["bytes"]:
        return "empty", "it has no bytes"
    try:
        content = read_bytes(file, config.max_bytes)
    except ValueError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return "unreadable", "the file is gone, is a broken link, or has a name that is not UTF-8"
        return "unreadable", str(error).removeprefix(f"{file} ")
    row["source_id"] = hashlib.sha256(content).hexdigest()
    if b"\0" in content[:BINARY_BYTES] and not content.startswith(texts.UTF_16):
        return "binary", "it holds bytes of value zero"
    try:
        text = texts.decode(content)
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{content[error.start]:02x}"
        return "encoding", f"it is not {error.encoding}: {wrong}; convert it to UTF-8, or declare its encoding"
    lines = text.splitlines()
    row["lines"] = len(lines)
    if header and CPP.search(text):
        row["language"] = "cpp"
    if row["language"] not in wanted:
        return unwanted
    if not text.strip():
        return "empty", "it holds only white space"
    if head := [line for line in lines[:GENERATED_LINES] if GENERATED.search(line)]:
        return "generated", f'it says so: "{head[0].strip()[:80]}"'
    if len(text) / len(lines) > LONG_LINES and row["language"] not in PROSE:
        return "generated", f"{len(text) // len(lines)} characters per line on average"
    return None


CEILING = 64 * 2**20  # bytes: the largest value of max_bytes, since a file is read whole
QUIET = ("language",)  # reasons of which the summary names no files: a folder of code holds many other files


@dataclass(frozen=True)
class SourcesConfig(Section):
    roots: tuple[str, ...] = selects(
        ("code",),
        'folders or files, relative to the project, or packages as "package:NAME"; "package:stdlib" is Python\'s own library',
        path=True,
    )
    exclude: tuple[str, ...] = selects((), "files that are left out beside those of .gitignore, as patterns of .gitignore")
    languages: tuple[str, ...] = setting((), "languages that are read, such as python and rust; empty: all known languages")
    max_bytes: int = setting(
        1_000_000,
        f"size above which a file is not read, bytes: data more often than code; at most {CEILING}",
        unit="bytes",
        bounds=(1, CEILING),
    )
    batch_size: int = runtime(64, "files per record batch, which a kill can lose", unit="files", bounds=COUNT)

    def check(self) -> None:
        if not self.roots or not all(self.roots):
            raise ValueError('roots must be a list of folders or packages, such as ["code"], got ' + repr(list(self.roots)))
        if unknown := sorted(set(self.languages) - set(LANGUAGES.values())):
            raise ValueError(f"languages must be of {', '.join(sorted(set(LANGUAGES.values())))}, got {unknown[0]!r}")


def wanted_sources(run: Run[SourcesConfig]) -> pa.Table:
    """FILE_COLUMNS, by which an unchanged file is recognised. Raises ValueError if a root does not exist, or all are empty."""
    rows = run.once(_listing)
    if not rows:
        raise ValueError(f"the roots {', '.join(run.config.roots)} hold no files: set sources.roots or sources.exclude")
    return SOURCES.select(rows, FILE_COLUMNS)


def _listing(run: Run[SourcesConfig]) -> list[Row]:
    return [row for root in find_roots(run.config.roots, run.root) for row in scan(root, run.config.exclude)]


def look_again(run: Run[SourcesConfig]) -> pa.Table:
    """Files of a language that was not known when they were looked at, or that could not be read then and can be now."""
    stored = run.output.stored
    unknown, unreadable = (
        {*stored["path"].filter(pc.equal(pc.fill_null(stored[name], ""), value)).to_pylist()}
        for name, value in (("language", ""), ("skipped", "unreadable"))
    )

    def now(row: Row) -> bool:
        path, file = row["path"], run.root / Path(row["file"]).expanduser()
        readable = file.name != RULES and file.is_file() and os.access(file, os.R_OK)
        return (path in unknown and bool(_by_suffix(row))) or (path in unreadable and readable)

    return SOURCES.select([row for row in run.once(_listing) if now(row)], FILE_COLUMNS)


def examine_sources(run: Run[SourcesConfig]) -> Iterator[pa.RecordBatch]:
    """Each row from its own file alone; `finish_sources` marks duplicates."""
    pending = sorted(run.output.pending.to_pylist(), key=lambda row: str(row["path"]))
    for some in run.report.batches(pending, run.config.batch_size, "files"):
        yield SOURCES.record_batch(examine(run.root / Path(row["file"]).expanduser(), row, run.config) for row in some)


def finish_sources(run: Run[SourcesConfig]) -> Iterator[pa.RecordBatch]:
    key = itemgetter(*FILE_COLUMNS)
    stored = {key(row): row for row in run.output.stored.select(SOURCES.batch.names).to_pylist()}
    # The run was stopped before all files were read.
    if not stored.keys() >= set(map(key, run.output.pending.to_pylist())):
        return
    rows = [stored[file] for file in map(key, run.once(_listing)) if file in stored]
    marked = mark_duplicates(rows)
    if changed := [new for new, old in zip(marked, rows, strict=True) if new != old]:
        yield SOURCES.record_batch(changed)
    _summarise(run, marked)


def mark_duplicates(rows: list[Row]) -> list[Row]:
    """Of files with the same bytes, the first path is used. Rows that are skipped for another reason stay."""
    judged = [row for row in rows if row["skipped"] in (None, "duplicate")]
    first = {row["source_id"]: row["path"] for row in sorted(judged, key=lambda row: str(row["path"]), reverse=True)}
    found = []
    for row in rows:
        if row["skipped"] in (None, "duplicate"):
            used, other = row["path"] == first[row["source_id"]], f"the same bytes as {first[row['source_id']]}"
            row = row | ({"skipped": None, "detail": ""} if used else {"skipped": "duplicate", "detail": other})
        found.append(row)
    return found


def _summarise(run: Run[SourcesConfig], rows: list[Row]) -> None:
    skipped = [row for row in rows if row["skipped"]]
    counts = "".join(f", {count} {reason}" for reason, count in sorted(Counter(row["skipped"] for row in skipped).items()))
    run.report.say(f"{several(len(rows), 'file')}: {len(rows) - len(skipped)} used{counts}")
    named = [f"{row['path']} ({row['skipped']})" for row in skipped if row["skipped"] not in QUIET]
    if named:
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        run.report.say(f"not used: {', '.join(named[:5])}{more}")


STAGE = Stage(
    reads=(),
    writes=SOURCES,
    unit="file",
    config=SourcesConfig,
    wants=wanted_sources,
    run=examine_sources,
    finish=finish_sources,
    redo=look_again,
    ships=False,
    version=3,  # 2: a header .h is C++ if its text is; 3: Markdown, notebooks, scripts without a suffix, declared encodings
)
