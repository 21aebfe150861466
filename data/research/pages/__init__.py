"""Generators of the pages data/docs/tables.md and data/docs/recipe.md and of the figures in data/docs/figures.

They read schemas, settings and formulas from the code, and the facts about other trainers from rivals.toml. They import
pipeline, stages and schemas.
"""
