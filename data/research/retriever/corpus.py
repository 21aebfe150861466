"""Make the training data: download packages, and write their functions as one file of tokens, with the tokenizer and
LICENSES.md.

    python -m data.research.retriever.corpus --work WORK --out CARRY

Downloads the packages in packages.txt. Packages that are not under a permissive licence are left out. So are equal bodies
and equal queries. A function is also left out if more than 30 % of its 8-token shingles occur in the standard library or in
`ASIDE`, a library that is kept to evaluate a LoRA, and so are queries that occur in those two. Needs the Python whose
standard library is the evaluation (3.11).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import logging
import lzma
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data import ASSETS
from data.research.retriever import packages, tokenizer
from data.research.retriever.extract import Function, functions

LOG = logging.getLogger("retriever")
ASIDE = "sympy"
PIECES = 8192
DOCUMENT, QUERY = 256, 32  # most tokens of a document and of a query that are evaluated
TRAINED, NAMED = 208, 128  # most tokens of a document in the training, and of one known by its name only
LINES_JUDGED = 5  # least lines of code of a function that is evaluated
SHINGLE, SHARED = 8, 0.3
LEARNED_FROM = 60_000  # documents the tokenizer is learned from
LICENSES = ASSETS / "retriever" / "LICENSES.md"
NOT_STANDARD = {"test", "tests", "idle_test", "lib2to3", "turtledemo", "site-packages", "__pycache__"}


@dataclass
class Pairs:
    """A list of functions without duplicates. `packages` has the package of each function. `bodies` and `queries` hold what
    was added before; a function with an equal body or query is not added.
    """

    functions: list[Function] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)  # of each function
    bodies: set[bytes] = field(default_factory=set)
    queries: set[str] = field(default_factory=set)

    def add(self, function: Function, package: str) -> None:
        """Add a function of `package`. Nothing happens if a function with the same body or first query was added before."""
        body = hashlib.sha1(re.sub(r"[\W_]+", " ", function.rest).lower().encode()).digest()
        query = same(function.queries[0]) if function.queries else ""
        if body in self.bodies or query in self.queries:
            return
        self.bodies.add(body)
        if query:
            self.queries.add(query)
        self.functions.append(function)
        self.packages.append(package)


def same(query: str) -> str:
    """Return a query in the form in which queries are compared: only letters and digits, in lower case."""
    return " ".join(re.sub(r"[\W_]+", " ", query).lower().split())


def standard_library() -> Iterator[Function]:
    """Yield the functions of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if not NOT_STANDARD & set(place.parts):
            yield from functions(path.read_text(encoding="utf-8", errors="replace"), packages.module_of(place.as_posix()))


def judged(found: Iterable[Function]) -> Pairs:
    """Return the functions of `found` that an evaluation uses, each with its first query only."""
    pairs = Pairs()
    for function in found:
        if function.queries and function.lines >= LINES_JUDGED:
            pairs.add(function, "")
    return pairs


class Encoder:
    """Turns functions into token numbers, part by part."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without the end token."""
        return [found.ids for found in self.pieces.encode_batch_fast(texts, add_special_tokens=False)]

    def pack(self, pairs: Pairs, most: int = DOCUMENT) -> dict[str, np.ndarray]:
        """Return the functions of `pairs` as packed arrays, by name. A document has at most `most` tokens, in four parts:
        module, owner, name and rest. "documents" and "queries" hold all tokens. "parts" has the length of each part.
        "query_counts" and "query_lengths" say which queries belong to a document.
        """
        chosen = pairs.functions
        documents: list[int] = []
        parts = np.zeros((len(chosen), 4), np.uint16)
        queries: list[int] = []
        lengths: list[int] = []
        counts = np.zeros(len(chosen), np.uint8)
        for first in range(0, len(chosen), 2000):
            block = chosen[first : first + 2000]
            columns = [self.ids([str(getattr(f, part)) for f in block]) for part in ("module", "owner", "name", "rest")]
            asked = iter(self.ids([query for f in block for query in f.queries]))
            for n, function in enumerate(block):
                left = most - 1  # the end token
                for column, ids in enumerate(columns):
                    kept = ids[n][:left]
                    left -= len(kept)
                    documents += kept
                    parts[first + n, column] = len(kept)
                counts[first + n] = len(function.queries)
                for _ in function.queries:
                    query = next(asked)[: QUERY - 1]
                    queries += query
                    lengths.append(len(query))
        return {
            "documents": np.array(documents, np.uint16),
            "parts": parts,
            "queries": np.array(queries, np.uint16),
            "query_lengths": np.array(lengths, np.uint8),
            "query_counts": counts,
        }


def select(packed: dict[str, np.ndarray], kept: np.ndarray) -> dict[str, np.ndarray]:
    """Return the packed arrays of some documents. `packed` holds the arrays of all documents, as `Encoder.pack` returns
    them. `kept` is True for the documents to keep.
    """
    asked = np.repeat(kept, packed["query_counts"])
    return {
        "documents": packed["documents"][np.repeat(kept, packed["parts"].astype(np.int64).sum(1))],
        "parts": packed["parts"][kept],
        "queries": packed["queries"][np.repeat(asked, packed["query_lengths"])],
        "query_lengths": packed["query_lengths"][asked],
        "query_counts": packed["query_counts"][kept],
    }


def shingles(packed: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes, documents): the hash of every run of `SHINGLE` tokens, and the index of the document that it is from.
    Only the last part of each document, its code, is used. `packed` holds the packed arrays.
    """
    ends = packed["parts"].astype(np.int64).sum(1).cumsum()
    length = packed["parts"][:, 3].astype(np.int64)
    tokens = packed["documents"].astype(np.uint64)
    hashes = np.zeros(max(len(tokens) - SHINGLE + 1, 0), np.uint64)
    for n in range(SHINGLE):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[n : n + len(hashes)] + np.uint64(1)
    runs = np.maximum(length - SHINGLE + 1, 0)
    owners = np.repeat(np.arange(len(runs)), runs)
    within = np.arange(len(owners)) - np.repeat(runs.cumsum() - runs, runs)
    return hashes[np.repeat(ends - length, runs) + within], owners


def copies(packed: dict[str, np.ndarray], known: np.ndarray) -> np.ndarray:
    """Return a boolean array: True for documents that are mostly copied. They share more than the fraction `SHARED` of
    their shingles with `known`, a sorted array of hashes. `packed` holds the packed arrays.
    """
    hashes, owners = shingles(packed)
    place = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    documents = len(packed["parts"])
    shared = np.bincount(owners, weights=known[place] == hashes, minlength=documents)
    return shared > SHARED * np.maximum(np.bincount(owners, minlength=documents), 1)


def gather(work: Path, barred: set[str]) -> tuple[Pairs, Pairs, list[packages.Package]]:
    """Return the functions of all permissive packages: those with docstrings, those without, and the packages. `work` is
    the folder for downloads. Functions whose query is in `barred` are left out.
    """
    documented, named, used = Pairs(queries=set(barred)), Pairs(), []
    for line in packages.listed():
        name = line[0].partition("==")[0]
        if name == ASIDE:
            continue
        archive = packages.download(line, work / "dl")
        taken = work / "functions" / f"{name}.jsonl.gz"
        package = packages.take(archive, taken)
        if not package.permissive:
            LOG.info("%s is left out: its licence is %s", name, package.licence or "not stated")
            continue
        before = len(documented.functions)
        for function in packages.read(taken):
            (documented if function.queries else named).add(function, name)
        used.append(package)
        LOG.info("%s %s: %d pairs", package.name, package.version, len(documented.functions) - before)
    return documented, named, used


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as an npz file, compressed by LZMA."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 26}]
    path.write_bytes(lzma.compress(buffer.getbuffer(), filters=filters))


def licenses(used: list[packages.Package], counts: dict[str, int], names: dict[str, int], date: str) -> str:
    """Return the text of LICENSES.md. `used` are the packages. `counts` and `names` map a package to its number of
    documented functions and of functions without a docstring. `date` is the day of the download.
    """
    rows = [
        f"| `{p.name}` {p.version} | {p.licence} | {counts.get(key, 0):,} | {names.get(key, 0):,} |"
        for p in sorted(used, key=lambda p: p.name.lower())
        if counts.get(key := _key(p.name), 0) + names.get(key, 0)
    ]
    return "\n".join(
        [
            "# Licences of what retriever-micro was trained on",
            "",
            "No code and no docstring of these packages is in this folder, only weights that were trained on them. They were",
            f"fetched from the Python Package Index on {date}. The licence is what the metadata of the package states. A package",
            "was left out if that is no permissive licence. The tokenizer was learned from the same texts.",
            "",
            "| package | licence | pairs of docstring and code | functions by name |",
            "|---|---|---:|---:|",
            *rows,
            "",
            "The training scripts are part of this project (Apache-2.0).",
            "",
        ]
    )


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: list[str] | None = None) -> None:
    """Make the packed file and the tokenizer in `--out`, and write LICENSES.md."""
    parser = argparse.ArgumentParser(description="Make the training data of retriever-micro.")
    parser.add_argument("--work", type=Path, required=True, help="folder of downloads and of what was taken from them")
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus.npz.xz and the tokenizer")
    parser.add_argument("--named", type=int, default=40_000, help="most functions known by their name only")
    parser.add_argument("--date", default="2026-11-22", help="day of the download, for LICENSES.md")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)

    standard = list(standard_library())
    line = next(line for line in packages.listed() if line[0].startswith(ASIDE + "=="))
    taken = args.work / "functions" / f"{ASIDE}.jsonl.gz"
    packages.take(packages.download(line, args.work / "dl"), taken)
    aside = list(packages.read(taken))
    tests = {"standard": judged(standard), "aside": judged(aside)}
    barred = set().union(*(pairs.queries for pairs in tests.values()))
    documented, named, used = gather(args.work, barred)
    LOG.info("%d documented, %d by name", len(documented.functions), len(named.functions))

    step = max(1, len(documented.functions) // LEARNED_FROM)
    texts = (text for f in documented.functions[::step] for text in (f.text, *f.queries[:1]))
    pieces = tokenizer.train(texts, PIECES)
    tokenizer.write(pieces, args.out)
    encoder = Encoder(pieces)

    everything = Pairs([*standard, *aside])
    known = np.unique(shingles(encoder.pack(everything))[0])
    arrays = {f"{name}_{key}": a for name, pairs in tests.items() for key, a in encoder.pack(pairs).items()}
    taken_from: dict[str, dict[str, int]] = {}
    for kind, pairs, most in (("documented", documented, TRAINED), ("named", named, NAMED)):
        packed = encoder.pack(pairs, most)
        copied = copies(packed, known)
        kept = ~copied
        LOG.info("%s: %d near-copies of the standard library or %s removed", kind, int(copied.sum()), ASIDE)
        if kind == "named":
            kept[np.random.default_rng(0).permutation(np.flatnonzero(kept))[args.named :]] = False
        arrays |= {f"{kind}_{key}": a for key, a in select(packed, kept).items()}
        taken_from[kind] = _counts([pairs.packages[n] for n in np.flatnonzero(kept)])
    save(args.out / "corpus.npz.xz", arrays)
    LICENSES.write_text(licenses(used, taken_from["documented"], taken_from["named"], args.date), encoding="utf-8")
    sizes: dict[str, Any] = {name: len(a) for name, a in arrays.items() if name.endswith(("parts", "documents"))}
    LOG.info("%s: %d bytes; %s", args.out / "corpus.npz.xz", (args.out / "corpus.npz.xz").stat().st_size, sizes)


def _counts(names: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[_key(name)] = found.get(_key(name), 0) + 1
    return found


if __name__ == "__main__":
    main()
