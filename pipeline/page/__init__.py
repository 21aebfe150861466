"""The local web page of a project. Starlette, uvicorn and plotly are the extra `view`."""

import os

POOL = "ARROW_DEFAULT_MEMORY_POOL"
CHOSEN = POOL in os.environ  # by the user

# Before Arrow is loaded: its usual pool keeps the most that it ever used, 45 MB more after the pages of a large project.
os.environ.setdefault(POOL, "system")
