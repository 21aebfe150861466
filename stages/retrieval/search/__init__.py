"""How units are found: MaxSim, full-text search, their sum, and the measures of a ranking. It knows no stage and no table."""
