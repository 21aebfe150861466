"""Batches from the packed corpus, assembled on the GPU.

In names: S samples, L tokens. The four parts of a document are module, owner, name and rest.
"""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

END = 1  # the token </s>
NAME = 2  # the number of the part that is a function's name
RUN = 16  # neighbours in a file that come together: they are each other's hard negatives
LEFT_OUT = (0.25, 0.15, 0.1, 0.0)  # shares of documents without module, owner, name, rest
FIRST = 0.7  # share of the docstrings whose first sentence is the query, among those with more
AS_NAME = 0.08  # share of the documented functions whose name is the query
UNSEEN = 0.05  # share of the tokens that are hidden from the encoder


@dataclass
class Texts:
    """Documents and their queries, with all tokens in one tensor. A document is a function in four parts. `starts` has the
    place of each document in `tokens`, and `parts` the lengths of its parts. `counts` has the number of its queries, and
    `firsts` the row of its first query. `query_start` and `query_length` say where each query lies in `tokens`.
    """

    tokens: Tensor
    starts: Tensor  # of each document in tokens
    parts: Tensor
    counts: Tensor  # number of queries
    firsts: Tensor  # the row of the first query
    query_start: Tensor
    query_length: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def join(cls, arrays: dict[str, np.ndarray], kinds: tuple[str, ...], device: torch.device) -> Texts:
        """Return the documents of several kinds, one kind after another. `arrays` are those of corpus.npz.xz. `kinds` are
        beginnings of their names, such as "documented". The tensors are on `device`.
        """

        def column(name: str) -> np.ndarray:
            return np.concatenate([arrays[f"{kind}_{name}"] for kind in kinds]).astype(np.int64)

        documents, parts, counts, lengths = column("documents"), column("parts"), column("query_counts"), column("query_lengths")
        whole = parts.sum(1)
        made = (
            np.concatenate([documents, column("queries"), [0]]),
            whole.cumsum() - whole,
            parts,
            counts,
            counts.cumsum() - counts,
            np.concatenate([len(documents) + lengths.cumsum() - lengths, [0]]),
            np.concatenate([lengths, [0]]),
        )
        return cls(*(torch.from_numpy(a).to(device) for a in made))

    def documents(self, rows_S: Tensor, kept_S4: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, mask) of some documents, both [S, L]. `rows_S` are indices of documents. `kept_S4` says which of
        the four parts are kept. Each document ends with the end token, and is cut to `length` tokens.
        """
        parts = self.parts[rows_S]
        starts = self.starts[rows_S, None] + parts.cumsum(1) - parts
        kept = parts * kept_S4
        ends = kept.cumsum(1)
        place_L = torch.arange(length, device=rows_S.device)
        part_SL = (place_L[None, :, None] >= ends[:, None, :]).sum(-1).clamp(max=3)
        source = starts.gather(1, part_SL) + place_L - (ends - kept).gather(1, part_SL)
        return self._ended(source, ends[:, 3], length)

    def queries(self, rows_S: Tensor, which_S: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, mask) of one query per document, both [S, L]. `rows_S` are indices of documents. `which_S` is the
        number of the query, or -1 for the function's name. Each query is cut to `length` tokens.
        """
        parts = self.parts[rows_S]
        named = which_S < 0
        row = torch.where(named, 0, self.firsts[rows_S] + which_S)
        start = torch.where(named, self.starts[rows_S] + parts[:, :NAME].sum(1), self.query_start[row])
        whole = torch.where(named, parts[:, NAME], self.query_length[row])
        return self._ended(start[:, None] + torch.arange(length, device=rows_S.device), whole, length)

    def _ended(self, source_SL: Tensor, whole_S: Tensor, length: int) -> tuple[Tensor, Tensor]:
        place_L = torch.arange(length, device=source_SL.device)
        end_S1 = whole_S.clamp(max=length - 1)[:, None]
        ids = self.tokens[source_SL.clamp(0, len(self.tokens) - 1)]
        ids = torch.where(place_L < end_S1, ids, 0)
        return torch.where(place_L == end_S1, END, ids), place_L <= end_S1


@dataclass
class Batch:
    """One batch. `queries` is (tokens, mask). `documents` is a list of (tokens, mask), grouped by length. `same` is True
    for pairs of a query and another row's document that must not count as negatives.
    """

    queries: tuple[Tensor, Tensor]
    documents: list[tuple[Tensor, Tensor]]
    same: Tensor


class Batches:
    """Draws training batches of three kinds of functions: documented functions that are neighbours in the corpus,
    documented functions at random, and functions that are only named.
    """

    def __init__(self, texts: Texts, documented: int, size: int, lengths: tuple[int, int], groups: int, seed: int) -> None:
        """Prepare batches of `size` texts. The first `documented` of `texts` have docstrings. `lengths` is the longest
        (query, document) in tokens. The documents of a batch are divided into `groups` groups by length.
        """
        self.texts, self.documented, self.size = texts, documented, size
        self.query, self.document = lengths
        self.random = torch.Generator(texts.tokens.device).manual_seed(seed)
        others = len(texts) - documented
        self.named = size // 4 if others >= size // 4 else 0
        self.runs = (size - self.named) // 2 // RUN
        self.order = torch.empty(0, dtype=torch.int64, device=texts.tokens.device)
        self.groups = groups
        self.caps = [self.document] * groups
        self.caps = self._caps()

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.random, device=self.texts.tokens.device)

    def rows(self) -> Tensor:
        """Return the indices of the texts of the next batch. The documented texts that are drawn at random are all used
        once before one is used again. This does not hold for neighbours.
        """
        device = self.texts.tokens.device
        start = (self._uniform(self.runs) * (self.documented - RUN)).long()
        runs = (start[:, None] + torch.arange(RUN, device=device)).flatten()
        named = self.documented + (self._uniform(self.named) * (len(self.texts) - self.documented)).long()
        rest = self.size - len(runs) - len(named)
        while len(self.order) < rest:
            fresh = torch.randperm(self.documented, generator=self.random, device=device)
            self.order = torch.cat([self.order, fresh])
        drawn, self.order = self.order[:rest], self.order[rest:]
        return torch.cat([drawn, runs, named])

    def _choice(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows, queries, kept) of the next batch, the shortest document first. `rows` are indices of texts.
        `queries` are the numbers of their queries, or -1 for the name. `kept` says which parts of each document are kept.
        """
        rows = self.rows()
        S = len(rows)
        count = self.texts.counts[rows]
        other = 1 + (self._uniform(S) * (count - 1)).long()
        which = torch.where((self._uniform(S) < FIRST) | (count <= 1), 0, other)
        long_name = self.texts.parts[rows, NAME] >= 2
        which = torch.where((count == 0) | (long_name & (self._uniform(S) < AS_NAME)), -1, which)
        kept = self._uniform(S, 4) >= torch.tensor(LEFT_OUT, device=rows.device)
        kept[:, NAME] &= which >= 0
        order = (self.texts.parts[rows] * kept).sum(1).argsort()
        return rows[order], which[order], kept[order]

    def _caps(self) -> list[int]:
        """Return the longest document of each group, in tokens. Nine of ten batches fit into these lengths, which are
        multiples of 16. The last group has the full length.
        """
        found = []
        for _ in range(32):
            rows, _, kept = self._choice()
            whole = (self.texts.parts[rows] * kept).sum(1) + 1
            found.append(whole.view(self.groups, -1).amax(1))
        caps = torch.stack(found).float().quantile(0.9, dim=0)
        return [min(self.document, -(-int(cap) // 16) * 16) for cap in caps[:-1]] + [self.document]

    def draw(self) -> Batch:
        """Return the next batch."""
        rows, which, kept = self._choice()
        queries = self.texts.queries(rows, which, self.query)
        weights = torch.arange(1, self.query + 1, device=rows.device) * 0x9E3779B1 % 0x7FFFFFFF
        key = (queries[0] * weights).sum(1)
        same = (rows[:, None] == rows) | (key[:, None] == key)
        documents = []
        for part, cap in zip(torch.arange(len(rows), device=rows.device).view(self.groups, -1), self.caps, strict=True):
            documents.append(self._hide(self.texts.documents(rows[part], kept[part], cap)))
        return Batch(self._hide(queries), documents, same.fill_diagonal_(False))

    def _hide(self, text: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, seen = text
        return ids, seen & ((self._uniform(*ids.shape) >= UNSEEN) | (ids == END))


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of corpus.npz.xz."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as found:
        return dict(found)
