"""What every table looks like: `table.py` describes one, beside it are those of each pipeline. Imports only pyarrow."""
