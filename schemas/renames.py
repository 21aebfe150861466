"""Names that tables, manifests and project files written by earlier versions have, and their names today.

`pipeline.store` applies COLUMNS and FOLDERS to tables on disk; `pipeline.project` applies PIPELINES to project.toml.
No name in this file is part of a recipe, so a rename changes none.
"""

COLUMNS = {"part": "shard"}  # of stored rows
FOLDERS = {"parts": "shards"}  # below a table's folder
PIPELINES = {"lora": "text_to_image"}  # [project] pipeline
