"""Every number that a project can set has bounds, and is refused beyond them before anything is loaded."""

import dataclasses
import typing
from collections.abc import Mapping

import pytest

import stages
from pipeline.project.config import Parser, ProjectConfig, members, nested_sections
from stages.settings import NUMBER, WHOLE

NUMBERS = (int, float)


def sections(pipeline):
    return {"project": ProjectConfig, **{name: pipeline.stage(name).config for name in pipeline.stages}}


def numeric_settings():
    """(sections, section, field, kind, shape) of every setting that can hold a number; shape(x) is a value with x."""
    for pipeline_name in stages.PIPELINES:
        found = sections(stages.pipeline(pipeline_name))
        for section, config, _ in nested_sections(found):
            hints = typing.get_type_hints(config)
            for field in dataclasses.fields(config):
                for member in members(hints[field.name]):
                    kind, shape = numeric(member)
                    if kind:
                        yield pytest.param(found, section, field, kind, shape, id=f"{section}.{field.name}")


def numeric(member):
    """The type of the numbers that an annotated type holds, or None, and how to make a value of one."""
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if member in NUMBERS:
        return member, lambda x: x
    if origin is tuple and arguments[0] in NUMBERS:
        return arguments[0], lambda x: [x]
    if origin is Mapping and arguments[1] in NUMBERS:
        return arguments[1], lambda x: {"512": x}
    return None, None


SETTINGS = list(numeric_settings())


def refused(found, section, name, value):
    with pytest.raises(ValueError) as error:
        Parser(found, lambda key: "project.toml").section(section, {name: value})
    said = str(error.value)
    assert said.startswith(f"{section}.{name} must ") and "\n" not in said and len(said) < 300, said


def test_a_section_that_redefines_a_setting_does_not_lose_its_bounds():
    kinds = {kind for name in stages.PIPELINES for _, kind, _ in nested_sections(sections(stages.pipeline(name)))}
    for kind, taken in ((each, field) for each in kinds for base in each.__mro__[1:-1] for field in dataclasses.fields(base)):
        own = kind.__dataclass_fields__[taken.name]
        assert own.metadata["bounds"] or not taken.metadata["bounds"], f"{kind}: {taken.name}"


@pytest.mark.parametrize(("found", "section", "field", "kind", "shape"), SETTINGS)
def test_a_number_beyond_its_bounds_is_refused_in_one_line(found, section, field, kind, shape):
    low, high = field.metadata["bounds"] or (NUMBER if kind is float else WHOLE)
    below, above = (low - 1, high + 1) if kind is int else (low - max(1e-9, abs(low) * 1e-3), high * 1.001)
    for value in (below, above, kind(-1e30), kind(1e30)):
        refused(found, section, field.name, shape(value))
    if kind is int:
        refused(found, section, field.name, shape(10**4000))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "rank", 10_000),
        ("train.noise", "mean", 1e9),
        ("train.schedule", "warmup_steps", 10**23),
        ("train", "seed", 2**64),
        ("train.validation", "share", 0),
        ("buckets", "resolutions", [1_000_000]),
        ("samples", "width", 1_600_000),
        ("images", "folder", ""),
        ("images", "folder", "a\0b"),
        ("captions", "preview_prompts", ["x"] * 100_000),
    ],
)
def test_an_absurd_value_is_refused_before_anything_is_loaded(section, name, value):
    refused(sections(stages.pipeline("text_to_image")), section, name, value)
