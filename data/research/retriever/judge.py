"""Evaluate an encoder: rank all documents for every query, and count how often the right one is near the top.

Run as a module, it ranks with BM25, to compare with: `python -m data.research.retriever.judge --data work/carry`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.research.retriever import maxsim
from data.research.retriever.batches import END, Texts, load
from data.research.retriever.model import buckets

K1, B = 1.2, 0.75  # the constants of BM25


@torch.no_grad()
def judge(encoder: nn.Module, texts: Texts, lengths: tuple[int, int], kept: tuple[bool, ...] = (True,) * 4) -> dict[str, float]:
    """Return P@1, MRR@10 and R@10 of an encoder: each function's first query is ranked against all functions. `lengths` is
    the longest (query, document) in tokens. `kept` says which of the four parts of a document are encoded. Documents with
    an equal score rank before the right one.
    """
    device = texts.tokens.device
    rows = torch.arange(len(texts), device=device)
    parts = torch.tensor(kept, device=device).expand(len(rows), 4)
    queries = texts.queries(rows, torch.zeros_like(rows), lengths[0])
    documents = texts.documents(rows, parts, lengths[1])
    vectors = encode(encoder, *queries)
    found = maxsim.scores(vectors, queries[1], [(encode(encoder, *documents), documents[1])])
    return counted(found)


def counted(scores: Tensor) -> dict[str, float]:
    """Return P@1, MRR@10 and R@10 of a square matrix of scores, one row per query. The scores of the right documents are on
    the diagonal.
    """
    rank = (scores >= scores.diagonal()[:, None]).sum(1).float()
    return {
        "p1": round(float((rank <= 1).float().mean()), 4),
        "mrr10": round(float(torch.where(rank <= 10, 1 / rank, 0.0).mean()), 4),
        "r10": round(float((rank <= 10).float().mean()), 4),
        "queries": len(rank),
    }


def encode(encoder: nn.Module, ids: Tensor, seen: Tensor, size: int = 256) -> Tensor:
    """Return the token vectors of texts, in float32. `ids` are token ids, and `seen` is False for padding. `size` texts are
    encoded at a time.
    """
    table = buckets(ids.shape[1], encoder.sizes).to(ids.device)
    return torch.cat([encoder(i, s, table).float() for i, s in zip(ids.split(size), seen.split(size), strict=True)])


def lexical(texts: Texts, pieces: int) -> dict[str, float]:
    """Return P@1, MRR@10 and R@10 of BM25 on the first query of each text. Words are tokens. `pieces` is the size of the
    vocabulary.
    """
    tokens, lengths = texts.tokens.numpy(), texts.parts.sum(1).numpy()
    counts = np.zeros((pieces, len(texts)), np.float32)
    for n, (start, length) in enumerate(zip(texts.starts.tolist(), lengths, strict=True)):
        counts[:, n] = np.bincount(tokens[start : start + length], minlength=pieces)
    known = (counts > 0).sum(1, keepdims=True)
    rarity = np.log(1 + (len(texts) - known + 0.5) / (known + 0.5))
    weights = rarity * counts * (K1 + 1) / (counts + K1 * (1 - B + B * lengths / lengths.mean()))
    starts, ends = texts.query_start[texts.firsts], texts.query_length[texts.firsts]
    asked = [tokens[start : start + length] for start, length in zip(starts.tolist(), ends.tolist(), strict=True)]
    return counted(torch.from_numpy(np.stack([weights[ids[ids != END]].sum(0) for ids in asked])))


def main(argv: list[str] | None = None) -> None:
    """Print the results of BM25 on both libraries that the training has not seen. `argv` is the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that the corpus script wrote")
    folder = parser.parse_args(argv).data
    vocabulary = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
    arrays = load(folder / "corpus.npz.xz")
    for kind in ("standard", "aside"):
        texts = Texts.join(arrays, (kind,), torch.device("cpu"))
        line = json.dumps({"about": kind, "ranked by": "BM25", **lexical(texts, max(vocabulary.values()) + 1)})
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
