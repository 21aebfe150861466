"""Which files are references, of which images, and in which order."""

import pytest

from stages.text_to_image.images.folder import pair_references


@pytest.mark.parametrize(
    ("paths", "folders", "pairs"),
    [
        (["cat.png", "control/cat.jpg"], None, {"control/cat.jpg": ("cat.png", 1)}),
        (["a/cat.png", "a/control/cat.png"], None, {"a/control/cat.png": ("a/cat.png", 1)}),
        (["main/cat.png", "control_1/cat.png"], None, {"control_1/cat.png": ("main/cat.png", 1)}),
        (["main/a/cat.png", "control/a/cat.png"], None, {"control/a/cat.png": ("main/a/cat.png", 1)}),
        (["cat_in.png", "cat_out.webp"], None, {"cat_in.png": ("cat_out.webp", 1)}),
        (["x/1_start.png", "x/1_end.png"], None, {"x/1_start.png": ("x/1_end.png", 1)}),
        (["cat_in.png", "dog_out.png"], None, {}),
        (["cat.png", "control/dog.png"], None, {}),  # a folder of the subject that is only called so
        (["a.png", "control/a.png", "control/b.png"], None, {"control/a.png": ("a.png", 1), "control/b.png": (None, 1)}),
        (["a.png", "y/a.png", "in/x/a.png"], ("y", "in/x"), {"y/a.png": ("a.png", 1), "in/x/a.png": ("a.png", 2)}),
        (["cat.png", "control/cat.png"], (), {}),
        (["cafe\u0301.png", "control/caf\u00e9.png"], None, {"control/caf\u00e9.png": ("cafe\u0301.png", 1)}),
    ],
)
def test_a_reference_has_the_name_of_its_image(paths, folders, pairs):
    assert pair_references(paths, folders) == pairs
    assert pair_references(reversed(paths), folders) == pairs
