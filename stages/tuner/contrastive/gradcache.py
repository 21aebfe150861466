"""GradCache: the gradient of a loss over a whole batch, in the memory of a part of it. Gao et al. 2021, arXiv 2101.06983.

Every part is encoded without a gradient, the loss of all vectors gives its gradient by each vector, and every part is encoded
again to carry this gradient back through it: one more forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from stages.tuner.blockwise.backprop import Loss, Plan, Values, loss_and_grads, main_losses, predict
from stages.tuner.blockwise.chain import Arrays, Chain, Tree
from stages.tuner.ranks import Ranks

Join = Callable[[list[Tree]], Tree]  # predictions of all parts, in order -> the prediction of the whole batch


def loss_and_grads_in_parts(
    chain: Chain,
    adapters: Arrays,
    scales: Mapping[str, float],
    parts: Sequence[Mapping[str, Any]],
    join: Join,
    loss: Loss,
    plan: Plan = "whole",
    ranks: Ranks | None = None,
) -> tuple[mx.array | Values, Arrays]:
    """`loss_and_grads` of a batch, part by part; with several `ranks`, the gradients of this rank's parts only."""
    ranks = ranks or Ranks()
    own = ranks.part(len(parts))
    predictions = _gathered([_computed(predict(chain, adapters, scales, part)) for part in parts[own]], ranks)
    losses_B, pulls = _loss_and_pulls(predictions, join, loss)
    mx.eval(losses_B, pulls)
    del predictions
    # The sum over parts, and then over ranks, is the gradient of the batch.
    total: Arrays = {}
    for part, pull in zip(parts[own], pulls[own], strict=True):
        # A loss whose gradient is `pull`. Keywords, so that it is compiled once and not for each pull.
        carried = functools.partial(_inner_product, **{f"pull_{name}": value for name, value in tree_flatten(pull)})
        _, grads = loss_and_grads(chain, adapters, scales, part, carried, plan)
        total = {
            name: total[name] + grad.astype(mx.float32) if total else grad.astype(mx.float32) for name, grad in grads.items()
        }
        del grads
        mx.eval(total)  # else the next part would begin before this part's activations are freed
    return losses_B, total


def _computed(prediction: Tree) -> Tree:
    mx.eval(prediction)
    return prediction


def _gathered(predictions: list[Tree], ranks: Ranks) -> list[Tree]:
    if ranks.size == 1:
        return predictions
    # Each rank has as many parts, in the order of the batch.
    by_rank: list[list[Tree]] = [[] for _ in range(ranks.size)]
    for prediction in predictions:
        names, leaves = zip(*tree_flatten(prediction), strict=True)
        found = ranks.gather(leaves)
        for rank, own in enumerate(by_rank):
            mine = found[rank * len(names) : (rank + 1) * len(names)]
            own.append(tree_unflatten(list(zip(names, mine, strict=True))))
    return [prediction for own in by_rank for prediction in own]


def _loss_and_pulls(predictions: list[Tree], join: Join, loss: Loss) -> tuple[mx.array | Values, list[Tree]]:
    def run(predictions: list[Tree]) -> tuple[mx.array, mx.array | Values]:
        found = loss(join(predictions))
        return main_losses(found).mean(), found

    (_, found), pulls = mx.value_and_grad(run)(predictions)
    return found, pulls


def _inner_product(prediction: Tree, **pulls: mx.array) -> mx.array:
    found = dict(tree_flatten(prediction))
    return mx.stack([(value.astype(mx.float32) * pulls[f"pull_{name}"]).sum() for name, value in found.items()]).sum()[None]
