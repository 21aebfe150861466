"""Generators of the pages data/README.md and data/recipe.md and of the figures in data/figures.

They read schemas, settings and formulas from the code, and the facts about other trainers from rivals.toml. They import
pipeline, stages and schemas.
"""
