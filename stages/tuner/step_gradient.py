"""The gradient of one optimizer step, summed over its micro-batches, and the values of its samples by table column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from stages.tuner.blockwise.backprop import Values, main_losses
from stages.tuner.blockwise.chain import Arrays
from stages.tuner.blockwise.device import dispatch
from stages.tuner.task import Term

Found = tuple[mx.array, Sequence[bool] | None, Sequence[str] | None]  # values, which samples have them, texts that they index


@dataclass
class StepGradient:
    """All arrays are lazy."""

    grads: Arrays = field(default_factory=dict)  # summed over the micro-batches
    terms: list[dict[str, Found]] = field(default_factory=list)  # per micro-batch, by column
    largest_tokens: int = 0

    @property
    def losses(self) -> mx.array:
        return mx.concatenate([terms["loss"][0] for terms in self.terms])

    def values(self, column: str) -> list[Any]:
        found: list[Any] = []
        for terms in self.terms:
            count = terms["loss"][0].size
            found += plain_values(*terms[column]) if column in terms else [None] * count
        return found

    def note(self, term: Term, found: mx.array | Values) -> None:
        names = term.names or {}
        self.terms[-1][term.column] = main_losses(found), term.applies, None
        if isinstance(found, dict):
            more = {column: (value, term.applies, names.get(column)) for column, value in found.items() if column != "loss"}
            self.terms[-1].update(more)

    def add(self, grads: Arrays, share: float) -> None:
        """Add `share` times the gradients of a term. Consumes `grads`. `share`: the micro-batch's part of the step's samples."""
        if share < 1 or self.grads:
            # In place, array by array: a third copy of the gradient would raise the peak of memory.
            for name in grads:
                part = share * grads[name].astype(mx.float32)
                grads[name] = part + self.grads.pop(name) if name in self.grads else part
            dispatch(grads)  # else the gradient of every micro-batch would wait for the last one
        self.grads = grads


def plain_values(values: mx.array, applies: Sequence[bool] | None, texts: Sequence[str] | None) -> list[Any]:
    """One Python value per sample; a negative index into `texts` is None."""
    each: Any = values.tolist()
    if texts is not None:
        each = [texts[n] if n >= 0 else None for n in each]
    return each if applies is None else [v if a else None for v, a in zip(each, applies, strict=True)]
