"""Choose images by an SQL condition over measured columns."""

from __future__ import annotations

import pyarrow as pa

from stages.text_to_image.imaging.usable import usable_rows


def select_images(condition: str, images: pa.Table, checks: pa.Table) -> set[str]:
    """Return the image_ids of the images that are not rejected and meet `condition`. `condition` is an SQL expression
    such as "blur < 0.6". It may use the columns of `images` and `checks`, which are the tables of these names. Raises
    ValueError if `condition` is no valid SQL, tries to read a file, or is met by no image that can be trained on.
    """
    import duckdb

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
            query = f"select image_id from images join checks using (image_id) where rejected is null and ({condition}\n)"
            found = {row[0] for row in connection.execute(query).fetchall()}
        except duckdb.Error as error:
            words = " ".join(str(error).split("LINE ")[0].split())
            raise ValueError(f'buckets.where must be an SQL condition such as "blur < 0.6", got "{condition}": {words}') from None
    if not found & usable:
        raise ValueError(f'buckets.where: none of the {len(usable)} images meets "{condition}"; see latentmill lint')
    return found
