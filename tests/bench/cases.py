"""What is measured: one case, and the lists of them that a command runs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

UNFUSED = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}  # how Metal routes training
TORCH_PLANS = ("eager", "eager+checkpoint", "compiled", "compiled+checkpoint")
KLEIN = "klein-base-4b"  # what stands beside PyTorch


@dataclass(frozen=True)
class Case:
    """One set-up. `plan` is backprop's for MLX, or plain: the whole graph, nothing compiled; for torch one of TORCH_PLANS."""

    family: str = KLEIN
    width: int = 1024
    height: int = 1024
    plan: str = "blocks"
    bits: int = 16
    rank: int = 32
    optimizer: str = "adamw"
    tight: bool = False  # as training does: hold live memory near what the plan is expected to need, hand work over sooner
    unfused: bool = False
    backend: str = "mlx"
    kind: str = "train"  # or autoencoder, text_encoder, loader
    dtype: str = "bfloat16"  # of the encoders; training takes bfloat16, float32 on a CPU
    steps: int = 6

    @property
    def image_tokens(self) -> int:
        """L."""
        return self.width // 16 * (self.height // 16)

    @property
    def text(self) -> str:
        """As a command line has it."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Case:
        """The case of a JSON object with some of the fields. ValueError for anything else."""
        known = [field.name for field in fields(cls)]
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'--case: {text!r} is no JSON ({error}); an object is wanted, such as {{"width": 512}}') from None
        wrong = sorted(set(given) - set(known)) if isinstance(given, dict) else [text]
        if wrong:
            raise ValueError(f"--case: {wrong[0]!r} is no field; there are {', '.join(known)}")
        return cls(**given)


def quick() -> Iterator[Case]:
    """A minute on a CPU: every kind of case, with the tiny family."""
    yield Case("tiny", 256, 256, kind="loader", steps=1)
    yield Case("tiny", 256, 256, kind="autoencoder", dtype="float32", steps=3)
    yield Case("tiny", 256, 256, kind="text_encoder", dtype="float32", steps=3)
    for plan in ("plain", "whole", "blocks"):
        yield Case("tiny", 256, 256, plan, steps=3)
    yield from (Case("tiny", 256, 256, "blocks", bits, tight=True, steps=3) for bits in (8, 4))


def standard(family: str) -> Iterator[Case]:
    """A family's training steps, by plan, bits and resolution, beside PyTorch where it is installed."""
    for px in (512, 768, 1024):
        yield Case(family, px, px, "plain")
        yield Case(family, px, px, "whole", tight=True)
        yield from (Case(family, px, px, "blocks", bits, tight=True) for bits in (16, 8, 4))
    yield Case(family, plan="12", tight=True)
    yield Case(family, height=1008, tight=True)  # 4544 rows: no multiple of 128
    yield Case(family, 512, 528, plan="whole", tight=True)
    yield Case(family, unfused=True, tight=True)
    for px in (512, 1024):
        yield from beside(family, px)


def bars() -> Iterator[Case]:
    """What the trainer is judged by, the most important first: klein 4B beside PyTorch and the plain graph, in one run."""
    yield Case(tight=True)
    yield Case(bits=4, tight=True)
    yield Case(unfused=True, tight=True)
    yield from (Case(plan="whole", tight=tight) for tight in (True, False))
    yield Case(plan="plain")
    yield from beside(KLEIN, 1024)
    yield from (Case(KLEIN, 512, 512, "whole", tight=tight) for tight in (True, False))
    yield Case(KLEIN, 512, 512, "plain")
    yield Case(KLEIN, 512, 512, bits=4, tight=True)
    yield from beside(KLEIN, 512)
    yield Case(height=1008, tight=True)  # 4544 rows and 1568: no multiples of 128
    yield Case(KLEIN, 512, 528, "whole", tight=True)


def large() -> Iterator[Case]:
    """The larger families, packed, the encoders, and the loader."""
    yield Case("dev", 512, 512, bits=4, optimizer="adamw8bit", tight=True, steps=3)
    yield Case("dev", 512, 512, bits=4, tight=True, steps=3)
    for bits, px in ((4, 1024), (4, 768), (8, 512), (8, 1024), (8, 768)):
        yield Case("dev", px, px, bits=bits, optimizer="adamw8bit", tight=True, steps=3)
    for bits in (4, 8):
        yield from (Case("klein-base-9b", px, px, bits=bits, tight=True) for px in (512, 768, 1024))
    yield from (Case(kind="autoencoder", dtype=dtype, steps=3) for dtype in ("bfloat16", "float32"))
    yield Case(kind="text_encoder", steps=3)
    yield Case(kind="loader", steps=3)


def beside(family: str, px: int) -> Iterator[Case]:
    """The same in PyTorch, where it is installed."""
    if importlib.util.find_spec("torch"):
        yield from (Case(family, px, px, plan, backend="torch") for plan in TORCH_PLANS)
