"""Names of earlier versions, each with its name today; no recipe contains them, so a rename leaves all recipes unchanged."""

COLUMNS = {"part": "shard"}  # columns of stored rows
FOLDERS = {"parts": "shards"}  # folders below a table's folder
PIPELINES = {"lora": "text_to_image"}  # values of [project] pipeline
