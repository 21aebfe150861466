"""A second pipeline, for tests: lines of text files become token ids, and a small encoder is trained to tell them apart.

It uses only the contracts of `stages` and `schemas`. Nothing outside this folder knows it: a project names it by
`[project] pipeline = "tests.toy"`.
"""

from pipeline.commands import Own
from stages.pipelines import Folder, Panel, Pipeline, View

PIPELINE = Pipeline(
    name="tests.toy",
    doc="lines of text become token ids, and an encoder that tells them apart",
    stages={"lines": "tests.toy.lines", "tokens": "tests.toy.tokens", "train": "tests.toy.train"},
    resources={"text_folder": Folder("lines", "folder")},
    results=("train",),
    views={"long_lines": View("select text, words from lines where words > 3", "lines of more than three words")},
    follow="tests.toy.follow:CHAIN",
    panels=(Panel("words", "Words per line", "select words, count(*) as lines from lines group by words order by words"),),
)
OWN = Own(commands={name: f"tests.toy.commands:{name}" for name in ("longest", "mark")})
