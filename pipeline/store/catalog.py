"""Links tables/NAME.lance to the rows of finished tables, so that LanceDB lists every table by its name.

`lancedb.connect("PROJECT/tables").open_table("images")` reads the table of the last run. The column `live` is true for the
rows that readers of this program see.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from pipeline.store.disk import TEMPORARY
from pipeline.store.table import TableFolder


def link_table(table: TableFolder) -> None:
    """Point tables/NAME.lance at the rows of `table`. Before a run has finished, only delete a link without a target."""
    tables, name = table.folder.parents[1], table.folder.parent.name
    link, target = tables / f"{name}.lance", Path(name, table.folder.name, table.index.path.name)
    # Some file systems have no symbolic links.
    with suppress(OSError):
        if not table.exists:
            if link.is_symlink() and not link.exists():
                link.unlink()
            return
        if link.is_symlink() and link.readlink() == target:
            return
        if link.is_dir() and not link.is_symlink():  # made by a program that copied the project and followed the link
            shutil.rmtree(link)
        temporary = link.with_name(f"{TEMPORARY}{link.name}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)
