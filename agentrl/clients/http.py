"""Talk to a service over HTTP: bounded answers, no secret in any text, connections given back.

Headers carry secrets. They are sent and never told: what a service sends back, and what a library
says of a failure, has them cut out before anybody reads it.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from agentrl.errors import ServiceError
from agentrl.plugins.call import PerLoop

if TYPE_CHECKING:
    from aiohttp import ClientSession


_PLAIN_HEADERS = {"accept", "accept-language", "content-type", "user-agent"}
"""Headers that are no secret."""
_MIN_SECRET = 4
"""Characters: what is shorter is no secret, and stands in too many texts."""
_REDACTED = "[redacted]"
_CONNECT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service answered."""

    status: int
    text: str
    """The body, without secrets; what was behind the limit is missing."""
    is_cut: bool
    """Whether the body was longer than the limit."""

    def json(self, *, service: str) -> Any:
        """Read the body as JSON.

        Raises:
            ServiceError: where it is none.
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
        headers: Sent with every request, and shown nowhere.
        max_bytes: Of an answer's body; no more is read.
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
        """Send one request, and read its answer. Redirects are not followed: headers go with them.

        Args:
            method: GET, POST, ...
            body: Sent as JSON; None: no body.
            query: Added to the address.

        Raises:
            ServiceError: where there is no answer.
        """
        from aiohttp import ClientError

        session = self._sessions.get()
        parameters = query_parameters(query or {})
        try:
            async with session.request(
                method, self._url, json=body, params=parameters, allow_redirects=False
            ) as response:
                content, is_cut = bytearray(), False
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    content += chunk
                    if len(content) > self._max_bytes:
                        is_cut = True
                        break  # leaving closes the connection: the rest may have no end
                text = _decode(bytes(content[: self._max_bytes]), response.charset)
                return Answer(response.status, self.redact(text), is_cut)
        except (ClientError, OSError, ValueError) as error:
            raise ServiceError(
                f"{method} {self.shown_url}: {type(error).__name__}: {self.redact(str(error))}",
                service=self.shown_url,
            ) from None

    def redact(self, text: str) -> str:
        """Cut the secrets out of a text."""
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
                text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
                pairs.append((name, text))
    return pairs


def _secrets(url: str, headers: Mapping[str, str]) -> list[str]:
    """List what must not be shown, the longest first: `Bearer abc` whole, and `abc` by itself."""
    found = [urlsplit(url).password or ""]
    for name, value in headers.items():
        if name.lower() not in _PLAIN_HEADERS:
            found += [value, value.rpartition(" ")[2]]
    return sorted({text for text in found if len(text) >= _MIN_SECRET}, key=len, reverse=True)


def without_secrets(url: str) -> str:
    """Return an address without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _decode(content: bytes, charset: str | None) -> str:
    """Decode a body; a service may name a character set that does not exist, or decodes no text."""
    try:
        return content.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):
        return content.decode("utf-8", "replace")


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
