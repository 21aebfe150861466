"""The peer in a benchmark: the FLUX.2 transformer's shape with LoRA in plain PyTorch, on CUDA.

Written for speed as a PyTorch user would: fused attention, fused AdamW, blocks compiled one by one, non-reentrant
checkpoints. Modulation is a constant input of the blocks, as in the MLX case; embedders and the head are left out, which
favours PyTorch by under one percent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TEXT_ROWS = 512


def run_torch(case: Any, measure: Callable[[Callable[[], None], int], dict[str, float]]) -> dict[str, Any]:
    """Train a few steps of a case; its plan is eager or compiled, with or without +checkpoint."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from stages.text_to_image.families import FAMILIES

    sizes = FAMILIES[case.family].transformer
    heads, width = sizes["num_attention_heads"], sizes["attention_head_dim"]
    D = heads * width
    inner = int(D * sizes["mlp_ratio"])
    device = torch.device("cuda")

    class Lora(nn.Module):
        """x W^T + (x A^T) B^T: W frozen bfloat16, A and B float32 masters cast to the stream's dtype."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.down = nn.Parameter(torch.randn(case.rank, inputs, device=device) * inputs**-0.5)
            self.up = nn.Parameter(torch.zeros(outputs, case.rank, device=device))

        def forward(self, x: Any) -> Any:
            return nn.functional.linear(x, self.weight) + nn.functional.linear(
                nn.functional.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype)
            )

    def norm(x: Any, mods: Any) -> Any:
        return nn.functional.layer_norm(x, (D,), eps=1e-6) * (1 + mods[1]) + mods[0]

    def attend(q: Any, k: Any, v: Any, rope: Any) -> Any:
        def turn(x: Any) -> Any:
            pairs = x.float().unflatten(-1, (-1, 2))
            x0, x1 = pairs[..., 0], pairs[..., 1]
            cos, sin = rope
            return torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1).flatten(-2).to(x.dtype)

        y = nn.functional.scaled_dot_product_attention(turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2))
        return y.transpose(1, 2).flatten(2)

    def swiglu(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up

    def split_heads(x: Any) -> Any:
        return x.unflatten(-1, (heads, width))

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = Lora(D, 3 * D + 2 * inner), Lora(D + inner, D)
            self.q, self.k = (nn.RMSNorm(width, 1e-6, device=device, dtype=torch.bfloat16).requires_grad_(False) for _ in "qk")

        def forward(self, h: Any, mods: Any, rope: Any) -> Any:
            q, k, v, mlp = self.into(norm(h, mods)).split([D, D, D, 2 * inner], -1)
            y = attend(self.q(split_heads(q)), self.k(split_heads(k)), split_heads(v), rope)
            return h + mods[2] * self.out(torch.cat([y, swiglu(mlp)], -1))

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.ModuleList(Lora(D, D) for _ in range(3))
            self.out, self.into, self.down = Lora(D, D), Lora(D, 2 * inner), Lora(inner, D)
            self.norms = nn.ModuleList(nn.RMSNorm(width, 1e-6, device=device, dtype=torch.bfloat16) for _ in "qk")
            self.norms.requires_grad_(False)

        def project(self, h: Any, mods: Any) -> list[Any]:
            x = norm(h, mods)
            q, k, v = (split_heads(linear(x)) for linear in self.qkv)
            return [self.norms[0](q), self.norms[1](k), v]

        def finish(self, h: Any, y: Any, mods: Any) -> Any:
            h = h + mods[2] * self.out(y)
            return h + mods[5] * self.down(swiglu(self.into(norm(h, mods[3:]))))

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = Stream(), Stream()

        def forward(self, h: Any, mods: Any, rope: Any) -> Any:
            text, image = h[:, :TEXT_ROWS], h[:, TEXT_ROWS:]
            parts = zip(self.text.project(text, mods), self.image.project(image, mods), strict=True)
            q, k, v = (torch.cat(pair, 1) for pair in parts)
            y = attend(q, k, v, rope)
            y_text, y_image = y[:, :TEXT_ROWS], y[:, TEXT_ROWS:]
            return torch.cat([self.text.finish(text, y_text, mods), self.image.finish(image, y_image, mods)], 1)

    torch.manual_seed(0)
    blocks: list[Any] = [Double() for _ in range(sizes["num_layers"])] + [Single() for _ in range(sizes["num_single_layers"])]
    trained = [p for block in blocks for p in block.parameters() if p.requires_grad]
    if "compiled" in case.plan:
        for block in blocks:
            block.compile()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    rows = case.image_tokens + TEXT_ROWS
    mods = torch.randn(6, 1, 1, D, device=device, dtype=torch.bfloat16) / 4
    angles = torch.rand(rows, 1, width // 2, device=device)
    rope = torch.stack([angles.cos(), angles.sin()])

    def step() -> None:
        h = torch.randn(1, rows, D, device=device, dtype=torch.bfloat16)
        target = torch.randn(1, case.image_tokens, D, device=device)
        for block in blocks:
            h = checkpoint(block, h, mods, rope, use_reentrant=False) if "checkpoint" in case.plan else block(h, mods, rope)
        loss = nn.functional.mse_loss(h[:, TEXT_ROWS:].float(), target)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    torch.cuda.reset_peak_memory_stats()
    found = measure(step, case.steps)
    peak, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return found | {"peak_gb": peak, "reserved_gb": reserved, "version": torch.__version__}
