"""Texts of many requests, encoded together.

A tokenizer encodes many texts in one call at two thirds of what they cost one by one. So whoever
needs the tokens of a text waits until the event loop has heard all who are ready to go on: one
request alone waits for nothing, and the more a loop is under pressure, the more are encoded at
once.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.plugins.call import PerLoop

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Encodes texts from outside."""
Waiting = tuple[asyncio.Future[list[list[int]]], slice]
"""Who waits, and which of a batch's texts are theirs."""


class EncodingQueue:
    """Collects the texts that come up in one turn of the event loop, and encodes them in one call.

    Args:
        encode: Encodes them (`ChatTemplate.encode_texts`).

    Example:
        >>> async def main(template):
        ...     queue = EncodingQueue(template.encode_texts)
        ...     return await asyncio.gather(queue.encode(["one"]), queue.encode(["two", "three"]))
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._batches = PerLoop(self._begin)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, in their order.

        Raises:
            Exception: what the tokenizer raises for these texts; those of others are not touched.
        """
        return await self._batches.get().add(texts)

    def _begin(self) -> "_Batch":
        """Begin a batch, which is encoded in the next turn of the event loop."""
        loop = asyncio.get_running_loop()
        batch = _Batch(loop)
        loop.call_soon(self._close, batch)
        return batch

    def _close(self, batch: "_Batch") -> None:
        self._batches.pop()
        try:
            encoded = self._encode(batch.texts)
        except Exception:  # noqa: BLE001 - told below to the one whose text it is
            batch.answer_each(self._encode)
        else:
            batch.answer(encoded)


@dataclass(eq=False, slots=True)
class _Batch:
    loop: asyncio.AbstractEventLoop
    texts: list[str] = field(default_factory=list[str])
    waiting: list[Waiting] = field(default_factory=list[Waiting])

    def add(self, texts: Sequence[str]) -> asyncio.Future[list[list[int]]]:
        start = len(self.texts)
        self.texts += texts
        future: asyncio.Future[list[list[int]]] = self.loop.create_future()
        self.waiting.append((future, slice(start, len(self.texts))))
        return future

    def answer(self, encoded: list[list[int]]) -> None:
        for future, own in self.waiting:
            if not future.done():
                future.set_result(encoded[own])

    def answer_each(self, encode: Encode) -> None:
        """Encode for each who waits apart, so that a text that cannot be costs its own request."""
        for future, own in self.waiting:
            if future.done():
                continue
            try:
                future.set_result(encode(self.texts[own]))
            except Exception as error:  # noqa: BLE001 - whoever waits is to hear of it
                future.set_exception(error)
