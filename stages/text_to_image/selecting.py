"""Choose images by an SQL condition over measured columns."""

from __future__ import annotations

import pyarrow as pa

from stages.text_to_image.imaging.usable import usable_rows


def select_images(condition: str, images: pa.Table, checks: pa.Table) -> set[str]:
    """The image_ids that meet `condition`. Raises ValueError if it is no valid SQL, reads a file, or none meets it."""
    import duckdb

    # The condition may come from someone else's project.toml: no files, no extensions, and no way to allow them again.
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "autoinstall_known_extensions": "false",
        "lock_configuration": "true",
    }
    shared = [name for name in checks.column_names if name in images.column_names and name != "image_id"]
    usable = {row["image_id"] for row in usable_rows(images)}
    with duckdb.connect(":memory:", config=settings) as connection:
        connection.register("images", images)
        connection.register("checks", checks.drop_columns(shared))
        try:
            # The newline ends a `--` comment in the condition.
            query = f"select image_id from images join checks using (image_id) where rejected is null and ({condition}\n)"
            found = {row[0] for row in connection.execute(query).fetchall()}
        except duckdb.Error as error:
            words = " ".join(str(error).split("LINE ")[0].split())
            raise ValueError(f'buckets.where must be an SQL condition such as "blur < 0.6", got "{condition}": {words}') from None
    if not found & usable:
        raise ValueError(f'buckets.where: none of the {len(usable)} images meets "{condition}"; see latentmill lint')
    return found
