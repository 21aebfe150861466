"""Reading of image files and masks, for every stage of this pipeline that opens images.

`decode.py` opens a file of any format, `truncation.py` recognises a file that was cut short, `colour.py` converts pixels to
8-bit sRGB, `room.py` bounds the pixels in memory, `masks.py` finds and reads masks, `usable.py` says which images and paths
can be used. It imports no stage.
"""
