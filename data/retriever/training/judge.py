"""Rank all documents for every query, and count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from data.retriever.training import maxsim
from data.retriever.training.batches import Texts
from data.retriever.training.model import buckets


@torch.no_grad()
def judge(encoder: nn.Module, texts: Texts, lengths: tuple[int, int], kept: tuple[bool, ...] = (True,) * 4) -> dict[str, float]:
    """Return P@1, MRR@10 and R@10 of each function's first query among all functions; equal scores count against the function."""
    device = texts.tokens.device
    rows = torch.arange(len(texts), device=device)
    parts = torch.tensor(kept, device=device).expand(len(rows), 4)
    queries = texts.queries(rows, torch.zeros_like(rows), lengths[0])
    documents = texts.documents(rows, parts, lengths[1])
    vectors = encode(encoder, *queries)
    found = maxsim.scores(vectors, queries[1], [(encode(encoder, *documents), documents[1])])
    own = found.diagonal()[:, None]
    rank = (found >= own).sum(1).float()
    return {
        "p1": round(float((rank <= 1).float().mean()), 4),
        "mrr10": round(float(torch.where(rank <= 10, 1 / rank, 0.0).mean()), 4),
        "r10": round(float((rank <= 10).float().mean()), 4),
        "queries": len(rows),
    }


def encode(encoder: nn.Module, ids: Tensor, seen: Tensor, size: int = 256) -> Tensor:
    """Return the vectors of texts, `size` at a time, in float32."""
    table = buckets(ids.shape[1], encoder.sizes).to(ids.device)
    return torch.cat([encoder(i, s, table).float() for i, s in zip(ids.split(size), seen.split(size), strict=True)])
