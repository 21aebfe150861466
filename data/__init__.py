"""What the project ships beside its code, and the scripts that made it: the example project, the bundled model, experiments, pages.

Subpackages: `pages` (writes README.md, recipe.md and their figures), `experiments` (measures what settings do), `micro`
(the bundled model and its training). Scripts run as modules, such as `python -m data.pages.recipe`. They import pipeline, stages and
schemas; none of those, and nothing at run time, imports data.
"""
