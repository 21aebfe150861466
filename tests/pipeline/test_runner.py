"""What a run reports about itself."""

import shutil

from tests import projects


def test_a_row_that_a_run_writes_twice_is_counted_once(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=3)
    shutil.copy(folder / "images" / "picture1.png", folder / "images" / "copy of picture1.png")
    outcome = projects.build(folder, "images")["images"]  # the copy's row is written again once it is known as a duplicate
    assert projects.content(folder, "images")["rejected"].to_pylist().count("duplicate") == 1
    assert (outcome.written, outcome.rows) == (4, 4)
    assert projects.build(folder, "images")["images"].up_to_date
