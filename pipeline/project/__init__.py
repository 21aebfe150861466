"""What a project is: its settings, recipes (which name the folders of tables), weights and tables.

`config` and `parse` read project.toml, `recipe` hashes what decides a table's rows, `hub` finds weights, `init` writes new
projects, `project` combines them, `tables` reads a finished table. Imports `pipeline.store`, `stages` and `schemas`.
"""
