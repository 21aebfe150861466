"""The PyTorch reference of the retriever's benchmark: the same encoder, adapter, loss and optimizer on CUDA or a CPU.

"eager" and "compiled" are a T5 encoder written for this, with scaled_dot_product_attention; "transformers" is T5EncoderModel with
LoRA on its Linears. Import this module only where PyTorch is installed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stages.models.t5.model import buckets
from tests.bench.cases import RetrieverCase
from tests.bench.torch_reference import LoraLinear, TimeSteps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIMENSIONS, TEMPERATURE, ALPHA = 128, 0.05, 32.0


def linear(outputs: int, inputs: int, rank: int, dtype: torch.dtype) -> LoraLinear | nn.Linear:
    """Frozen, with a LoRA unless the rank is 0."""
    weight = torch.randn(outputs, inputs, device=DEVICE).to(dtype) / inputs**0.5
    if rank:
        return LoraLinear(weight, rank, ALPHA / rank)
    found = nn.Linear(inputs, outputs, bias=False, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    return found


class Layer(nn.Module):
    def __init__(self, case: RetrieverCase, dtype: torch.dtype) -> None:
        super().__init__()
        c = case.config
        inner, width, hidden = c["num_heads"] * c["d_kv"], c["d_model"], c["d_ff"]
        self.heads = c["num_heads"]
        self.q, self.k, self.v = (linear(inner, width, case.rank, dtype) for _ in range(3))
        self.o = linear(width, inner, case.rank, dtype)
        self.wi_0, self.wi_1 = (linear(hidden, width, 0, dtype) for _ in range(2))
        self.wo = linear(width, hidden, 0, dtype)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width, device=DEVICE, dtype=dtype), False) for _ in range(2))

    def forward(self, h: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """h: (batch, tokens, width). `bias`: (1, heads, tokens, tokens)."""
        B, L, _ = h.shape
        x = F.rms_norm(h, h.shape[-1:], self.norms[0], 1e-6)
        q, k, v = (each(x).view(B, L, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(B, -1, -1, -1), scale=1.0)
        h = h + self.o(y.transpose(1, 2).reshape(B, L, -1))
        x = F.rms_norm(h, h.shape[-1:], self.norms[1], 1e-6)
        return h + self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class Encoder(nn.Module):
    def __init__(self, case: RetrieverCase, dtype: torch.dtype) -> None:
        super().__init__()
        c = case.config
        self.embedding = nn.Parameter(torch.randn(c["vocab_size"], c["d_model"], device=DEVICE).to(dtype), False)
        self.bias = nn.Parameter(torch.randn(32, c["num_heads"], device=DEVICE).to(dtype), False)
        self.layers = nn.ModuleList(Layer(case, dtype) for _ in range(c["num_layers"]))
        self.norm = nn.Parameter(torch.ones(c["d_model"], device=DEVICE, dtype=dtype), False)
        self.tables = {n: torch.tensor(buckets(n, 32, 128), device=DEVICE).long() for n in (case.query, case.document)}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Normalised states, (batch, tokens, width)."""
        h = self.embedding[ids]
        bias = self.bias[self.tables[ids.shape[1]]].permute(2, 0, 1)[None].contiguous()
        for layer in self.layers:
            h = layer(h, bias)
        return F.rms_norm(h, h.shape[-1:], self.norm, 1e-6)


def transformers_encoder(case: RetrieverCase, dtype: torch.dtype) -> nn.Module:
    """Return transformers' T5 encoder with a LoRA on q, k, v and o of every block."""
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(**case.config, dropout_rate=0.0)).to(DEVICE, dtype).requires_grad_(False)
    for block in model.encoder.block:
        attention = block.layer[0].SelfAttention
        for name in "qkvo":
            setattr(attention, name, LoraLinear(getattr(attention, name).weight, case.rank, ALPHA / case.rank))
    found: nn.Module = model
    return found


def measure_torch(case: RetrieverCase, time_steps: TimeSteps) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype = getattr(torch, case.dtype)
    theirs = case.plan.startswith("transformers")
    model = transformers_encoder(case, dtype) if theirs else Encoder(case, dtype)
    head = nn.Parameter(torch.randn(DIMENSIONS, case.config["d_model"], device=DEVICE) / math.sqrt(case.config["d_model"]))
    run: Any = torch.compile(model, dynamic=False) if case.plan.endswith("compiled") else model
    trained = [head, *(p for p in model.parameters() if p.requires_grad)]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=DEVICE == "cuda")
    query, document = (torch.tensor(ids, device=DEVICE).long() for ids in case.ids())

    def encode(ids: torch.Tensor) -> torch.Tensor:
        states = run(input_ids=ids).last_hidden_state if theirs else run(ids)
        return F.normalize((states @ head.to(states.dtype).T).float(), dim=-1)

    def similarities(q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        flat = q.flatten(0, 1) @ d.flatten(0, 1).T
        return flat.view(*q.shape[:2], *d.shape[:2]).amax(-1).mean(1)

    score: Any = torch.compile(similarities) if case.plan.endswith("compiled") else similarities

    def step() -> None:
        scores = score(encode(query), encode(document))
        loss = F.cross_entropy(scores / TEMPERATURE, torch.arange(case.batch, device=DEVICE))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    def encode_only() -> None:
        with torch.inference_mode():
            encode(document).sum().item()

    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = time_steps(encode_only if case.kind == "encode" else step, case.steps)
    return times | ({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if DEVICE == "cuda" else {})
