"""What every table looks like: `table.py` has the description of a table, each folder the tables of one pipeline.

Modules here import pyarrow and each other, and nothing else of this project.
"""
