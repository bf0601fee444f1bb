"""Decompresses bodies, up to a maximum size, with the codec that a record's flags name."""

from __future__ import annotations

import zlib
from typing import Final

import pyarrow as pa

from orderedmq.model import MAX_BODY_BYTES
from orderedmq.rocketmq.codec.stored_message import COMPRESSION_MASK, COMPRESSION_SHIFT

#: The maximum size of a decompressed body in bytes: four times what a broker accepts by default. A larger body counts as a
#: decompression bomb, because a few hundred bytes of zstd can expand to gigabytes.
MAX_BYTES: Final = 4 * MAX_BODY_BYTES
#: Codecs by ``CompressionType``. Producers before 4.9.4 and 5.0 send 0. lz4 means its frame format (``LZ4FrameOutputStream``).
_CODECS: Final = {0: "zlib", 1: "lz4", 2: "zstd", 3: "zlib"}


class BodyError(Exception):
    """A body cannot be decompressed. The text says why."""


def decompress(body: bytes, sys_flag: int) -> bytes:
    """Return the decompressed body of a message with the flag COMPRESSED; an empty body stays empty. Raises BodyError."""
    if not body:
        return body
    number = (sys_flag & COMPRESSION_MASK) >> COMPRESSION_SHIFT
    codec = _CODECS.get(number)
    if codec is None:
        raise BodyError(f"its body is compressed with the unknown method {number}")
    try:
        plain = _inflate(body) if codec == "zlib" else _stream(body, codec)
    except (zlib.error, OSError, pa.ArrowException) as error:
        raise BodyError(f"its body of {len(body)} bytes is not {codec} ({error})".replace("\n", " ")) from error
    if len(plain) > MAX_BYTES:
        raise BodyError(f"its body of {len(body)} bytes of {codec} expands to more than the limit of {MAX_BYTES} bytes")
    return plain


def _inflate(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    plain = stream.decompress(body, MAX_BYTES + 1)
    if not stream.eof and len(plain) <= MAX_BYTES:
        raise zlib.error("it is cut off")
    return plain


def _stream(body: bytes, codec: str) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
        plain: bytes = stream.read(MAX_BYTES + 1)
    return plain
