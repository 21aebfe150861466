"""The local web page of a project: `app` answers requests, `blocks` turns a pipeline's pages into data, `report` writes one file.

Templates and the page's own script and style lie beside it. Imports `pipeline.commands` and `pipeline.project`, and is imported
by name from the console command alone. Starlette, uvicorn and plotly are the extra `view`.
"""
