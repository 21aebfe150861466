"""The local web page of a project. Starlette, uvicorn and plotly are the extra `view`."""

import os

# Read when Arrow and DuckDB are loaded. Arrow's usual pool keeps the most that it ever used, 45 MB more after the pages of a
# large project; DuckDB's (jemalloc, on Linux) what queries have freed, 15 MB.
SPARING = {"ARROW_DEFAULT_MEMORY_POOL": "system", "DUCKDB_JE_MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0"}
ADDED = SPARING.keys() - os.environ.keys()  # the others, the user has chosen

os.environ.update({name: SPARING[name] for name in ADDED})
