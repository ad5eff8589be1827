import asyncio
import threading
from collections.abc import Sequence

import pytest

from agentrl.rollout.templates.text import MAX_INLINE_CHARACTERS, EncodingQueue


class Lengths:
    """Encodes a text as its length, refuses a `!`, and remembers what it was given at once."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.batches.append(list(texts))
        if any("!" in text for text in texts):
            raise ValueError("!")
        return [[len(text)] for text in texts]


async def test_texts_of_one_turn_of_the_loop_are_encoded_together():
    encode = Lengths()
    queue = EncodingQueue(encode)
    found = await asyncio.gather(queue.encode(["a"]), queue.encode(["bb", "ccc"]), queue.encode([]))
    assert found == [[[1]], [[2], [3]], []]
    assert encode.batches == [["a", "bb", "ccc"]]


async def test_failures_are_data_a_text_that_cannot_be_encoded_costs_its_own_request():
    queue = EncodingQueue(Lengths())
    asked = (queue.encode(["a"]), queue.encode(["b!"]), queue.encode(["cc"]))
    first, broken, last = await asyncio.gather(*asked, return_exceptions=True)
    assert (first, last) == ([[1]], [[2]])
    assert isinstance(broken, ValueError)


async def test_a_cancelled_waiter_affects_no_other():
    queue = EncodingQueue(Lengths())
    gone, stays = asyncio.create_task(queue.encode(["a"])), asyncio.create_task(queue.encode(["b"]))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == [[1]]
    with pytest.raises(asyncio.CancelledError):
        await gone


def test_queue_serves_one_event_loop_after_another():
    queue = EncodingQueue(Lengths())
    assert asyncio.run(queue.encode(["a"])) == [[1]]
    assert asyncio.run(queue.encode(["bb"])) == [[2]]


async def test_long_texts_leave_the_event_loop_free_and_later_ones_are_encoded_together():
    encode, may_end = Lengths(), threading.Event()

    def encode_slowly(texts: Sequence[str]) -> list[list[int]]:
        assert may_end.wait(10)
        return encode(texts)

    long = "a" * (MAX_INLINE_CHARACTERS + 1)
    queue = EncodingQueue(encode_slowly)
    first = asyncio.create_task(queue.encode([long]))
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(queue.encode([text])) for text in ("b", "cc", "b")]
    await asyncio.sleep(0.01)
    assert not first.done()
    may_end.set()
    assert await first == [[len(long)]]
    assert await asyncio.gather(*later) == [[[1]], [[2]], [[1]]]
    assert encode.batches == [[long], ["b", "cc"]]
