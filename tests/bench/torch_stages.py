"""The PyTorch reference of the benchmark for the stages beside training: diffusers' and transformers' models on CUDA.

Weights are random and have the shapes of the family. Import this module only where PyTorch, diffusers and transformers are
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stages.models.family import Family
from stages.text_to_image.families import FAMILIES
from tests.bench.cases import Case
from tests.bench.torch_diffusers import MODULES, autoencoder, on_device, transformer
from tests.bench.torch_model import DEVICE

TimeSteps = Callable[[Callable[[], Any], int], dict[str, float]]


def measure_torch_stage(case: Case, time_steps: TimeSteps) -> dict[str, Any]:
    """Kind "draw", "autoencoder", "decode" or "text_encoder", plan "eager" or "compiled"; one forward pass."""
    torch.manual_seed(0)
    if case.exact:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, case.dtype)
    makers = {"draw": drawing, "autoencoder": encoding, "decode": decoding, "text_encoder": caption}
    with torch.no_grad():
        step = makers[case.kind](case, FAMILIES[case.family], dtype)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

        def timed() -> None:
            step()
            torch.cuda.synchronize()

        times = time_steps(timed, case.steps)
    peak, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return times | {"peak_gb": peak, "reserved_gb": reserved, "version": torch.__version__}


def maybe_compiled(case: Case, function: Any) -> Any:
    return torch.compile(function) if "compiled" in case.plan else function


def drawing(case: Case, family: Family, dtype: Any) -> Callable[[], Any]:
    """One denoising forward pass of diffusers' transformer."""
    run, given = maybe_compiled(case, transformer(family, dtype)), MODULES[family.code].inputs(case, family, dtype)
    given = {name: _repeated(value, case.prompts) for name, value in given.items()}
    return lambda: run(**given)


def _repeated(value: Any, prompts: int) -> Any:
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
