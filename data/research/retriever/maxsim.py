"""MaxSim between all queries and all documents of a large batch, with its gradient, in little memory.

The similarities of all tokens with all tokens (1024 x 32 of the queries, 1024 x 150 of the documents) are computed in pieces, and
only the place of each maximum is kept. In names: B queries of Q tokens, N documents of K tokens, E values of a vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PIECE = 1 << 30  # most similarities at once
PADDING = -100.0  # below every similarity of unit vectors


class _Maxima(torch.autograd.Function):
    """The largest similarity of each query token in each document, as a PyTorch function. Query tokens [R, E] and document
    tokens [N, K, E] give [R, N].
    """

    @staticmethod
    def forward(context: Any, query_RE: Tensor, document_NKE: Tensor, seen_NK: Tensor) -> Tensor:
        N, K, E = document_NKE.shape
        # One more value a vector: 1 in the query, PADDING or 0 in the document. The multiplication then masks the padding.
        masked = torch.where(seen_NK, 0.0, PADDING)[..., None].to(document_NKE.dtype)
        width = -(-(E + 1) // 8) * 8 - E
        documents = torch.cat([document_NKE, functional.pad(masked, (0, width - 1))], -1).reshape(N * K, -1)
        ones = torch.ones_like(query_RE[:, :1])
        queries = torch.cat([query_RE, functional.pad(ones, (0, width - 1))], -1)
        rows = max(1, PIECE // (N * K))
        values, places = [], []
        for first in range(0, len(queries), rows):
            value, place = (queries[first : first + rows] @ documents.T).view(-1, N, K).max(-1)
            values.append(value)
            places.append(place.to(torch.int16))
        context.save_for_backward(query_RE, document_NKE, torch.cat(places))
        context.rows = rows
        return torch.cat(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        query_RE, document_NKE, places_RN = context.saved_tensors
        N, K, E = document_NKE.shape
        flat = document_NKE.reshape(N * K, E)
        gradient_RN = gradients[0].to(query_RE.dtype)
        to_query = torch.empty_like(query_RE)
        to_document = torch.zeros(N * K, E, dtype=torch.float32, device=flat.device)
        for first in range(0, len(query_RE), context.rows):
            part = slice(first, first + context.rows)
            spread = torch.zeros(len(places_RN[part]), N, K, dtype=query_RE.dtype, device=flat.device)
            spread.scatter_(2, places_RN[part].long()[..., None], gradient_RN[part][..., None])
            spread = spread.view(-1, N * K)
            to_query[part] = spread @ flat
            to_document += (spread.T @ query_RE[part]).float()
        return to_query, to_document.view(N, K, E).to(document_NKE.dtype), None


def scores(query_BQE: Tensor, seen_BQ: Tensor, documents: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the MaxSim score of every query with every document, [B, all N]. The score is the mean, over the query's
    tokens, of the largest similarity in the document. `query_BQE` holds vectors of queries, and `seen_BQ` is False for
    padding. `documents` is a list of (vectors, mask).
    """
    B, Q, E = query_BQE.shape
    flat = query_BQE.reshape(B * Q, E)
    found = [_Maxima.apply(flat, vectors, seen).float().view(B, Q, -1) for vectors, seen in documents]
    kept = seen_BQ.float()[..., None]
    return (torch.cat(found, -1) * kept).sum(1) / kept.sum(1)
