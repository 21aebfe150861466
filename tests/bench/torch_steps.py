"""The PyTorch reference of the benchmark: training steps of a transformer with LoRA on CUDA.

FLUX.2's blocks are written for speed; other architectures are diffusers' modules. Fused AdamW, blocks compiled one by one,
non-reentrant checkpoints. FLUX.2's modulation is a constant input of the blocks, as in the MLX cases; its embedders and head are
left out, which favours PyTorch by less than one percent. Import this module only where PyTorch is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stages.models.family import Family
from stages.text_to_image.families import FAMILIES, FLUX2
from tests.bench.cases import Case
from tests.bench.torch_model import DEVICE, TEXT_TOKENS, Sizes, make_blocks

TimeSteps = Callable[[Callable[[], Any], int], dict[str, float]]


def measure_torch(case: Case, time_steps: TimeSteps) -> dict[str, Any]:
    """Plan "eager" or "compiled", with or without "+checkpoint"."""
    step = training_step(case)
    torch.cuda.reset_peak_memory_stats()
    times = time_steps(step, case.steps)
    peak, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return times | {"peak_gb": peak, "reserved_gb": reserved, "version": torch.__version__}


def training_step(case: Case) -> Callable[[], None]:
    torch.manual_seed(0)
    family = FAMILIES[case.family]
    if family.code in BLOCKS:
        trained, loss = BLOCKS[family.code](case, family)
    else:
        from tests.bench.torch_diffusers import module_loss

        trained, loss = module_loss(case, family)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.item()

    return step


def flux2_loss(case: Case, family: Family) -> tuple[list[Any], Callable[[], Any]]:
    sizes = Sizes.of(family, case.rank)
    blocks = make_blocks(sizes)
    if "compiled" in case.plan:
        for block in blocks:
            block.compile()
    trained = [weight for block in blocks for weight in block.parameters() if weight.requires_grad]
    tokens = case.image_tokens + TEXT_TOKENS
    modulation = torch.randn(6, 1, 1, sizes.width, device=DEVICE, dtype=torch.bfloat16) / 4
    angles = torch.rand(tokens, 1, sizes.head_width // 2, device=DEVICE)
    rope = torch.stack([angles.cos(), angles.sin()])

    def run(block: Any, h: Any) -> Any:
        if "checkpoint" in case.plan:
            return checkpoint(block, h, modulation, rope, use_reentrant=False)
        return block(h, modulation, rope)

    def loss() -> Any:
        h = torch.randn(1, tokens, sizes.width, device=DEVICE, dtype=torch.bfloat16)
        target = torch.randn(1, case.image_tokens, sizes.width, device=DEVICE)
        for block in blocks:
            h = run(block, h)
        return nn.functional.mse_loss(h[:, TEXT_TOKENS:].float(), target)

    return trained, loss


BLOCKS = {FLUX2: flux2_loss}  # by `Family.code`
