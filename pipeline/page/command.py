"""`latentmill view`: shows the tables of a project as a local web page. `latentmill report`: writes them as one HTML file."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.options import with_project

if TYPE_CHECKING:
    from pipeline.page.site import Site
    from pipeline.project.project import Project

NEEDED = "the page needs the extra `view`: make view installs it, or: pip install 'latentmill[view]'"


@click.command("view")
@click.option("--port", default=8765, show_default=True, type=click.IntRange(1, 65535), help="The port on 127.0.0.1.")
@click.option("--open/--no-open", "opened", default=True, help="Open the page in the browser.")
@with_project
def command(port: int, opened: bool, project: Project) -> None:
    """Show the project as a web page on this machine until Ctrl-C. The page is updated while a stage runs. It can change captions
    and nothing else: edits are stored in the project and, on request, written into caption files.
    """
    import socket

    site = _site(project)
    try:
        import uvicorn

        from pipeline.page.app import make_app
    except ModuleNotFoundError:
        raise ValueError(NEEDED) from None
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ValueError(f"port {port} is in use, perhaps by another page; choose one: --port {port + 1}")
    address = f"http://127.0.0.1:{port}"
    click.echo(f"{project.name}: {address} (Ctrl-C ends it)")
    if opened:
        webbrowser.open(address)
    uvicorn.run(make_app(site), host="127.0.0.1", port=port, log_level="warning", server_header=False)


@click.command("report")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@with_project
def report_command(out: Path | None, project: Project) -> None:
    """Write the pages of a project as one HTML file, to keep or to send. OUT is the file; without it, exports/ of the project."""
    try:
        from pipeline.page.report import write_report
    except ModuleNotFoundError:
        raise ValueError(NEEDED) from None
    written = write_report(_site(project), out or project.path / "exports" / f"{project.name}.html")
    click.echo(f"wrote {written}")


def _site(project: Project) -> Site:
    from pipeline.page.site import Site

    return Site(project.path, project.overrides)
