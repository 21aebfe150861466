"""What every table looks like. Nothing here but pyarrow."""
