"""The local web page of a project. Starlette, uvicorn and plotly are the extra `view`."""
