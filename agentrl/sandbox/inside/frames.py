"""Messages on a file descriptor: a length of four bytes (big-endian), then JSON."""

import json
import os
import struct
from typing import Any

HEAD = struct.Struct(">I")


def read_frame(descriptor: int) -> dict[str, Any] | None:
    """Read one frame; return None at the end of the stream."""
    head = _read_exactly(descriptor, HEAD.size)
    body = None if head is None else _read_exactly(descriptor, HEAD.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def pack_frame(record: dict[str, Any]) -> bytes:
    """Encode a record as one frame."""
    body = json.dumps(record).encode()
    return HEAD.pack(len(body)) + body


def write_frame(descriptor: int, record: dict[str, Any]) -> None:
    """Write one frame."""
    data = memoryview(pack_frame(record))
    while data:
        data = data[os.write(descriptor, data) :]
