"""The texts of a page that the user may edit: choose the texts to show, and apply the user's edits to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.page.catalog import PER_PAGE, Catalog, Row, page_number
from stages.page import Editor
from stages.pipelines import load

# The texts of an editor with the edits that the table does not have yet.
SHOWN = """
with edits as (select unnest($keys::varchar[]) as key, unnest($texts::varchar[]) as text),
shown as (
    select stored.* replace (coalesce(edits.text, stored.text) as text, edits.text is not null as edited),
        stored.edited and edits.text is null as taken_back
    from ({sql}) as stored left join edits using (key)
)
"""
REPEATED = """
select phrase, count(*) as texts from (select distinct key, trim(unnest(string_split(text, ','))) as phrase from shown)
where phrase <> '' group by phrase having count(*) > 1 order by texts desc, phrase limit 12
"""


class Texts:
    """The texts of one editor, with the edits so far."""

    def __init__(self, catalog: Catalog, block: Editor, folder: Path) -> None:
        self.catalog, self.block, self.folder = catalog, block, folder
        edits: dict[str, str] = load(block.read)(folder)
        self.values: Row = {"keys": list(edits), "texts": list(edits.values())}

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """A query over `shown`: the table's texts with the edits, `edited`, `taken_back` (an edit that the table still has)."""
        import duckdb

        try:
            return self.catalog.rows(SHOWN.format(sql=self.block.sql) + sql, **self.values, **values)
        except duckdb.InvalidInputException:
            raise ValueError("the text must be valid Unicode, got half of a surrogate pair") from None

    def of_keys(self, keys: list[str]) -> dict[str, str]:
        """key -> text; unknown keys are left out."""
        found = self.rows("select key, text from shown where key in (select unnest($wanted::varchar[]))", wanted=keys)
        return {row["key"]: row["text"] for row in found}

    def replaced(self, find: str, by: str) -> dict[str, dict[str, Any]]:
        """The edits that replace `find` in every text that contains it, {key: {"before", "edited", "text"}}."""
        found = self.rows("select key, text as before, edited from shown where contains(text, $find) order by key", find=find)
        return {row.pop("key"): row | {"text": row["before"].replace(find, by)} for row in found}


def editor_data(catalog: Catalog, block: Editor, chosen: Mapping[str, str], folder: Path) -> Row:
    """The variables of the template. "phrases": (part between commas, texts that have it), the most frequent."""
    texts, find = Texts(catalog, block, folder), chosen.get("find", "")
    (counted,) = texts.rows(
        "select count(*) filter (contains(lower(text), lower($find))) as texts, count(*) filter (edited) as edits from shown",
        find=find,
    )
    page, pages = page_number(chosen, counted["texts"])
    found = texts.rows(
        "select * from shown where contains(lower(text), lower($find)) order by name, length(key), key "
        f"limit {PER_PAGE} offset {page * PER_PAGE}",
        find=find,
    )
    return {
        "texts": found,
        "find": find,
        "count": counted["texts"],
        "edits": counted["edits"],
        "page": page,
        "pages": pages,
        "phrases": [(row["phrase"], row["texts"]) for row in texts.rows(REPEATED)],
        "note": block.note,
        "files": bool(block.write_files),
    }
