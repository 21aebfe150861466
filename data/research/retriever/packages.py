"""Download the packages of packages.txt, read their licences, and extract their functions."""

from __future__ import annotations

import email.parser
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from data.research.retriever.extract import Function, functions, words_of

LIST = Path(__file__).parent / "packages.txt"
SKIPPED = re.compile(
    r"(^|/)(tests?|testing|_tests?|idle_test|lib2to3|turtledemo|site-packages|docs?|_?vendor(ed)?|extern(al)?s?|third_party|_distutils"
    r"|thirdparty|bundled|node_modules|conftest\.py|test_[^/]*|[^/]*_tests?\.py|[^/]*_pb2(_grpc)?\.py|setup\.py|__pycache__|\.[^/]*)(/|$)"
)
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Zlib|HPND|CMU|Unlicense|0BSD|CC0|Public Domain)\b", re.I
)
RESTRICTED = re.compile(
    r"\b([AL]?GPL\w*|GNU|MPL\w*|Mozilla|EPL|Eclipse|EUPL|CDDL|CeCILL\w*|SSPL|BUSL|Proprietary|Commercial)\b", re.I
)
BYTES = 400_000  # a larger source file is generated
DOCUMENTED, NAMED = 3, 4  # least lines of code of a function with a docstring, and of one known by its name only
NAME_WORDS = 3  # least words in the name of a function without a docstring
MOST_DOCUMENTED, MOST_NAMED = 9_000, 2_500  # of one package


@dataclass(frozen=True)
class Package:
    """A downloaded package. `licence` is what its metadata says about its licence."""

    name: str
    version: str
    licence: str

    @property
    def permissive(self) -> bool:
        """True if the metadata names a permissive licence and no restricted one."""
        return bool(PERMISSIVE.search(self.licence)) and not RESTRICTED.search(self.licence)


def listed(path: Path = LIST) -> list[list[str]]:
    """Return the lines of packages.txt, each split at spaces. A line has `name==version`, and the platform if the wheel
    depends on it.
    """
    lines = (line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def download(line: list[str], to: Path) -> Path:
    """Return the archive of a package in the folder `to`. It is downloaded if it is not there. `line` is a line of
    packages.txt, split at spaces.
    """
    name, _, version = line[0].partition("==")
    folder = to / name
    if not (folder.is_dir() and any(folder.iterdir())):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), f"{name}=={version}"]
        if len(line) > 1:
            command += ["--only-binary=:all:", "--python-version", "3.11", "--platform", line[1]]
        subprocess.run(command, check=True)
    return next(file for file in sorted(folder.iterdir()) if file.suffix in (".whl", ".gz", ".zip", ".bz2"))


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the Python files and the metadata files in an archive, which is a wheel or a source archive."""

    def wanted(path: str, size: int) -> bool:
        metadata = path.endswith((".dist-info/METADATA", "/PKG-INFO"))
        return metadata or (path.endswith(".py") and size <= BYTES and not SKIPPED.search(path))

    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as wheel:
            for item in wheel.infolist():
                if wanted(item.filename, item.file_size):
                    yield item.filename, wheel.read(item)
        return
    with tarfile.open(archive) as tar:
        for entry in tar:
            path = entry.name.partition("/")[2]
            if entry.isfile() and wanted("/" + path, entry.size):
                handle = tar.extractfile(entry)
                assert handle is not None
                yield path, handle.read()


def metadata(content: bytes) -> Package:
    """Return name, version and licence that a METADATA or PKG-INFO file states."""
    found = email.parser.Parser().parsestr(content.decode("utf-8", errors="replace"), headersonly=True)
    classifiers = [str(c).split(" :: ")[-1] for c in found.get_all("Classifier", []) if str(c).startswith("License ::")]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    stated = str(found.get("License-Expression") or "") or "; ".join(classifiers)
    if not stated:
        stated = (str(found.get("License") or "").strip().splitlines() or [""])[0]
    return Package(str(found["Name"]), str(found["Version"]), " ".join(stated.split())[:120])


def module_of(path: str) -> str:
    """Return the dotted module of a path in an archive, such as `email.message`."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    while parts and (parts[0] in ("src", "lib", "python", "purelib", "platlib") or parts[0].endswith(".data")):
        parts = parts[1:]
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def take(archive: Path, to: Path) -> Package:
    """Write the functions of an archive into the file `to`, as lines of JSON, and return the package with its licence. If
    the file exists, it is not written again.
    """
    note = to.with_suffix(".licence.json")
    if note.exists():
        return Package(**json.loads(note.read_text(encoding="utf-8")))
    package = Package(archive.name, "", "")
    documented: list[Function] = []
    named: list[Function] = []
    for path, content in members(archive):
        if not path.endswith(".py"):
            package = metadata(content) if path.count("/") <= 1 else package
            continue
        for function in functions(content.decode("utf-8", errors="replace"), module_of(path)):
            if function.queries and function.lines >= DOCUMENTED:
                documented.append(function)
            elif not function.queries and function.lines >= NAMED and _telling(function.name):
                named.append(function)
    kept = _some(documented, MOST_DOCUMENTED) + _some(named, MOST_NAMED)
    to.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(to, "wt", encoding="utf-8", compresslevel=3) as file:
        file.writelines(json.dumps(asdict(function)) + "\n" for function in kept)
    note.write_text(json.dumps(asdict(package)), encoding="utf-8")
    return package


def _telling(name: str) -> bool:
    return len(words_of(name)) >= NAME_WORDS and not name.startswith(("test", "__"))


def _some(found: list[Function], most: int) -> list[Function]:
    """Return at most `most` of the functions `found`, in their order. A hash of each function decides which."""
    if len(found) <= most:
        return found
    hashes = [hashlib.sha1(function.text.encode()).digest() for function in found]
    limit = sorted(hashes)[most - 1]
    return [function for function, value in zip(found, hashes, strict=True) if value <= limit]


def read(path: Path) -> Iterator[Function]:
    """Yield the functions in a file that `take` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            content = json.loads(line)
            yield Function(**content | {"queries": tuple(content["queries"])})
