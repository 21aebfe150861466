"""Names in tables and project files of earlier versions of this program, each with its name today.

`pipeline.store` applies COLUMNS and FOLDERS when it reads or repairs a table; `pipeline.project` applies PIPELINES to
project.toml. None of these names is part of a recipe, so a rename leaves all recipes unchanged.
"""

COLUMNS = {"part": "shard"}  # columns of stored rows
FOLDERS = {"parts": "shards"}  # folders below a table's folder
PIPELINES = {"lora": "text_to_image"}  # values of [project] pipeline
