"""The stage `descriptions`: captions by a vision-language model, for images that have none.

`stage.py` says which images have no caption, `local.py` runs a model of transformers, `server.py` asks a server on this machine.
Nothing outside this folder imports more than STAGE; the folder imports `caption_files`, `imaging`, the contracts in `stages` and
`schemas`.
"""

from stages.text_to_image.descriptions.stage import STAGE

__all__ = ["STAGE"]
