"""The stage `samples`, and what only it uses: which adapters draw (sources), drawing, decoding, and the grid of all
previews.

Imports `stages.models.family`, `stages.tuner`, `stages.stage` and `schemas`, and no other stage. `drawing` and `decoding` also
serve the Python API.
"""

from stages.text_to_image.samples.stage import STAGE

__all__ = ["STAGE"]
