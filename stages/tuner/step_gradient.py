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
    """The gradient of one optimizer step, with the losses of its samples. `grads` maps the name of an adapter array to
    its gradient, summed over the micro-batches (samples computed at once). `terms` holds one dict per micro-batch, with
    the losses and other values by table column. All arrays are lazy: not evaluated yet.

    A dict in `terms` maps a table column to a tuple (values, flags, texts). `values` holds one number per sample.
    `flags` says which samples have a value, or is None if all have one. If `texts` is not None, a value is an index
    into it: for `texts` = ["easy", "hard"], the value 1 means "hard".
    """

    grads: Arrays = field(default_factory=dict)
    terms: list[dict[str, Found]] = field(default_factory=list)  # per micro-batch, by column
    largest_tokens: int = 0

    @property
    def losses(self) -> mx.array:
        """The main losses of one optimizer step as one array, one value per sample. The samples are in the order in
        which the step computed them. Values of further loss terms are left out.
        """
        return mx.concatenate([terms["loss"][0] for terms in self.terms])

    def values(self, column: str) -> list[Any]:
        """Return the values that the table column `column` gets: one per sample, in the order in which the step computed the
        samples. A value is None if the loss of the sample has no term for this column.
        """
        found: list[Any] = []
        for terms in self.terms:
            count = terms["loss"][0].size
            found += plain_values(*terms[column]) if column in terms else [None] * count
        return found

    def note(self, term: Term, found: mx.array | Values) -> None:
        """Record the result of one loss term for the last micro-batch (samples computed at once). `found` is the result
        of `term.loss`. It is an array of losses, one per sample, or a dict with the key "loss". Other values of the
        dict are recorded under their own names.
        """
        names = term.names or {}
        self.terms[-1][term.column] = main_losses(found), term.applies, None
        if isinstance(found, dict):
            more = {column: (value, term.applies, names.get(column)) for column, value in found.items() if column != "loss"}
            self.terms[-1].update(more)

    def add(self, grads: Arrays, share: float) -> None:
        """Add `share` times the gradients `grads` of one loss term to the sum. The dict `grads` is consumed and must not be
        used afterwards. `share` is the micro-batch's share of the step's samples, 0 to 1.

        A third copy of the gradient would raise the peak of memory.
        """
        if share < 1 or self.grads:
            for name in grads:
                part = share * grads[name].astype(mx.float32)
                grads[name] = part + self.grads.pop(name) if name in self.grads else part
            dispatch(grads)  # else the gradient of every micro-batch would wait for the last one
        self.grads = grads


def plain_values(values: mx.array, applies: Sequence[bool] | None, texts: Sequence[str] | None) -> list[Any]:
    """Return the values of one table column as a list, one Python value per sample. `values` is an array with one number per
    sample. If `texts` is a list, each number is replaced by the text at this index, and a negative number by None. If `texts`
    is None, the numbers stay. If `applies[n]` is False, the value of sample n is None. If `applies` is None, every sample has
    its value.
    """
    each: Any = values.tolist()
    if texts is not None:
        each = [texts[n] if n >= 0 else None for n in each]
    return each if applies is None else [v if a else None for v, a in zip(each, applies, strict=True)]
