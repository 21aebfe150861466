"""`latentmill report`: the pages of a project, except SQL, as one HTML file that opens without a server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipeline.page.app import HERE, script_of_charts, templates
from pipeline.page.site import Site
from pipeline.store.disk import atomic_write

PICTURE = 256  # pixels: the longer side of a picture in the file
MOST = 400  # pictures; further ones are left out


def write_report(site: Site, out: Path) -> Path:
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
    titles = {name: title for name, title in site.titles().items() if name != "sql"}
    fragments: dict[str, Any] = {}
    for name in titles:
        text = environment.get_template("fragment.html").render(page=name, single=True, picture=picture, **site.data(name, {}))
        fragments[name] = Markup(text)
    page = environment.get_template("shell.html").render(
        project=site.project.name,
        titles=titles,
        page="overview",
        token="",
        single=True,
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
