"""What every table looks like. `table.py` holds the description of a table. Each folder holds the tables of one pipeline.

Modules here import pyarrow and each other, and nothing else of this project.
"""
