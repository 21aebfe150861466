"""GradCache: the gradient of a loss over a whole batch, in the memory of a part of it. Gao et al. 2021, arXiv 2101.06983.

Every part is encoded without a gradient. The loss of all vectors gives its gradient by each vector. Then every part is
encoded again, and this gradient is carried back through it. The sum over the parts is the gradient of the whole batch. It
costs one more forward pass.
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
    """Compute a batch in parts, and return (losses, gradients). `chain` is the model. `adapters` maps names to the
    adapter's arrays. `scales` maps "<block>.<linear>" to the factor of the adapter's change. `parts` holds the keyword
    arguments of `chain.enter` for each part. `join(predictions)` combines the predictions of all parts into one.
    `loss(prediction)` returns one loss per sample. `plan` says which blocks keep their activations for the backward
    pass: "whole" means all blocks, "blocks" means only the last block, and a number such as 3 means the last 3 blocks.
    `ranks` are the processes that share the parts, or None.

    The losses are what `loss` returns. Instead of one loss per sample, this may be a dict of values per sample with the
    key "loss". The gradients are those of the mean loss, by the names in `adapters`. Such a name is
    "<block>.<linear>.lora_A.weight". The result equals that of `loss_and_grads` for the whole batch, up to rounding.

    Only one part at a time has activations in memory. The backward pass computes again the activations that `plan` does
    not keep. With several `ranks` (processes), each process computes some of the parts. It returns the gradients of
    these parts only. The sum of the gradients over all ranks is the gradient of the batch.
    """
    ranks = ranks or Ranks()
    own = ranks.part(len(parts))
    predictions = _gathered([_computed(predict(chain, adapters, scales, part)) for part in parts[own]], ranks)
    losses_B, pulls = _loss_and_pulls(predictions, join, loss)
    mx.eval(losses_B, pulls)
    del predictions
    total: Arrays = {}
    for part, pull in zip(parts[own], pulls[own], strict=True):
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
    """Return the predictions of all parts of a batch, in order. `predictions` holds those of the parts that this rank (process)
    has computed. `ranks` are the processes that share the parts.
    """
    if ranks.size == 1:
        return predictions
    by_rank: list[list[Tree]] = [[] for _ in range(ranks.size)]
    for prediction in predictions:
        names, leaves = zip(*tree_flatten(prediction), strict=True)
        found = ranks.gather(leaves)
        for rank, own in enumerate(by_rank):
            mine = found[rank * len(names) : (rank + 1) * len(names)]
            own.append(tree_unflatten(list(zip(names, mine, strict=True))))
    return [prediction for own in by_rank for prediction in own]


def _loss_and_pulls(predictions: list[Tree], join: Join, loss: Loss) -> tuple[mx.array | Values, list[Tree]]:
    """Return (losses, gradients) of a batch that was predicted in parts. `predictions` holds one prediction per part.
    `join(predictions)` combines them into the prediction of the whole batch. `loss` maps the combined prediction to the
    losses. The gradients are those of the mean loss with respect to the predictions, one per part.
    """

    def run(predictions: list[Tree]) -> tuple[mx.array, mx.array | Values]:
        found = loss(join(predictions))
        return main_losses(found).mean(), found

    (_, found), pulls = mx.value_and_grad(run)(predictions)
    return found, pulls


def _inner_product(prediction: Tree, **pulls: mx.array) -> mx.array:
    """Return the inner product of two trees of arrays, as a float32 array of shape `(1,)`. A tree is a nested dict or
    list. `prediction` is the first tree. The caller gives the arrays of the second tree as keyword arguments
    (`**pulls`), one for each array of `prediction` and with its shape. For example, `prediction` is `{"query": x,
    "document": y}`. Then the call is `_inner_product(prediction, pull_query=a, pull_document=b)`. The result is the sum
    of all elements of `x * a` and `y * b`.

    The name of an argument is "pull_" and the path of the array in `prediction`, such as "pull_query.0" for
    `prediction["query"][0]`. An array in `pulls` is the gradient of the loss with respect to one array of the
    prediction. The gradient of the result with respect to `prediction` is `pulls`.
    """
    found = dict(tree_flatten(prediction))
    return mx.stack([(value.astype(mx.float32) * pulls[f"pull_{name}"]).sum() for name, value in found.items()]).sum()[None]
