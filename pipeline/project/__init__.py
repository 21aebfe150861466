"""What a project is: its settings, recipes, weights and the places of its tables.

`config` and `parse` read project.toml, `recipe` names tables, `hub` finds weights, `init` writes new projects, `project` holds
all of it, `tables` reads a finished table. Imports `pipeline.store`, `stages` and `schemas`.
"""
