"""The stage `captions`: the texts that images are trained with, and the texts that belong to no image.

`stage.py` holds the stage's functions, `config.py` the settings, `rows.py` the rows of the table, `lookup.py` and
`metadata.py` find captions in files, `template.py` fills the template in, `text.py` reads text files. Nothing outside this
folder imports more than STAGE; the folder imports `imaging`, `stages.stage`, `stages.settings` and `schemas`.
"""

from stages.text_to_image.captions.stage import STAGE

__all__ = ["STAGE"]
