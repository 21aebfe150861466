"""Experiments with the bundled model: what EMA, caption dropout, several resolutions and preservation change.

`experiments` trains and measures, and writes results.jsonl; `report` makes the tables and charts of README.md from it. `recipes`
trains with the defaults of other trainers, in memory (`in_memory`); `recipes_page` makes recipes.md from recipes.jsonl. They
import pipeline, stages and schemas.
"""
