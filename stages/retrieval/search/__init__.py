"""How units are found: MaxSim over token vectors, full-text search over words, their sum, and the measures of a ranking.

`maxsim.py` scores documents exactly, `partitions.py` finds candidates among many millions of vectors, `lexical.py` holds the
full-text index, `fusion.py` adds scores, `measures.py` counts ranks. The modules here know no stage and no table.
"""
