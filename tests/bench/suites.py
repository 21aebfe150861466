"""The lists of cases that one command measures; it leaves PyTorch's out where PyTorch is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from stages.text_to_image.families import FAMILIES
from tests.bench.cases import TORCH_PLANS, Case

CAPTION_TOKENS = 60  # of a caption of usual length
COMPARED = "klein-base-4b"  # the family that is compared with PyTorch


def quick() -> Iterator[Case]:
    """Every kind of case with the tiny family, and the checksums of klein 4B's samples: about a minute on a CPU."""
    yield Case("tiny", 256, 256, kind="loader", steps=1)
    yield Case("tiny", 256, 256, kind="checksums", steps=3)
    yield from checksums()
    yield Case("tiny", 256, 256, kind="autoencoder", dtype="float32", steps=3)
    yield Case("tiny", 256, 256, kind="text_encoder", dtype="float32", steps=3)
    for plan in ("plain", "whole", "blocks"):
        yield Case("tiny", 256, 256, plan, steps=3)
    yield from (Case("tiny", 256, 256, "blocks", bits, memory_limited=True, steps=3) for bits in (8, 4))
    yield from (Case("tiny", px, px, kind="commit", steps=steps) for px, steps in ((1024, 16), (512, 32), (32, 400)))
    if importlib.util.find_spec("ray"):
        yield from (Case("tiny", kind="workers", workers=count, steps=6 * count) for count in (1, 3))


def comparison() -> Iterator[Case]:
    """klein 4B beside PyTorch and MLX's plain graph, in one run; the most important case comes first."""
    yield Case(memory_limited=True)
    yield Case(bits=4, memory_limited=True)
    yield Case(unfused=True, memory_limited=True)
    yield from (Case(plan="whole", memory_limited=limited) for limited in (True, False))
    yield Case(plan="plain")
    yield from pytorch(1024)
    yield from (Case(COMPARED, 512, 512, "whole", memory_limited=limited) for limited in (True, False))
    yield Case(COMPARED, 512, 512, "plain")
    yield Case(COMPARED, 512, 512, bits=4, memory_limited=True)
    yield from pytorch(512)
    yield Case(height=1008, memory_limited=True)  # 4544 tokens here and 1568 below: no multiples of 128
    yield Case(COMPARED, 512, 528, "whole", memory_limited=True)


def ranks() -> Iterator[Case]:
    """Training steps on one, two and so on processes, one for each GPU, with a batch of one image for each."""
    for count in (1, 2):
        yield from (Case(COMPARED, px, px, "whole", memory_limited=True, ranks=count, steps=20) for px in (1024, 512))
        yield Case(COMPARED, memory_limited=True, ranks=count, steps=20)


def large() -> Iterator[Case]:
    """dev and klein 9B with a quantized base, the encoders, and the loader."""
    yield Case("dev", 512, 512, bits=4, optimizer="adamw8bit", memory_limited=True, steps=3)
    yield Case("dev", 512, 512, bits=4, memory_limited=True, steps=3)
    for bits, px in ((4, 1024), (4, 768), (8, 512), (8, 1024), (8, 768)):
        yield Case("dev", px, px, bits=bits, optimizer="adamw8bit", memory_limited=True, steps=3)
    for bits in (4, 8):
        yield from (Case("klein-base-9b", px, px, bits=bits, memory_limited=True) for px in (512, 768, 1024))
    yield from (Case(kind="autoencoder", dtype=dtype, steps=3) for dtype in ("bfloat16", "float32"))
    yield Case(kind="text_encoder", steps=3)
    yield Case(kind="loader", steps=3)
    yield from checksums()


def checksums() -> Iterator[Case]:
    """The checksums that a training step of the smallest real family computes, where its steps are the shortest."""
    yield Case(COMPARED, 512, 512, kind="checksums", steps=8)


def shapes(family: str) -> Iterator[Case]:
    """Every stage of a family at 1024 and 512 px and every width of weights, and PyTorch compiled beside."""
    encode: dict[str, Any] = {"kind": "autoencoder", "dtype": "float32"}
    for px in (1024, 512):
        yield from (Case(family, px, px, bits=bits, memory_limited=True) for bits in (16, 8, 4))
        yield Case(family, px, px, "compiled+checkpoint", backend="torch")
        yield from (Case(family, px, px, kind="draw", bits=bits, memory_limited=True) for bits in (16, 8, 4))
        yield Case(family, px, px, "compiled", backend="torch", kind="draw")
    if FAMILIES[family].real_cfg:
        yield from (Case(family, 512, 512, kind="draw", prompts=2, bits=bits, memory_limited=True) for bits in (16, 8, 4))
        yield Case(family, 512, 512, "compiled", backend="torch", kind="draw", prompts=2)
    for px in (1024, 512):
        yield Case(family, px, px, "whole", memory_limited=True)
        yield from (Case(family, px, px, **encode, exact=exact, memory_limited=True) for exact in (True, False))
        yield Case(family, px, px, kind="decode", dtype="float32", memory_limited=True)
        yield Case(family, px, px, "compiled", backend="torch")
        yield Case(family, px, px, "compiled", backend="torch", **encode)
    yield from (Case(family, bits=bits, kind="text_encoder", memory_limited=True) for bits in (16, 8, 4))
    yield Case(family, plan="eager", backend="torch", kind="text_encoder")
    record = FAMILIES[family]
    rows = record.architecture.text_rows(CAPTION_TOKENS)
    for px in () if record.text_padding in ("start", "end") else (1024, 512):
        yield Case(family, px, px, text_rows=rows, memory_limited=True)
        yield Case(family, px, px, "compiled+checkpoint", text_rows=rows, backend="torch")


def pytorch(px: int) -> Iterator[Case]:
    yield from (Case(COMPARED, px, px, plan, backend="torch") for plan in TORCH_PLANS)
