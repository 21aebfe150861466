"""The tables of the page of the experiments, in Markdown: one function per table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from data.research.experiments.results import DROPOUT, GUIDANCE, PRESERVED, Results, mean_change

KINDS = ("none", "class", "trigger")  # prompts without the trigger, with the class word, with the trigger
# Label of each run whose caption dropout is compared.
DROPOUT_LABELS = {
    "base": "base",
    **{run: f"dropout {share}" for run, share in DROPOUT.items()},
    **{run: f"with preservation, dropout {share}" for run, share in PRESERVED.items()},
}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. `head` has the names of the columns, and `rows` the cells. All columns but the first are
    aligned to the right.
    """
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_error(pair: tuple[float, float], digits: int = 2) -> str:
    """Format a number with its standard error, such as "0.79 ± 0.08". `pair` is (number, standard error). `digits` is the
    number of decimal places.
    """
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def ema(results: Results) -> str:
    """Return a table in Markdown: the held-out loss of the adapter and of its moving average, over the second half of the
    run.
    """
    rows = []
    for name, average in (("the adapter", False), ("its average", True)):
        _, losses = results.loss_curve(average)
        half = losses[len(losses) // 2 :]
        numbers = (losses[-1], float(np.mean(half)), min(losses), max(half) - min(half), mean_change(half))
        rows.append((name, *(f"{number:.4f}" for number in numbers)))
    head = ("held-out loss", "last", "mean, second half", "lowest", "range, second half", "mean change between measurements")
    return markdown(head, rows)


def dropout_losses(results: Results) -> str:
    """Return a table in Markdown: the held-out loss with the pictures' captions and with the empty caption, by caption
    dropout.
    """
    rows = [
        (
            label,
            *(f"{results.loss(run, 128, caption):.4f}" for caption in ("own", "empty")),
            with_error(results.mean("style", run, "empty")),
        )
        for run, label in DROPOUT_LABELS.items()
    ]
    return markdown(("", "held-out loss, own caption", "empty caption", "style of the empty prompt"), rows)


def dropout_styles(results: Results) -> str:
    """Return a table in Markdown: style and agreement with the text, by guidance and caption dropout."""
    columns = [(column, guidance) for column in ("style", "agreement") for guidance in GUIDANCE]
    rows = [
        (label, *(with_error(results.mean(column, run, guidance=guidance)) for column, guidance in columns))
        for run, label in DROPOUT_LABELS.items()
    ]
    head = ("", *(f"style, guidance {g:g}" for g in GUIDANCE), *(f"agreement, {g:g}" for g in GUIDANCE))
    return markdown(head, rows)


def sizes(results: Results) -> str:
    """Return a table in Markdown: held-out loss, style and agreement with the text, at 128 and 192 px."""
    rows = []
    for run, label in (("base", "base"), ("plain", "trained at 128"), ("two sizes", "trained at 128 and 192")):
        losses = (f"{results.loss(run, side):.4f}" for side in (128, 192))
        scores = (with_error(results.mean(column, run, side=side)) for column in ("style", "agreement") for side in (128, 192))
        rows.append((label, *losses, *scores))
    head = ("", "held-out loss, 128 px", "192 px", "style, 128 px", "192 px", "agreement, 128 px", "192 px")
    return markdown(head, rows)


def preservation(results: Results) -> str:
    """Return a table in Markdown: the distance from the base's pictures, and the style, by kind of prompt."""
    rows = []
    for run, label in (("plain", "without"), ("preserved", "with `[train.preservation]`")):
        moved = (with_error(results.mean("moved", run, kind), 1) for kind in KINDS)
        style = (with_error(results.mean("style", run, kind)) for kind in KINDS)
        rows.append((label, *moved, *style))
    base = ("base", "0", "0", "0", *(with_error(results.mean("style", "base", kind)) for kind in KINDS))
    head = ("", "moved, no trigger", "class word", "trigger", "style, no trigger", "class word", "trigger")
    return markdown(head, [base, *rows])


TABLES: dict[str, Callable[[Results], str]] = {
    "ema": ema,
    "dropout-losses": dropout_losses,
    "dropout-styles": dropout_styles,
    "sizes": sizes,
    "preservation": preservation,
}
