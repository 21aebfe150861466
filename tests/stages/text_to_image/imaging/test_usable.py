"""Which images can be used, and under which paths."""

import pyarrow as pa
import pytest

from stages.text_to_image.imaging.usable import usable_paths, usable_rows


def images(*rows):
    return pa.Table.from_pylist([dict(zip(("path", "image_id", "rejected"), row, strict=True)) for row in rows])


def test_an_image_has_the_path_that_is_used_then_its_duplicates_in_order_of_path():
    table = images(
        ("z.png", "1", "duplicate"),
        ("m.png", "1", None),
        ("n.png", "1", "duplicate"),
        ("b.png", "2", None),
        ("c.png", "3", "truncated"),
        ("d.png", "4", "duplicate"),
    )
    assert list(usable_paths(table).items()) == [("2", ["b.png"]), ("1", ["m.png", "n.png", "z.png"])]
    assert [row["path"] for row in usable_rows(table)] == ["b.png", "m.png"]


def test_a_table_without_a_usable_image_is_an_error_that_counts_the_reasons():
    table = images(("a.png", "1", "truncated"), ("b.png", "", "bomb"), ("c.png", "3", "truncated"))
    for function in (usable_rows, usable_paths):
        with pytest.raises(ValueError, match=r"^none of the 3 images can be used: 1 bomb, 2 truncated$"):
            function(table)
