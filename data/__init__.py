"""Data that the project ships, and the scripts that made it: the example project, the bundled model, experiments, pages.

`pages` writes README.md, recipe.md and their figures; `experiments` measures what settings do; `micro` holds the bundled model
and its training. Scripts run as modules, such as `python -m data.pages.recipe`. They import pipeline, stages and schemas; the
program imports nothing from here.
"""

import stages as stages  # loads a fast BLAS; a module that imports mlx.core first would multiply 30 times as slowly on Linux
