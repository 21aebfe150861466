"""Writes the generated parts of data/recipe.md: every setting of [train], and the defaults beside the other trainers'.

The page is written by hand but for what stands between `<!-- name: generated -->` and `<!-- end -->`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.text_to_image import PIPELINE
from stages.text_to_image.train.config import OptimizerConfig
from stages.text_to_image.train.trainer import GUIDANCE
from stages.tuner.diffusion.noise import ELSEWHERE
from stages.tuner.optimizers.step import METHODS

FILE = Path(__file__).parents[1] / "recipe.md"
PART = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)
CHANGES = {"setting": "another run", "selects": "its length", "runtime": "nothing"}

# Whose value a default is, where it is not our own choice.
SOURCES = {
    "train.batch_size": "all but OneTrainer and diffusers",
    "train.accumulate": "all that accumulate",
    "train.rank": "ai-toolkit, musubi-tuner, diffusion-pipe",
    "train.alpha": "ai-toolkit, SimpleTuner, diffusion-pipe, diffusers, flux-2-swift-mlx",
    "train.targets": "ai-toolkit, musubi-tuner, OneTrainer, diffusion-pipe",
    "train.lr": "ai-toolkit, musubi-tuner, SimpleTuner, diffusers, mflux, flux-2-swift-mlx",
    "train.clip": "all but SimpleTuner and mflux",
    "train.caption_dropout": "ai-toolkit",
    "train.checkpoint_every": "ai-toolkit",
    "train.optimizer.weight_decay": "ai-toolkit, diffusers",
    "train.schedule.shape": "all but mflux and flux-2-swift-mlx",
    "train.schedule.warmup_steps": "diffusion-pipe, flux-2-swift-mlx",
    "train.noise.base": "musubi-tuner, SimpleTuner, OneTrainer, diffusion-pipe",
    "train.noise.mean": "the same four",
    "train.noise.std": "the same four",
    "train.noise.shift": "musubi-tuner, OneTrainer",
    "train.noise.shift_factor": "SimpleTuner, diffusion-pipe",
}

# Whose each optimizer's own numbers are. What stands in [train.optimizer] for all of them is `SOURCES`'.
ADAMW = {"lr": SOURCES["train.lr"], **dict.fromkeys(("beta1", "beta2", "eps"), "Kingma and Ba 2015")}
FACTORED, AUTHORS = "Shazeer and Stern 2018", "its authors' code"
OWN = {
    "adamw": ADAMW,
    "adamw8bit": ADAMW,
    "adafactor": {
        "lr": "ours: that of AdamW",
        **dict.fromkeys(("decay_rate", "eps", "floor", "clip_threshold", "beta1"), FACTORED),
        **dict.fromkeys(("scale_parameter", "relative_step"), "ours: the schedule's lr holds; the paper's form has both"),
    },
    "lion": {
        "lr": "ours: a fifth of AdamW's; the paper wants 3 to 10 times less, flux-2-swift-mlx has 3e-5",
        **dict.fromkeys(("beta1", "beta2"), "Chen et al. 2023"),
    },
    "prodigy": {
        **dict.fromkeys(("lr", "beta1", "beta2", "eps", "d0", "d_coef", "growth_rate"), AUTHORS),
        "beta3": f"{AUTHORS}: the root of beta2",
        **dict.fromkeys(("safeguard_warmup", "bias_correction"), "ours, for diffusion models; its authors' are off"),
    },
}

# Ours in terms of settings, `?word` where such a setting may not exist. Then the others, in the order of TRAINERS.
TRAINERS = ("ai-toolkit", "musubi-tuner", "SimpleTuner", "OneTrainer", "diffusion-pipe", "diffusers", "mflux", "flux-2-swift-mlx")
PEERS = """
rank / alpha | {train.rank} / {train.alpha} | 32 / 32 | 32 / 1 | 16 / 16 | 16 / 1 | 32 / 32 | 4 / 4 | 16 / none | 16 / 16
learning rate | {train.lr} | 1e-4 | 1e-4 | 1e-4 | 3e-5 | 2e-5 | 1e-4 | 1e-4 | 1e-4
optimizer | {train.optimizer.kind?adamw} | adamw8bit | adamw8bit | adamw, bf16 | adamw | adamw, Kahan | adamw | adamw | adamw
weight decay | {train.optimizer.weight_decay} | 1e-4 | | | | 0.01 | 1e-4 | | 0.01
schedule | {train.schedule.shape} | constant | constant | constant | constant | constant | constant | none | cosine
warm-up, steps | {train.schedule.warmup_steps} | 0 | 0 | | 200 | 100 | 500 | none | 100
batch x accumulated | {train.batch_size} x {train.accumulate} | 1 x 1 | 1 x 1 | 1 x 1 | 2 x 1 | 1 x 1 | 4 x 1 | 1 | 1 x 1
length, steps | {train.steps} | 3000 | 16 epochs | 10,000 | 100 epochs | by hand | 500 | 100 epochs | 100 to 750
resolutions, px | {buckets.resolutions} | 512, 768, 1024 | 1024 | 1024 | 512 | 512 | 512 or 1024 | own, to 1024 | 512
noise levels (LN: logit-normal) | {train.noise.base} | uniform | LN | LN | LN | LN | uniform | 15 levels | uniform
shift | {train.noise.shift} | none | resolution | static 3 | resolution | static 3 | none | as sampling | none
loss weight | {train.loss.weight?none} | measured | none | none | none | none | none | none | none
guidance in training (dev) | {guidance} | 1 | 1 | 1 | 1 | 1 | 3.5 or 1 | no dev | 1
caption dropout | {train.caption_dropout} | 0.05 | no | 0.1 | 0 | 0 | 0 | no |
gradient clipping | {train.clip} | 1 | 1 | 2 | 1 | 1 | 1 | none | 1
Linears adapted, of the blocks | {train.targets} | all | all | attention | all | all | attention | a list | all or attention
average of the weights | {train.ema?no} | off | afterwards | off | off | no | no | no | no
checkpoint every, steps | {train.checkpoint_every} | 250 | an epoch | 500 | 30 minutes | an epoch | 500 | a choice | 500
"""


def render(page: str) -> str:
    """The page with its generated parts as they must be."""
    parts = {"settings": settings, "peers": peers, "names": names, "optimizers": optimizers}
    return PART.sub(lambda found: found[1] + "\n" + parts[found[2]]() + "\n" + found[3], page)


def write() -> None:
    """Bring data/recipe.md up to date."""
    FILE.write_text(render(FILE.read_text(encoding="utf-8")), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting: where it stands, and what its dataclass says of it."""

    section: str
    name: str
    default: Any
    doc: str
    changes: str
    choices: tuple[Any, ...]
    optional: bool  # the section is off unless the project file has it

    @property
    def key(self) -> str:
        """As `--set` has it."""
        return f"{self.section}.{self.name}"


def entries(kind: type, section: str, optional: bool = False) -> Iterator[Entry]:
    """Every setting of a section, then those of the sections within it."""
    hints = typing.get_type_hints(kind)
    inner = []
    for field in dataclasses.fields(kind):
        within, off = _section(hints[field.name], field.default)
        if within:
            inner.append((within, f"{section}.{field.name}", optional or off))
            continue
        choices = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is typing.Literal else ()
        doc, changes = field.metadata["doc"], CHANGES[field.metadata["kind"]]
        yield Entry(section, field.name, field.default, doc, changes, choices, optional)
    for within, where, off in inner:
        yield from entries(within, where, off)


def _section(hint: Any, default: Any) -> tuple[type | None, bool]:
    """(the dataclass, whether it is off by default) where a setting is a section of its own."""
    union = typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType)
    found = next((k for k in (typing.get_args(hint) if union else (hint,)) if dataclasses.is_dataclass(k)), None)
    return (found if isinstance(found, type) else None), default is None


def settings() -> str:
    """A table for each section of [train]."""
    out: list[str] = []
    section = ""
    for entry in entries(PIPELINE.stage("train").config, "train"):
        if entry.section != section:
            section = entry.section
            off = ", off unless the project file has it" if entry.optional else ""
            head = [f"### [{section}]{off}", "", "| setting | default | what it is | whose | changed |", "|---|---|---|---|---|"]
            out += ["", *head] if out else head
        choices = f"; one of {', '.join(f'`{choice}`' for choice in entry.choices)}" if entry.choices else ""
        cells = [f"`{entry.name}`", toml(entry.default), entry.doc + choices, SOURCES.get(entry.key, ""), entry.changes]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(out)


def optimizers() -> str:
    """A table for each optimizer: its numbers as a run has them that says nothing of them."""
    return "\n\n".join(_optimizer(kind) for kind in METHODS)


def _optimizer(kind: str) -> str:
    made: Any = OptimizerConfig(kind=kind).made()  # type: ignore[arg-type]
    given = {field.name for field in dataclasses.fields(OptimizerConfig)}
    numbers = {"lr": made.usual_lr} | {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    out = [f"### {kind}", "", "| number | default | whose | set by |", "|---|---|---|---|"]
    for name, value in numbers.items():
        source = SOURCES[f"train.optimizer.{name}"] if f"train.optimizer.{name}" in SOURCES else OWN[kind][name]
        where = "`[train]`" if name == "lr" else "`[train.optimizer]`" if name in given else "nothing"
        out.append(f"| `{name}` | {toml(value)} | {source} | {where} |")
    return "\n".join(out)


def peers() -> str:
    """Our defaults beside the others'."""
    values = defaults()
    head = ["", "latentmill", *TRAINERS]
    rows = [[cell.strip() for cell in line.split("|")] for line in PEERS.strip().splitlines()]
    ours = [
        [row[0], re.sub(r"\{([\w.]+)(\?\w+)?\}", lambda found: _lookup(values, *found.groups()), row[1]), *row[2:]]
        for row in rows
    ]
    lines = [head, ["---"] * len(head), *ours]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def defaults() -> Mapping[str, str]:
    """Every default of the pipeline's sections by its key; a section that is off is `off`."""
    found = {"guidance": f"{GUIDANCE:g}"}
    for stage_name in tuple(PIPELINE.stages):
        for entry in entries(PIPELINE.stage(stage_name).config, stage_name):
            found[entry.key] = plain(entry.default)
            if entry.optional:
                found[entry.section] = "off"
    return found


def _lookup(values: Mapping[str, str], key: str, fallback: str | None) -> str:
    assert fallback or key in values, f"no setting is named {key}"
    return values.get(key, (fallback or "").removeprefix("?"))


def names() -> str:
    """What other trainers call some of our distributions."""
    words = sorted({word for _, word in ELSEWHERE})
    lines = ["| trainer | " + " | ".join(f"its `{word}`" for word in words) + " |", "|---" * (len(words) + 1) + "|"]
    for trainer in dict.fromkeys(trainer for trainer, _ in ELSEWHERE):
        lines.append(f"| {trainer} | " + " | ".join(f"our `{ELSEWHERE[trainer, word]}`" for word in words) + " |")
    return "\n".join(lines)


def toml(value: Any) -> str:
    """A default as the project file would have it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[" + ", ".join(toml(item).strip("`") for item in value) + "]`"
    return f"`{value}`"


def plain(value: Any) -> str:
    """A default in a sentence."""
    if isinstance(value, tuple):
        return ", ".join(plain(item) for item in value)
    return toml(value).strip("`").strip('"') if not isinstance(value, float) else f"{value:g}"


if __name__ == "__main__":
    write()
