"""The stage `checks`: what may be wrong with images and captions, as measured columns and as warnings.

`stage.py` holds the stage's functions, `config.py` the thresholds, `measures.py` what is measured in one picture, `near.py`
finds near-duplicates, `texts.py` checks captions, `findings.py` makes the warnings. Nothing outside this folder imports more
than STAGE.
"""

from stages.text_to_image.checks.stage import STAGE

__all__ = ["STAGE"]
