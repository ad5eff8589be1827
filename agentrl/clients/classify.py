"""Ask SGLang's servers of a reward model for the scores of conversations.

The route is `/classify` of a server that was started with `--is-embedding`. A score is requested
from each server in turn; if one fails or is late, from the next one.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import count
from typing import Any, cast

from agentrl.clients.http import Answer, HttpClient
from agentrl.errors import ServiceError

_MAX_ANSWER_BYTES = 2**20
_MIN_ATTEMPTS = 2
_MAX_MESSAGE = 300


class RefusedError(ServiceError):
    """A server refused a row; the others would do the same."""


class ClassifyClient:
    """Scores token ids at one or several servers.

    Args:
        addresses: Such as `http://127.0.0.1:30000`.
        timeout_s: Seconds of one attempt.
        max_concurrency: Requests of this client at the same time.
    """

    def __init__(self, addresses: Sequence[str], *, timeout_s: float, max_concurrency: int) -> None:
        self._clients = [
            HttpClient(f"{address}/classify", headers={}, max_bytes=_MAX_ANSWER_BYTES)
            for address in addresses
        ]
        self._timeout_s, self._max_concurrency = timeout_s, max_concurrency
        self._next = count()

    async def check(self, row: list[int]) -> dict[str, float]:
        """Score one row at every server; the result is by address.

        Raises:
            ServiceError: if a server gives no score.
        """
        try:
            scores = await asyncio.gather(*(self._ask(client, row) for client in self._clients))
        finally:
            await self._close()
        return {
            client.shown_url: score for client, score in zip(self._clients, scores, strict=True)
        }

    async def classify(self, rows: Sequence[list[int]]) -> list[float | Exception]:
        """Score rows of token ids; an exception for each that could not be scored."""
        slots = asyncio.Semaphore(self._max_concurrency)

        async def score(row: list[int]) -> float | Exception:
            async with slots:
                try:
                    return await self._score(row)
                except ServiceError as error:
                    return error

        try:
            return await asyncio.gather(*map(score, rows))
        finally:
            await self._close()

    async def _score(self, row: list[int]) -> float:
        """Score one row at the next server; if that fails, at those after it.

        Raises:
            ServiceError: of the last attempt.
        """
        first, error = next(self._next), ServiceError("there is no server")
        for attempt in range(max(_MIN_ATTEMPTS, len(self._clients))):
            client = self._clients[(first + attempt) % len(self._clients)]
            try:
                return await self._ask(client, row)
            except RefusedError:
                raise
            except ServiceError as failed:
                error = failed
        raise error

    async def _ask(self, client: HttpClient, row: list[int]) -> float:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await client.send("POST", body={"input_ids": row})
        except TimeoutError:
            raise ServiceError(
                f"{client.shown_url} has not answered for {self._timeout_s:g} s",
                service=client.shown_url,
            ) from None
        return read_score(answer, service=client.shown_url)

    async def _close(self) -> None:
        for client in self._clients:
            await client.close()


def read_score(answer: Answer, *, service: str) -> float:
    """Read the score of a model with one label from an answer of `/classify`.

    Raises:
        RefusedError: if another server would give none either.
        ServiceError: if there is none.
    """
    if answer.status != HTTPStatus.OK:
        raise _refusal(answer, service)
    found: Any = answer.json(service=service)
    labels = cast("dict[str, Any]", found).get("embedding") if isinstance(found, dict) else None
    if not isinstance(labels, list) or len(cast("list[Any]", labels)) != 1:
        num = len(cast("list[Any]", labels)) if isinstance(labels, list) else "no"
        raise RefusedError(
            f"{service} returned {num} numbers for one conversation",
            service=service,
            expected="one: a server of a reward model with one label, started with --is-embedding",
        )
    label = labels[0]
    if label is None:  # a number that is not finite, in SGLang's JSON
        return float("nan")
    if not isinstance(label, int | float):
        raise RefusedError(
            f"{service} returned {label!r:.{_MAX_MESSAGE}} as a score",
            service=service,
            expected="a number",
        )
    return float(label)


def _refusal(answer: Answer, service: str) -> ServiceError:
    text = answer.text
    with suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["error"]["message"])
    kind = RefusedError if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else ServiceError
    return kind(
        f"{service} answered with status {answer.status}: {text[:_MAX_MESSAGE] or 'no message'}",
        service=service,
    )
