"""The local web page of a project. Starlette, uvicorn and plotly are the extra `view`."""

import os

POOL = "ARROW_DEFAULT_MEMORY_POOL"  # Arrow reads it once

if POOL not in os.environ:
    # Arrow's usual pool keeps the most that it ever used: 45 MB more, after the pages of a large project.
    os.environ[POOL] = "system"
    import pyarrow

    pyarrow.default_memory_pool()
    del os.environ[POOL]  # not for the processes that the page starts
