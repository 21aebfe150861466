"""The experiment on few pictures: what is drawn with T-LoRA's mask."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from data import EXAMPLE
from data.research.experiments.few_pictures import MaskedForward, masks_of
from pipeline.project.project import Project
from stages.tuner.adapters import lora
from stages.tuner.blockwise.backprop import BlockwiseForward
from tests.stages.tuner.adapters.variants import adapted, tiny
from tests.stages.tuner.blockwise.test_backprop import batch


def test_a_picture_drawn_with_the_mask_has_the_ranks_of_its_noise_level_in_both_halves_of_an_orthogonal_start():
    model = tiny()
    arrays, scales = adapted(model, "lora")  # rank 4: of an orthogonal start, two halves of 2
    for start, ranks in (("zero", {0.3: [0, 1, 2], 0.8: [0, 1]}), ("orthogonal", {0.3: [0, 2], 0.8: [0, 2]})):
        project = Project(EXAMPLE, {"train.tlora.start": start, "train.tlora.min_rank": 2 if start == "zero" else 1})
        drawn = MaskedForward(model, (arrays, scales), masks_of(project, (arrays, scales)))(**batch())
        for n, kept in enumerate(ranks.values()):
            cut = {
                name: a * mx.array([float(r in kept) for r in range(4)])[:, None] if name.endswith(lora.A) else a
                for name, a in arrays.items()
            }
            alone = BlockwiseForward(model, cut, scales, model.dtype)(**batch())
            np.testing.assert_allclose(np.array(drawn[n]), np.array(alone[n]), atol=1e-5)
            whole = BlockwiseForward(model, arrays, scales, model.dtype)(**batch())
            assert float(mx.abs(whole[n] - drawn[n]).max()) > 1e-3
