"""The tables of the pipeline text_to_image, one file per table. They import `schemas.table` and nothing else."""
