"""Bound the bodies that an HTTP client of the httpx family reads."""

from collections.abc import AsyncIterator
from typing import Any

MAX_BODY_BYTES = 16 * 1024**2
"""Of one answer: a service may send bytes without end, and the client would keep them all."""


def bounding_hooks(library: Any, max_bytes: int = MAX_BODY_BYTES) -> dict[str, list[Any]]:
    """Make the `event_hooks` of a client whose answers are bounded.

    A compressed answer is refused: a megabyte of gzip may hold a gigabyte.

    Args:
        library: `httpx`, or a library with the same classes.
        max_bytes: Bytes of one answer's body; more raise the library's `ReadError`.
    """

    class BoundedBody(library.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for chunk in self._stream:
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise library.ReadError(f"the answer has more than {max_bytes} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def ask_for_plain_text(request: Any) -> None:
        request.headers["Accept-Encoding"] = "identity"

    async def bound(response: Any) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise library.ReadError(f"the answer is compressed ({encoding[:20]}), though not asked")
        response.stream = BoundedBody(response.stream)

    return {"request": [ask_for_plain_text], "response": [bound]}
