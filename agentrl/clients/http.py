"""Send HTTP requests to a service: limited answers, no secrets in texts, connections closed.

Headers carry secrets. They are sent and never shown: they are removed from what a service returns,
and from the error messages of the library.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.errors import ServiceError
from agentrl.messages import dump_json
from agentrl.plugins.call import PerLoop

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_PLAIN_HEADERS = {"accept", "accept-language", "content-type", "user-agent"}
"""Headers that are no secret."""
_MIN_SECRET = 4
"""Characters of a secret; shorter values are in too many texts to be removed."""
_REDACTED = "[redacted]"
_CONNECT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024**2
"""Bytes of one answer: a service may send data without end, and the client would keep all of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a service."""

    status: int
    text: str
    """The body without secrets, up to the limit."""
    is_cut: bool
    """Whether the body was longer than the limit."""

    def json(self, *, service: str) -> Any:
        """Read the body as JSON.

        Raises:
            ServiceError: if it is not JSON.
        """
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise ServiceError(
                f"the answer of {service} is no JSON: {error}: {self.text[:200]!r}",
                service=service,
                expected="JSON",
            ) from None


class HttpClient:
    """Send requests to one service, over connections that are kept for each event loop.

    Args:
        url: The service's address.
        headers: Sent with every request, and never shown.
        max_bytes: Bytes of an answer's body that are read.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], max_bytes: int) -> None:
        self._url = url
        self._headers = dict(headers)
        self._max_bytes = max_bytes
        self._secrets = _secrets(url, headers)
        self._sessions = PerLoop(self._open_session)
        self.shown_url = without_secrets(url)
        """The address without its query and its password: for errors and logs."""

    async def send(
        self, method: str, *, body: Any = None, query: Mapping[str, Any] | None = None
    ) -> Answer:
        """Send one request and read its answer. Redirects are not followed: they get the headers.

        Args:
            method: GET, POST, ...
            body: Sent as JSON; None: no body.
            query: Added to the address.

        Raises:
            ServiceError: if there is no answer.
        """
        from aiohttp import ClientError

        parameters = query_parameters(query or {})
        try:
            async with self._sessions.get().request(
                method, self._url, json=body, params=parameters, allow_redirects=False
            ) as response:
                content = await read_body(response, self._max_bytes)
                is_cut = len(content) > self._max_bytes
                text = _decode(content[: self._max_bytes], response.charset)
                return Answer(response.status, self.redact(text), is_cut)
        except (ClientError, OSError, ValueError) as error:
            raise ServiceError(
                f"{method} {self.shown_url}: {type(error).__name__}: {self.redact(str(error))}",
                service=self.shown_url,
            ) from None

    def redact(self, text: str) -> str:
        """Remove the secrets from a text."""
        for secret in self._secrets:
            text = text.replace(secret, _REDACTED)
        return text

    async def close(self) -> None:
        """Close the connections of this event loop. May be called twice."""
        if (session := self._sessions.pop()) is not None:
            await session.close()

    def _open_session(self) -> "ClientSession":
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        # The tool's `config` limits how many calls run at once, and for how long.
        return ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._headers,
        )


async def read_body(response: "ClientResponse", max_bytes: int) -> bytes:
    """Read a body; stop after the chunk in which it gets longer than `max_bytes`.

    If the result is longer than `max_bytes`, the body was cut, and leaving the response closes the
    connection: the rest may have no end.
    """
    content = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        content += chunk
        if len(content) > max_bytes:
            break
    return bytes(content)


def query_parameters(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write arguments as a query: lists repeat their name, nulls are left out, objects are JSON.

    Example:
        >>> query_parameters({"q": "a b", "n": 2, "deep": True, "tag": ["x", "y"], "none": None})
        [('q', 'a b'), ('n', '2'), ('deep', 'true'), ('tag', 'x'), ('tag', 'y')]
    """
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:  # pyright: ignore[reportUnknownVariableType]
            if item is not None:
                text = item if isinstance(item, str) else dump_json(item)
                pairs.append((name, text))
    return pairs


def without_secrets(url: str) -> str:
    """Return an address without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _secrets(url: str, headers: Mapping[str, str]) -> list[str]:
    """List the secrets, the longest first: the whole of `Bearer abc`, and `abc` by itself."""
    found = [urlsplit(url).password or ""]
    for name, value in headers.items():
        if name.lower() not in _PLAIN_HEADERS:
            found += [value, value.rpartition(" ")[2]]
    return sorted({text for text in found if len(text) >= _MIN_SECRET}, key=len, reverse=True)


def _decode(content: bytes, charset: str | None) -> str:
    """Decode a body as UTF-8 if the service's character set is unknown or is no text encoding."""
    try:
        return content.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):
        return content.decode("utf-8", "replace")


def bounding_hooks(library: Any, max_bytes: int = MAX_BODY_BYTES) -> dict[str, list[Any]]:
    """Make the `event_hooks` of a client of the httpx family, so that its answers are limited.

    A compressed answer is refused: a megabyte of gzip may contain a gigabyte.

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
