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
    """The texts that the user may edit in one list of a web page, with the edits so far. `block` describes the list.
    `catalog` runs queries on the tables of the project. `folder` is the project's folder.
    """

    def __init__(self, catalog: Catalog, block: Editor, folder: Path) -> None:
        self.catalog, self.block, self.folder = catalog, block, folder
        edits: dict[str, str] = load(block.read)(folder)
        self.values: Row = {"keys": list(edits), "texts": list(edits.values())}

    def rows(self, sql: str, **values: Any) -> list[Row]:
        """Run an SQL query on the texts and return its rows as dicts. `sql` is the query, a `select` statement. The
        query may read the table `shown`, which has one row per text. All further keyword arguments (`**values`) are
        parameters of the query. For example, `rows(sql, find="cat")` sets the parameter `$find` to "cat". Raises
        ValueError if a parameter contains half of a surrogate pair.

        The table `shown` has the columns of the block. Its column `text` is the text after the user's edit. `edited` is
        true if there is an edit. `taken_back` is true if the user took an edit back and the stored text still has it.
        """
        import duckdb

        try:
            return self.catalog.rows(SHOWN.format(sql=self.block.sql) + sql, **self.values, **values)
        except duckdb.InvalidInputException:
            raise ValueError("the text must be valid Unicode, got half of a surrogate pair") from None

    def of_keys(self, keys: list[str]) -> dict[str, str]:
        """Return some of the texts, as a dict from key to text. `keys` are the keys of the wanted texts. Unknown keys
        are left out.
        """
        found = self.rows("select key, text from shown where key in (select unnest($wanted::varchar[]))", wanted=keys)
        return {row["key"]: row["text"] for row in found}

    def replaced(self, find: str, by: str) -> dict[str, dict[str, Any]]:
        """Return the edits that replace `find` by `by` in every text. The result is a dict. Its keys are those of the
        texts that contain `find`. Each value is a dict, such as {"before": "a cat", "edited": False, "text": "a dog"}.
        "before" and "text" are the text before and after. "edited" is True if the text already has an edit. Upper and
        lower case count as different.
        """
        found = self.rows("select key, text as before, edited from shown where contains(text, $find) order by key", find=find)
        return {row.pop("key"): row | {"text": row["before"].replace(find, by)} for row in found}


def editor_data(catalog: Catalog, block: Editor, chosen: Mapping[str, str], folder: Path) -> Row:
    """Return the data of a web page on which the user edits texts, as a dict. `catalog` is the open database of the
    project. `block` describes the list of texts. `chosen` holds what the user chose: "page" is the page number, and
    "find" is a search text. Only texts that contain "find" are shown. Upper and lower case count as the same. `folder`
    is the project's folder, where the edits lie.

    "texts" of the result has the rows to show. "count" is the number of texts found, "edits" the number of edited
    texts. "page" (from 0) and "pages" number the pages. "find" is the user's. "phrases" lists pairs of a phrase and the
    number of texts that have it, for the most frequent phrases; phrases are the parts of a text between commas. "note"
    tells the user what an edit does. "files" is True if the edits can be written into files of the user.
    """
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
