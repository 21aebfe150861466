"""`latentmill view`: shows the tables of a project as a local web page. `latentmill report`: writes them as one HTML file."""

from __future__ import annotations

import base64
import secrets
import threading
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.options import instead_of_project, with_project
from pipeline.page.site import Site
from pipeline.project.project import Project
from pipeline.store.disk import atomic_write
from pipeline.terminal import tell

if TYPE_CHECKING:
    from pipeline.page.door import Door

PICTURE = 256  # pixels: the longer side of a picture in the file
MOST = 400  # pictures; further ones are left out
EXTRA = ("starlette", "uvicorn", "plotly", "tomlkit")  # modules of the extra `view`; others bring some of them too
NEEDED = "the page needs the extra `view`: make view installs it, or: pip install 'latentmill[view]'"


@click.command("view")
@click.option("--port", default=8765, show_default=True, type=click.IntRange(1, 65535), help="The port.")
@click.option("--listen", metavar="ADDRESS", help="Listen on this address of your own network too, with the next three.")
@click.option("--password-file", type=click.Path(path_type=Path), help="A file with the password, which you alone can read.")
@click.option("--certificate", type=click.Path(path_type=Path), help="The certificate, PEM.")
@click.option("--key", type=click.Path(path_type=Path), help="Its key, PEM.")
@click.option("--open/--no-open", "opened", default=True, help="Open the page in the browser.")
@click.argument("folder", required=False, is_eager=True, callback=instead_of_project)
@with_project
def command(port: int, opened: bool, folder: str | None, project: Project | None, **network: Any) -> None:
    """Show the project as a web page on this machine until Ctrl-C. The page is updated while a stage runs. It adds jobs
    to the project's queue, and changes captions: edits are stored in the project and, on request, written into caption files.
    FOLDER shows all projects below it instead, each with its own pages; a folder of one project shows that one.
    """
    import socket

    require_extra()
    import uvicorn

    from pipeline.page.app import make_app, spare_memory
    from pipeline.page.studio import Studio, make_studio

    spare_memory()
    token = secrets.token_urlsafe(24)
    host, hosts, door = listening(**network)
    if project is None:
        studio = Studio(str(folder))
        app, name = make_studio(studio, token, hosts, door), studio.name
        threading.Thread(target=lambda: studio.computed, daemon=True).start()  # seconds, which the page need not wait for
    else:
        app, name = make_app(Site(project.path, project.overrides), token, hosts, door), project.name
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if probe.connect_ex((host, port)) == 0:
            raise ValueError(f"port {port} is in use, perhaps by another page; choose one: --port {port + 1}")
    address = f"{'https' if door else 'http'}://{hosts[0]}:{port}"
    tell(f"{name}: {address} (Ctrl-C ends it)")
    if opened:
        webbrowser.open(address)
    # A listening page never closes its stream of events: do not wait for it.
    options: dict[str, Any] = {"log_level": "warning", "server_header": False, "timeout_graceful_shutdown": 1}
    files = {"ssl_certfile": network["certificate"], "ssl_keyfile": network["key"]} if door else {}
    uvicorn.run(app, host=host, port=port, **options, **files)


def require_extra() -> None:
    if not all(map(find_spec, EXTRA)):
        raise ValueError(NEEDED)


def listening(
    listen: str | None, password_file: Path | None, certificate: Path | None, key: Path | None
) -> tuple[str, tuple[str, ...], Door | None]:
    """The address to bind, the hosts that requests may name, and the door: none on 127.0.0.1. Raises ValueError."""
    from pipeline.page.app import HOSTS
    from pipeline.page.door import Door, address_of, check_certificate, password_of

    if not (listen or password_file or certificate or key):
        return HOSTS[0], HOSTS, None
    if not (listen and password_file and certificate and key):
        raise ValueError("view --listen needs --password-file, --certificate and --key, and they need --listen")
    address = address_of(listen)
    check_certificate(certificate, key)
    shown = f"[{address}]" if ":" in address else address
    return address, tuple(dict.fromkeys((shown if listen == address else listen, shown))), Door(password_of(password_file))


@click.command("report")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@with_project
def report_command(out: Path | None, project: Project) -> None:
    """Write the pages of a project as one HTML file, to keep or to send. OUT is the file; without it, exports/ of the project."""
    require_extra()
    if out and out.exists() and out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{out} exists and is not an .html file; choose another name")
    written = write_report(Site(project.path, project.overrides), out or project.path / "exports" / f"{project.name}.html")
    tell(f"wrote {written}")


def write_report(site: Site, out: Path) -> Path:
    from markupsafe import Markup

    from pipeline.page.app import HERE, script_of_charts, templates

    embedded: dict[str, str] = {}

    def picture(name: str, size: int | str = PICTURE) -> str:
        if name not in embedded:
            try:
                content = site.picture(name, PICTURE) if len(embedded) < MOST else b""
            except (ValueError, OSError):
                content = b""
            embedded[name] = f"data:image/webp;base64,{base64.b64encode(content).decode()}" if content else "data:,"
        return embedded[name]

    site.refresh()
    environment = templates()
    titles = {name: title for name, title in site.titles().items() if name not in ("sql", "settings")}
    fragments: dict[str, Any] = {}
    for name in titles:
        text = environment.get_template("fragment.html").render(page=name, single=True, picture=picture, **site.data(name, {}))
        fragments[name] = Markup(text)
    page = environment.get_template("shell.html").render(
        project=site.project.name,
        titles=titles,
        page="overview",
        token="",
        above=False,
        single=True,
        content="",
        fragments=fragments,
        style=Markup((HERE / "static" / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "static" / "page.js").read_text(encoding="utf-8")),
        # It stands in a script element, which "</script" would end.
        charts=Markup(script_of_charts().read_text(encoding="utf-8").replace("</script", "<\\/script")),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return out
