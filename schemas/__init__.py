"""What every table looks like: `table.py` describes one, each folder holds those of a pipeline. Imports only pyarrow."""
