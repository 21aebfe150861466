"""Warnings at the start of a run if its latents, embeddings or first losses are not those of a sound run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from stages.models.family import Family
from stages.models.text.encoder import widen
from stages.text_to_image.train.config import LossConfig
from stages.tuner.diffusion import weight
from stages.tuner.task import ExpectedLoss, Row

# The loss alone does not show every mistake. With the model `micro` on data/projects/example, other hidden states of the text
# encoder change it by 2 %, padding at the wrong end by 10 %, and FLUX.1's normalisation of latents by 37 %: less than another
# data set does. So latents and embeddings are checked by themselves.
CROPS, CAPTIONS = 16, 4  # latents and embeddings that are looked at
DEVIATIONS = (0.5, 2.0)  # sound standard deviations of latents; photographs and flat pictures have 0.9 to 1.3
MOST_MEAN = 0.5  # largest sound mean of latents, in either direction
NEAR = 0.1  # largest sound relative difference between the first row of an embedding and the family's
MIDDLE = (0.4, 0.9)  # noise levels whose losses are compared; at the ends, the level alone decides the loss
BELONG = "autoencoder, text encoder and transformer must be those of one model"


def check_latents(latents: Iterable[np.ndarray]) -> Iterator[str]:
    """A warning if the latents do not have about the mean 0 and the standard deviation 1. bfloat16 as uint16."""
    values = np.concatenate([widen(words).ravel() for words in latents])
    mean, deviation = float(values.mean()), float(values.std())
    if abs(mean) > MOST_MEAN or not DEVIATIONS[0] <= deviation <= DEVIATIONS[1]:
        yield (
            f"the latents have mean {mean:.2f} and standard deviation {deviation:.2f}, where the transformer was trained on 0 "
            f"and 1: {BELONG}; check [project] weights"
        )


def check_embeddings(embeddings: Iterable[tuple[np.ndarray, int]], family: Family) -> Iterator[str]:
    """At most one warning. `embeddings`: (bfloat16 rows as uint16, number of rows that are not padding)."""
    for words_TJ, tokens in embeddings:
        # With fewer than two rows of padding, the first two rows cannot both be padding.
        if tokens > len(words_TJ) - 2:
            continue
        first_TJ = widen(words_TJ[:2])
        # Padding at the start gives equal rows.
        end = "start" if np.allclose(first_TJ[0], first_TJ[1], rtol=1e-2, atol=1e-3) else "end"
        if end != family.text_padding:
            yield (
                f"the embeddings are padded at the {end}, where {family.title} was trained with padding at the "
                f"{family.text_padding}: check the tokenizer, and make the embeddings again"
            )
            return
        # Without padding at the start, the first row is that of the chat's first token, which no caption changes.
        sizes = np.sqrt(np.square(np.split(first_TJ[0], len(family.text_layers))).mean(-1))
        if family.first_row and np.abs(sizes / np.array(family.first_row) - 1).max() > NEAR:
            found, right = (", ".join(f"{size:.3g}" for size in each) for each in (sizes, family.first_row))
            yield (
                f"the embeddings are not those of {family.name}: the hidden states of the first token have the sizes {found}, "
                f"expected {right}; {BELONG}, and the hidden states {', '.join(map(str, family.text_layers))} are read"
            )
            return


def expected_loss(config: LossConfig, family: Family) -> ExpectedLoss | None:
    """None if the loss is not a mean squared error, and for a family with random weights."""
    if config.kind != "mse" or family.seeded is not None:
        return None

    def uninformed(row: Row) -> float | None:
        sigma = row["sigma"]
        if not MIDDLE[0] <= sigma <= MIDDLE[1]:
            return None
        return float(weight(config.weight, sigma)) * uninformed_mse(sigma)

    return ExpectedLoss(
        uninformed,
        nobody="a model that knows nothing about pictures",
        start=family.start_loss,
        source="by arithmetic" if family.start_loss[0] == 0 else "measured",
        # Files of this program fit together.
        remedy=f"{family.name} has never seen pictures like these; it learns them from here on"
        if family.bundled
        else f"{family.name} does not know pictures like these, or a part of the model is wrong: {BELONG}",
    )


def uninformed_mse(sigma: float) -> float:
    """Error of the best linear prediction of the velocity, for clean latents that are independent with mean 0 and variance 1."""
    return 1 / (sigma**2 + (1 - sigma) ** 2)
