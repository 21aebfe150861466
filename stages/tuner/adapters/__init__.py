"""Adapters of frozen Linears: which Linears get one, how it starts, what it adds, how it is merged."""
