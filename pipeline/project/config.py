"""Reads project.toml: [project], and one section per stage, each a frozen dataclass defined beside the stage that uses it.

Every mistake is a ValueError of one line: the setting, what would be right, where it was set.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

import stages
from stages.settings import Section, follow, nearest, runtime, selects
from stages.untrusted import TOML_BYTES, parse_toml, read_utf8

FILE = "project.toml"
Overrides = Mapping[str, Any] | Iterable[str]
_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"({_NAME}(?:\s*\.\s*{_NAME})*)"
HEADER, KEY = re.compile(rf"\s*\[\[?\s*{_DOTTED}\s*\]\]?\s*(?:#.*)?$"), re.compile(rf"\s*{_DOTTED}\s*=")  # lines of TOML

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80
NAMES = {  # type -> its name in an error, singular and plural
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    bool: ("true or false", "true or false"),
}

# Names that other programs give to settings, so that an unknown key can be answered with the name that it has here.
SYNONYMS = {
    "steps": "epochs epoch num_epochs max_train_epochs max_train_steps num_train_steps iterations iters num_inference_steps",
    "batch_size": "batch batchsize train_batch_size bs",
    "accumulate": "gradient_accumulation gradient_accumulation_steps grad_accum accumulation_steps",
    "lr": "learning_rate learningrate unet_lr",
    "lr_ratio": "loraplus_lr_ratio loraplus_unet_lr_ratio",
    "rank": "network_dim dim lora_rank r network_rank",
    "alpha": "network_alpha lora_alpha",
    "variant": "network_type adapter_type network_module",
    "resolutions": "resolution size image_size",
    "checkpoint_every": "save_every save_every_n_steps save_every_n_epochs checkpointing_steps save_steps "
    "sample_every sample_every_n_steps sample_every_n_epochs",
    "shape": "lr_scheduler scheduler lr_scheduler_type",
    "warmup_steps": "warmup lr_warmup_steps num_warmup_steps",
    "clip": "max_grad_norm grad_clip gradient_clipping",
    "kind": "optimizer_type optim",
    "precision": "dtype mixed_precision",
    "trigger": "trigger_word instance_token token",
    "preview_prompts": "prompts sample_prompts validation_prompt validation_prompts",
    "folder": "path folder_path data_dir instance_data_dir dataset",
    "family": "model base_model name_or_path pretrained_model_name_or_path",
    "guidance": "cfg guidance_scale cfg_scale",
    "caption_dropout": "caption_dropout_rate caption_dropout_prob",
    "memory": "gradient_checkpointing use_gradient_checkpointing",
    "keep": "keep_tokens",
    "shuffle": "shuffle_caption caption_shuffle",
    "flip": "flip_aug flip_x",
}
WRITTEN = {"memory": 'memory = "blocks"'}  # what settings of other programs mean, where the name alone does not say it
# What else an unknown key of another program is answered with; all that there is, if no setting here does the same.
REMARKS = {
    "epochs epoch num_epochs max_train_epochs": "an epoch has pictures x repeats / batch_size steps",
    "save_every_n_epochs": "it counts steps",
    "sample_every sample_every_n_steps sample_every_n_epochs": "previews are of checkpoints: samples.checkpoints",
    "output_name": "the files have the name of the project's folder, and a run that of latentmill train --name NAME",
    "output_dir logging_dir": "everything lies in the folder of the project",
    "noise_offset multires_noise_iterations adaptive_noise_scale": "SD needs it because its noise schedule does not reach pure "
    "noise; the models here do, so there is none",
    "min_snr_gamma": "it weights the noise schedule of SD; here train.noise chooses levels and train.loss.weight weights them",
    "color_aug": "colours are trained as the page shows them",
    "random_crop face_crop_aug_range": "latents.jitter trains further crops, moved at random",
    "clip_skip": "no model here has CLIP; which layers of the text encoder are read belongs to the family",
    "enable_bucket bucket_no_upscale min_bucket_reso max_bucket_reso bucket_reso_steps": "there are always buckets, found from "
    "each picture; buckets.resolutions is a list of sizes",
    "network_dropout module_dropout": "train.rank_dropout drops ranks, as kohya's does; there is no other dropout of adapters",
    "cache_latents cache_latents_to_disk cache_text_encoder_outputs": "always; only what has changed is encoded again",
    "text_encoder_lr network_train_unet_only train_text_encoder": "text encoders are never trained",
    "max_token_length": "belongs to the family",
}


@dataclasses.dataclass(frozen=True)
class ProjectConfig(Section):
    family: str = selects("", "the model family; `latentmill families` lists them; empty: the pipeline's first")
    weights: str = selects("", "a folder or a hub id; empty: the family's own")
    components: Mapping[str, str] | None = selects(
        None, "components that lie elsewhere than `weights`: name -> a folder, a file or a hub id"
    )
    pipeline: str = selects("text_to_image", "the pipeline: its name, or the dotted name of a module with a PIPELINE")
    commit_seconds: float = runtime(
        30.0, "rows are committed this often, seconds: a kill loses no more than that", unit="seconds", bounds=(0.0, 86400.0)
    )

    workers: str = runtime(
        "local",
        "where pending rows are computed: local; ray: a Ray cluster of this machine, started if there is none; "
        "ray://HOST:10001: another one",
    )
    worker_count: int = runtime(
        0,
        "most processes on the Ray cluster; 0: as many as it has room for, one for each GPU or CPU",
        unit="processes",
        bounds=(0, 4096),
    )
    worker_inputs: Literal["shared", "shipped"] = runtime(
        "shared",
        "how the workers on the Ray cluster read images, tables and weights; shared: at the same path on every machine; "
        "shipped: sent to them, into a temporary folder of each worker",
    )
    unit_rows: int = runtime(
        32, "rows that a worker on the Ray cluster computes at a time: what its death can cost", unit="rows", bounds=(1, 100_000)
    )

    def check(self) -> None:
        if self.workers not in ("local", "ray") and not self.workers.startswith("ray://"):
            raise ValueError(f'workers must be "local", "ray" or "ray://HOST:PORT", got "{self.workers}"')

    def place(self, component: str) -> str:
        """Where the component's weights lie: a folder, a file, a hub id, or "" for the family's own."""
        return (self.components or {}).get(component, self.weights)

    def divides(self, divisible: bool, rows: int) -> bool:
        """Whether workers on a Ray cluster compute these rows, not this process."""
        return self.workers != "local" and divisible and rows > self.unit_rows


@dataclasses.dataclass(frozen=True)
class Config:
    project: ProjectConfig  # the section [project]
    sections: Mapping[str, Any]  # stage -> its config dataclass
    given: frozenset[str] = frozenset()  # sections that the file or an override has, and those in them, such as train.ema


def load(file: Path, overrides: Overrides = (), text: str | None = None) -> Config:
    """Read and check a project file; `overrides` are {"train.steps": 200} or texts such as "train.steps=200".

    `text`: what the file would contain.
    """
    text = read_text(file) if text is None else text
    raw = parse_toml(text, str(file))
    origins = _apply(raw, overrides)

    def place(key: str) -> str:
        # The last override of the key, of a section around it or of a key inside it.
        given = [origin for other, origin in origins.items() if f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.")]
        line = _line(text, key)
        return given[-1] if given else f"{file.name} line {line}" if line else f"{file.name} [{key.rpartition('.')[0] or key}]"

    chosen = pipeline_name(raw)
    try:
        pipeline = stages.pipeline(chosen)
    except ValueError as error:
        near = nearest(chosen, stages.PIPELINES)
        raise ValueError(f"project.pipeline: {error}{near} ({place('project.pipeline')})") from None
    sections: dict[str, type] = {"project": ProjectConfig, **{name: pipeline.stage(name).config for name in pipeline.stages}}
    for name in raw:
        if name not in sections:
            near = nearest(name, sections) or f"; there are {', '.join(sections)}"
            raise ValueError(f"[{name}] is not a section{near} ({place(name)})")
    parser = Parser(sections, place)
    parsed = {name: parser.section(name, raw.get(name, {})) for name in sections}
    inside = [f"{name}.{key}" for name in raw for key, value in raw[name].items() if isinstance(value, Mapping)]
    return Config(dataclasses.replace(parsed.pop("project"), pipeline=chosen), follow(parsed), frozenset([*raw, *inside]))


def read_text(file: Path) -> str:
    """Raises ValueError."""
    if not file.exists():
        raise ValueError(f"{file.parent}: no {FILE} here; `latentmill init --help` explains how to make one")
    return read_utf8(file, TOML_BYTES)


def _line(text: str, wanted: str) -> int:
    """The line of a dotted key or section, such as "train.lr" or "train". 0 if it is not on one line of its own."""
    # tomllib tells no lines. In texts of several lines anything could look like a key.
    found, section = [], ""
    for number, line in enumerate([] if '"""' in text or "'''" in text else text.splitlines(), 1):
        if not (match := HEADER.match(line) or KEY.match(line)):
            continue
        name = ".".join(part.strip(" \t\"'") for part in match[1].split("."))
        section, key = (name, name) if match.re is HEADER else (section, f"{section}.{name}".lstrip("."))
        found += [number] if key == wanted else []
    return found[0] if len(found) == 1 else 0


def pipeline_name(raw: Mapping[str, Any]) -> str:
    head = raw.get("project")
    name = head.get("pipeline") if isinstance(head, dict) else None
    return name if isinstance(name, str) else ProjectConfig.pipeline  # the parser refuses a value of another type later


def _apply(raw: dict[str, Any], overrides: Overrides) -> dict[str, str]:
    """Put `overrides` into `raw`. Returns key -> where it was set, for messages."""
    origins = {}
    for override in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(override, str):
            key, equals, text = (part.strip() for part in override.partition("="))
            try:
                value = parse_toml(f"value = {text}", "--set")["value"]
            except ValueError:
                value = text  # a bare word is a string: --set project.family=tiny
            origin = f"--set {override}"
            syntax = "section.key=value, such as --set train.steps=500"
        else:
            key, value = override
            equals, origin, syntax = "=", f"override {key!r}: {value!r}", "'section.key', such as 'train.steps'"
        names = [name.strip() for name in key.split(".")]
        if not equals or len(names) < 2 or not all(names):
            raise ValueError(f"{origin}: an override must be {syntax}{_whole_name(raw, names)}")
        section = raw
        for name in names[:-1]:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ValueError(f"{origin}: {name} is a setting, not a section")
        section[names[-1]] = value
        origins[".".join(names)] = origin
    return origins


def _whole_name(raw: Mapping[str, Any], names: list[str]) -> str:
    try:
        pipeline = stages.pipeline(pipeline_name(raw))
    except ValueError:
        return ""
    parser = Parser({name: pipeline.stage(name).config for name in pipeline.stages}, str)
    for key in (names[0], name_here(names[0])) if len(names) == 1 else ():
        if holders := parser.holders(key):
            holders.sort(key=lambda holder: holder not in pipeline.results)  # what a user came for first
            return f"; did you mean {' or '.join(f'{holder}.{key}' for holder in holders[:3])}?"
    return ""


# Parsed TOML as dataclasses


def name_here(word: str) -> str:
    """The setting's name here, "lr" for "learning_rate", or ""."""
    plain = word.lower().replace("-", "_")
    return next((name for name, words in SYNONYMS.items() if plain in words.split()), "")


def remark(word: str) -> str:
    """What else to say to somebody who knows a setting of another program by this name, or ""."""
    plain = word.lower().replace("-", "_")
    return next((text for words, text in REMARKS.items() if plain in words.split()), "")


class Parser:
    """`sections`: name -> dataclass. `place(key)` says where a key was set, for messages: "project.toml [train]"."""

    def __init__(self, sections: Mapping[str, type], place: Callable[[str], str]) -> None:
        self.place = place
        found = list(nested_sections(sections))
        self.sections = {name: kind for name, kind, _ in found}  # with the sections inside sections, such as train.ema
        self.repeated = {name for name, _, many in found if many}  # that may be given several times: [[images.folder]]

    def section(self, name: str, raw: Any) -> Any:
        """The dataclass of the section `name`, such as "train" or "train.ema"."""
        if not isinstance(raw, Mapping):
            raise ValueError(
                f"{name} must be a section: write its settings below a line [{name}], got {SHORT.repr(raw)} ({self.place(name)})"
            )
        kind = self.sections[name]
        hints = hints_of(kind)
        for key in raw:
            if key not in hints:
                raise ValueError(f"{name}.{key} is not a setting{self._remedy(name, key)} ({self.place(f'{name}.{key}')})")
        values = {key: self._value(hints[key], value, f"{name}.{key}") for key, value in raw.items()}
        try:
            return kind(**values)
        except ValueError as error:
            message = str(error).removeprefix(f"{name}.").removeprefix(f"{name.rpartition('.')[2]}: ")
            key = re.match(r"\w*", message)
            raise ValueError(f"{name}.{message} ({self.place(f'{name}.{key[0] if key else str()}')})") from None

    def _remedy(self, name: str, key: str) -> str:
        holders = self.holders(key)
        if holders and name not in self.repeated:
            return f"; [{holders[0]}] has it"
        names, here = _names(self.sections[name]), name_here(key)
        called = [other for other in dict.fromkeys([name, *self.holders(here)]) if here in _names(self.sections[other])]
        if called:
            here = WRITTEN.get(here, here)
            more = f" ({text})" if (text := remark(key)) else ""
            return f"; did you mean {here if called[0] == name else f'{called[0]}.{here}'}?{more}"
        if text := remark(key):
            return f": {text}"
        return nearest(key, names) or f"; [{name}] has {', '.join(names)}"

    def holders(self, key: str) -> list[str]:
        return [name for name, kind in self.sections.items() if key in _names(kind) and name not in self.repeated]

    def _value(self, hint: Any, value: Any, name: str) -> Any:
        if name in self.repeated and isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            return tuple(self.section(name, item) for item in value)
        if name in self.sections and name not in self.repeated and value is not None:
            return self.section(name, value)
        try:
            return _convert(hint, value)
        except TypeError:
            raise ValueError(
                f"{name} must be {describe(hint)}{_example(hint, value)}, got {SHORT.repr(value)} ({self.place(name)})"
            ) from None


def nested_sections(sections: Mapping[str, type], many: bool = False) -> Iterable[tuple[str, type, bool]]:
    """(dotted name, dataclass, whether it is an item of a list) of the sections and of those inside them, such as "train.ema"."""
    for name, kind in sections.items():
        yield name, kind, many
        for key, item, listed in _inside(kind):
            yield from nested_sections({f"{name}.{key}": item}, listed)


@functools.cache
def _inside(kind: type) -> list[tuple[str, type, bool]]:
    found = []
    for key, hint in hints_of(kind).items():
        for each in members(hint):
            listed = typing.get_origin(each) is tuple
            item = typing.get_args(each)[0] if listed else each
            if isinstance(item, type) and is_dataclass(item):
                found.append((key, item, listed))
    return found


# Evaluating the annotations, which are text, would take most of the time of opening a project.
@functools.cache
def hints_of(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def members(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


# msgspec 0.22 could replace only this function: it passes unknown keys, inf and nan, and names neither the value nor a
# mapping's key. pydantic 2.14 needs dataclasses of its own and 0.12 s more CPU time at every start.
def _convert(hint: Any, value: Any) -> Any:
    """Parsed TOML as the annotated type: list to tuple, int to float. Raises TypeError, also for infinity and NaN."""
    for kind in members(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        # True == 1, so the types count.
        if origin is typing.Literal and any(value == each and type(value) is type(each) for each in args):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(_convert(args[0], item) for item in value)
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            return {key: _convert(args[1], item) for key, item in value.items()}
        if kind is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if kind is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        if type(value) is kind and kind is not float:
            return value
    raise TypeError


def describe(hint: Any) -> str:
    words: list[str] = []
    for kind in members(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            words += [repr(each) for each in args]
        elif origin is tuple:
            items = "sections" if is_dataclass(args[0]) else NAMES[args[0]][1] if args[0] in NAMES else describe(args[0])
            words.append(f"a list of {items}")
        elif args:
            many = NAMES[args[1]][1] if args[1] in NAMES else describe(args[1]).replace("a list", "lists")
            words.append(f"a section of names with {many}")
        elif kind is not types.NoneType:
            words.append(NAMES[kind][0] if kind in NAMES else "a section")
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _example(hint: Any, value: Any) -> str:
    try:
        return f", such as {[value]!r}" if _convert(hint, [value]) else ""
    except TypeError:
        return ""
