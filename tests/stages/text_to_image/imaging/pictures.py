"""Pictures to decode, saved by Pillow or byte by byte."""

import io
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from stages.text_to_image.imaging.decode import ImageError, open_image, probe


def picture(width=48, height=32):
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return Image.fromarray(np.stack([x * 200 + 20, y * 200 + 20, (x + y) * 60 + 60], 2).astype(np.uint8))


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind.split()[0], **options)
    return file.getvalue()


def opened(data, **options):
    return open_image(io.BytesIO(data), **options)


def refused(data):
    with pytest.raises(ImageError) as error:
        probe(io.BytesIO(data))
    return error.value


def chunk(kind, data):
    """Of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, colour, rows, *chunks):
    """Build a PNG file byte by byte, for kinds that Pillow does not write. colour: 0 grey, 2 RGB."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + body + chunk(b"IEND", b"")


def tar(*members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    return file.getvalue()
