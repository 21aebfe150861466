"""Generated pages are on disk as `make pages` writes them."""

import pytest

from data.research.pages import dictionary, footprint, machines, macs, settings, trainers


@pytest.mark.parametrize("page", [dictionary, footprint, machines, macs, settings, trainers], ids=lambda page: page.FILE.stem)
def test_a_page_is_what_make_pages_writes(page):
    assert page.FILE.read_text(encoding="utf-8") == page.render(), "run: make pages"
