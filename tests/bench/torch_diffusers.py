"""diffusers' modules of each architecture for the benchmark, on CUDA, with random weights of a family's shapes.

Import this module only where PyTorch and diffusers are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from stages.models.family import Family
from stages.text_to_image.families import FLUX2, FLUX3, Z_IMAGE
from tests.bench.cases import Case
from tests.bench.torch_model import DEVICE, LoraLinear


@dataclass(frozen=True)
class Modules:
    """What diffusers has for an architecture."""

    transformer: str  # its class
    inputs: Callable[[Case, Family, Any], dict[str, Any]]  # random arguments of a forward pass, of a dtype
    prediction: Callable[[Any], Any]  # what a forward pass returns -> the predicted array
    autoencoder: str  # its class
    autoencoder_config: Callable[[Family], dict[str, Any]] = lambda family: dict(family.autoencoder)


def flux2_inputs(case: Case, family: Family, dtype: Any) -> dict[str, Any]:
    h, w, T = case.height // 16, case.width // 16, case.text_rows or family.text_tokens
    x = torch.randn(1, h * w, family.transformer["in_channels"], device=DEVICE, dtype=dtype)
    text = torch.randn(1, T, family.transformer["joint_attention_dim"], device=DEVICE, dtype=dtype)
    ids = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(h), torch.arange(w), torch.arange(1), indexing="ij"), -1)
    image_ids = ids.reshape(1, -1, 4).to(DEVICE)
    text_ids = torch.zeros(1, T, 4, dtype=torch.long, device=DEVICE)
    text_ids[0, :, 3] = torch.arange(T)
    given = {"hidden_states": x, "encoder_hidden_states": text, "timestep": torch.full((1,), 0.5, device=DEVICE, dtype=dtype)}
    return given | {"img_ids": image_ids, "txt_ids": text_ids, "guidance": None, "return_dict": False}


def flux3_inputs(case: Case, family: Family, dtype: Any) -> dict[str, Any]:
    given = flux2_inputs(case, family, dtype)
    given.pop("guidance")
    # All samples share the positions; those of neighbouring image tokens are half a step apart.
    halves = torch.tensor([1.0, 0.5, 0.5, 1.0], device=DEVICE)
    return given | {"img_ids": given["img_ids"][0] * halves, "txt_ids": given["txt_ids"][0].float()}


def z_image_inputs(case: Case, family: Family, dtype: Any) -> dict[str, Any]:
    sizes, rows = family.transformer, case.text_rows or family.text_tokens
    latent = torch.randn(sizes["in_channels"], 1, case.height // 8, case.width // 8, device=DEVICE, dtype=dtype)
    text = torch.randn(rows, sizes["cap_feat_dim"], device=DEVICE, dtype=dtype)
    return {"x": [latent], "t": torch.full((1,), 0.5, device=DEVICE), "cap_feats": [text], "return_dict": False}


def z_image_autoencoder(family: Family) -> dict[str, Any]:
    levels = len(family.autoencoder["block_out_channels"])
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return dict(family.autoencoder) | blocks


MODULES = {
    FLUX2: Modules("Flux2Transformer2DModel", flux2_inputs, lambda out: out[0], "AutoencoderKLFlux2"),
    FLUX3: Modules("Flux3Transformer2DModel", flux3_inputs, lambda out: out[0], "AutoencoderKLFlux2"),
    Z_IMAGE: Modules("ZImageTransformer2DModel", z_image_inputs, lambda out: out[0][0], "AutoencoderKL", z_image_autoencoder),
}  # by `Family.code`


def on_device(make: Callable[[], Any], dtype: Any) -> Any:
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        model = make()
    torch.set_default_dtype(torch.float32)
    return model.to(dtype).eval()


def transformer(family: Family, dtype: Any) -> Any:
    import diffusers

    return on_device(lambda: getattr(diffusers, MODULES[family.code].transformer)(**family.transformer), dtype)


def autoencoder(family: Family, dtype: Any) -> Any:
    import diffusers

    modules = MODULES[family.code]
    return on_device(lambda: getattr(diffusers, modules.autoencoder)(**modules.autoencoder_config(family)), dtype)


def adapted(model: Any, family: Family, rank: int) -> list[Any]:
    """A LoRA on those Linears of its blocks that a new project of the family trains; returns what is trained."""
    model.requires_grad_(False)
    patterns = family.begin.get("train", {}).get("targets", ("*",))
    blocks = [(name, part) for name, part in model.named_modules() if type(part).__name__ in model._repeated_blocks]
    trained = []
    for block_name, block in blocks:
        linears = [(name, part) for name, part in block.named_modules() if isinstance(part, nn.Linear)]
        for name, linear in linears:
            if any(fnmatchcase(f"{block_name}.{name}", pattern) for pattern in patterns):
                assert linear.bias is None
                made = LoraLinear(linear.in_features, linear.out_features, rank, linear.weight)
                block.set_submodule(name, made)
                trained += [made.down, made.up]
    return trained


def module_loss(case: Case, family: Family) -> tuple[list[Any], Callable[[], Any]]:
    """What is trained, and the function that computes the loss of a random batch."""
    modules = MODULES[family.code]
    model = transformer(family, torch.bfloat16)
    trained = adapted(model, family, case.rank)
    if "checkpoint" in case.plan:
        model.enable_gradient_checkpointing()
    if "compiled" in case.plan:
        # Blocks of one class see other lengths; kernels for any length would be slower.
        model.compile_repeated_blocks(dynamic=False)

    def loss() -> Any:
        found = modules.prediction(model(**modules.inputs(case, family, torch.bfloat16))).float()
        return nn.functional.mse_loss(found, torch.randn_like(found))

    return trained, loss
