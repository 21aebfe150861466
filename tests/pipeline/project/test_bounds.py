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


@pytest.mark.parametrize("pipeline", stages.PIPELINES)
def test_a_number_beyond_its_bounds_is_refused_in_one_line_in_every_setting(pipeline):
    found, count = sections(stages.pipeline(pipeline)), 0
    for section, config, _ in nested_sections(found):
        hints = typing.get_type_hints(config)
        every = [(field, *numeric(member)) for field in dataclasses.fields(config) for member in members(hints[field.name])]
        for field, kind, shape in (each for each in every if each[1]):
            low, high = field.metadata["bounds"] or (NUMBER if kind is float else WHOLE)
            below, above = (low - 1, high + 1) if kind is int else (low - max(1e-9, abs(low) * 1e-3), high * 1.001)
            for value in (below, above, kind(-1e30), kind(1e30), *([10**4000] if kind is int else [])):
                refused(found, section, field.name, shape(value))
            count += 1
    assert count > 40
