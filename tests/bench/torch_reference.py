"""The PyTorch reference of the benchmark: diffusers' and transformers' models on CUDA, with random weights of a family's shapes.

Training has a LoRA, fused AdamW, blocks compiled one by one, and diffusers' own gradient checkpoints; another stage is one
forward pass. FLUX.2's blocks written by hand for speed took up to one percent less (H100, PyTorch 2.11, klein 4B at 1024 px:
compiled 0.167 to 0.169 s, the module 0.168 to 0.171; with checkpoints 0.241 and 0.242). Import this module only where
PyTorch, diffusers and transformers are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from stages.models.family import Family
from stages.text_to_image.families import FAMILIES, FLUX2, FLUX3, Z_IMAGE
from tests.bench.cases import Case

DEVICE = "cuda"
TimeSteps = Callable[[Callable[[], Any], int], dict[str, float]]


class LoraLinear(nn.Module):
    """x W^T + scale (x A^T) B^T with W frozen, and A and B in float32, cast to x's dtype."""

    def __init__(self, weight: Any, rank: int, scale: float = 1.0) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), scale
        self.down = nn.Parameter(torch.randn(rank, inputs, device=weight.device) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))

    def forward(self, x: Any) -> Any:
        low = nn.functional.linear(x, self.down.to(x.dtype))
        low = low if self.scale == 1 else self.scale * low  # a factor of 1 would cost a compiled step 2 % of its time
        return nn.functional.linear(x, self.weight) + nn.functional.linear(low, self.up.to(x.dtype))


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
                made = LoraLinear(linear.weight, rank)
                block.set_submodule(name, made)
                trained += [made.down, made.up]
    return trained


def measure_torch(case: Case, time_steps: TimeSteps) -> dict[str, Any]:
    """A training step of one of TORCH_PLANS; or a forward pass, plan "eager" or "compiled"."""
    torch.manual_seed(0)
    if case.exact:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    makers = {"train": training, "draw": drawing, "autoencoder": encoding, "decode": decoding, "text_encoder": caption}
    with torch.set_grad_enabled(case.kind == "train"):
        step = makers[case.kind](case, FAMILIES[case.family], getattr(torch, case.dtype))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

        def timed() -> None:
            step()
            torch.cuda.synchronize()

        times = time_steps(timed, case.steps)
    peak, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return times | {"peak_gb": peak, "reserved_gb": reserved, "version": torch.__version__}


def training(case: Case, family: Family, dtype: Any) -> Callable[[], None]:
    modules = MODULES[family.code]
    model = transformer(family, dtype)
    trained = adapted(model, family, case.rank)
    if "checkpoint" in case.plan:
        model.enable_gradient_checkpointing()
    if "compiled" in case.plan:
        # Blocks of one class see other lengths; kernels for any length would be slower.
        model.compile_repeated_blocks(dynamic=False)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        found = modules.prediction(model(**modules.inputs(case, family, dtype))).float()
        loss = nn.functional.mse_loss(found, torch.randn_like(found))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def maybe_compiled(case: Case, function: Any) -> Any:
    return torch.compile(function) if "compiled" in case.plan else function


def drawing(case: Case, family: Family, dtype: Any) -> Callable[[], Any]:
    """One denoising forward pass of diffusers' transformer."""
    run, given = maybe_compiled(case, transformer(family, dtype)), MODULES[family.code].inputs(case, family, dtype)
    given = {name: repeated(value, case.prompts) for name, value in given.items()}
    return lambda: run(**given)


def repeated(value: Any, prompts: int) -> Any:
    # Arrays of one sample, and lists of samples; positions that all samples share have a first axis of rows.
    if isinstance(value, list):
        return value * prompts
    return value.repeat_interleave(prompts, 0) if torch.is_tensor(value) and value.shape[0] == 1 else value


def encoding(case: Case, family: Family, dtype: Any) -> Callable[[], Any]:
    run = maybe_compiled(case, autoencoder(family, dtype).encode)
    pixels = torch.rand(1, 3, case.height, case.width, device=DEVICE, dtype=dtype) * 2 - 1
    return lambda: run(pixels).latent_dist.mode()


def decoding(case: Case, family: Family, dtype: Any) -> Callable[[], Any]:
    run = maybe_compiled(case, autoencoder(family, dtype).decode)
    latent = torch.randn(1, family.autoencoder["latent_channels"], case.height // 8, case.width // 8, device=DEVICE, dtype=dtype)
    return lambda: run(latent).sample


def caption(case: Case, family: Family, dtype: Any) -> Callable[[], Any]:
    from transformers import Qwen3Config, Qwen3Model

    sizes = dict(family.text_encoder) | {"num_hidden_layers": max(family.text_layers)}
    sizes.pop("model_type")  # the text part of a vision model is computed like Qwen3 of its size
    model = on_device(lambda: Qwen3Model(Qwen3Config(**sizes)), dtype)
    run = maybe_compiled(case, model)
    tokens = torch.randint(0, 1000, (1, family.text_tokens), device=DEVICE)
    return lambda: run(input_ids=tokens, output_hidden_states=True)
