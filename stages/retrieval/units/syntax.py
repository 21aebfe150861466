"""Find the functions and classes of other languages with tree-sitter, which is an extra: pip install "latentmill[languages]"."""

from __future__ import annotations

from stages.retrieval.units.unit import Unit


def syntax_units(text: str, language: str, *, classes: bool) -> list[Unit] | None:
    """Return the units of a source text, or None if tree-sitter is not installed or does not know the language."""
    return None
