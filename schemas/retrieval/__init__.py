"""The tables of the pipeline retrieval, one file per table. They import `schemas.table` and nothing else."""
