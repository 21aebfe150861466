"""Source code to search in, of the packages that are installed here, and its vectors: of the encoder, or made up."""

from __future__ import annotations

import shutil
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stages.bundled import CHECKOUT, RETRIEVER
from stages.retrieval import texts
from stages.retrieval.encoder import TextTokenizer, load_encoder
from stages.retrieval.families import FAMILIES
from stages.retrieval.search import codes, maxsim, ranking
from stages.retrieval.sources import Root, SourcesConfig, examine, scan
from stages.retrieval.tokens import TokensConfig
from stages.retrieval.units.stage import UnitsConfig, unit_rows

Row = dict[str, Any]
FUNCTIONS = ("function", "method")
BATCH, AT_ONCE = 64, 4096  # texts that are encoded together; sorted by length among so many


def installed(count: int) -> Iterator[tuple[Path, list[Row]]]:
    """(file below the folder of packages, its rows of `units`) in the order of paths, until there are `count` functions."""
    folder, config = Path(sysconfig.get_path("purelib")), UnitsConfig(min_lines=1)
    run: Any = SimpleNamespace(root=folder, config=config)
    found = 0
    for row in scan(Root("packages", folder, str(folder), own_rules=False)):
        source = examine(Path(row["file"]), row, SourcesConfig(languages=("python",)))
        if source["skipped"] is None:
            units = unit_rows(run, source)
            yield Path(row["file"]).relative_to(folder), units
            found += sum(unit["kind"] in FUNCTIONS for unit in units)
            if found >= count:
                return


def copy_installed(folder: Path, count: int) -> None:
    """Makes a folder of code with `count` functions."""
    packages = Path(sysconfig.get_path("purelib"))
    for file, _ in installed(count):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(packages / file, target)


@contextmanager
def made_up() -> Iterator[None]:
    """Within the block the stage `vectors` makes vectors up, of the encoder's count and width: they cost no hours."""
    from stages.retrieval import encoder

    draws = np.random.default_rng(0)
    by_id, by_place = draws.normal(size=(2**14, 128)), 0.3 * draws.normal(size=(2**10, 128))

    @contextmanager
    def random_encoder(run: Any, tokens: Any, adapter: Any, **how: Any) -> Iterator[Callable[[str, texts.Role], np.ndarray]]:
        def encode(text_id: str, role: texts.Role) -> np.ndarray:
            ids = tokens.read(text_id)
            vectors = by_id[ids] + by_place[: len(ids)]
            return maxsim.unit(vectors + 1.5 * vectors.mean(axis=0)).astype(np.float32)

        yield encode

    real, encoder.text_encoder = encoder.text_encoder, random_encoder
    try:
        yield
    finally:
        encoder.text_encoder = real


class Encoded:
    """Units of installed packages and their vectors in memory, without tables: for a machine that has no Lance."""

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self.units = [unit for _, units in installed(count) for unit in units]
        say(f"{len(self.units)} units of installed packages")
        folder, family = CHECKOUT / RETRIEVER, FAMILIES["retriever-micro"]
        tokenizer, self.encoder = TextTokenizer(folder, lower_case=family.lower_case), load_encoder(folder, folder, family)
        longest = TokensConfig().document_tokens
        ids = [tokenizer.cut(each, longest) for each in tokenizer.encode([unit["text"] for unit in self.units])]
        self.packed: list[np.ndarray] = [np.zeros(0, np.uint8)] * len(ids)
        for start in range(0, len(ids), AT_ONCE):
            order = sorted(range(start, min(start + AT_ONCE, len(ids))), key=lambda place: len(ids[place]))
            for first in range(0, len(order), BATCH):
                some = order[first : first + BATCH]
                vectors = self.encoder.encode_ids([np.array(ids[place], np.int32) for place in some])
                for place, each in zip(some, vectors, strict=True):
                    self.packed[place] = codes.pack(each)
            say(f"{min(start + AT_ONCE, len(ids))} encoded")
        pooled = np.array([maxsim.pool(codes.unpack(each)) for each in self.packed], np.float16)
        self.matrix = maxsim.PooledMatrix(pooled, self.read)

    def read(self, places: Sequence[int]) -> maxsim.TokenMatrix:
        some = [self.packed[place] for place in places]
        return maxsim.TokenMatrix(np.concatenate(some), [len(each) for each in some], codes.unpack)

    def words(self, queries: Sequence[str]) -> np.ndarray:
        """BM25 (queries, units), as Lance's index of words, but for its stemmer."""
        asked = [{*map(ranking.stem, texts.words(query))} for query in queries]
        known = set().union(*asked)
        held: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = np.zeros(len(self.units))
        for place, unit in enumerate(self.units):
            own = [ranking.stem(word) for word in f"{unit['words']} {unit['docstring_words']}".split()]
            lengths[place] = len(own)
            for word, times in Counter(own).items():
                if word in known:
                    held[word].append((place, times))
        scores = np.zeros((len(queries), len(self.units)), np.float32)
        for query, words in enumerate(asked):
            for word in words & held.keys():
                places, times = np.array(held[word]).T
                rarity = np.log(1 + (len(self.units) - len(places) + 0.5) / (len(places) + 0.5))
                scores[query, places] += rarity * 2.2 * times / (times + 1.2 * (0.25 + 0.75 * lengths[places] / lengths.mean()))
        return scores
