"""Large histories: refused before they are encoded, and rendered next to other calls."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from agentrl.agent_loops.gateway.prompts import TooLongError, encode_prompt
from agentrl.messages import Message
from agentrl.rollout.states import StopReason
from agentrl.rollout.templates import ChatTemplate
from tests.fakes.plugins import tiny_tokenizer


class CountingTemplate(ChatTemplate):
    """Counts the characters that are encoded."""

    num_encoded = 0

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        self.num_encoded += sum(map(len, texts))
        return super().encode_texts(texts)


async def test_a_history_that_cannot_fit_is_refused_before_it_is_encoded():
    template, limit = CountingTemplate(tiny_tokenizer()), 100
    longest = max(map(len, tiny_tokenizer().get_vocab()))
    assert template.longest_token == longest
    long = [Message(role="user", content="ab" * limit * longest)]
    with pytest.raises(TooLongError) as caught:
        await encode_prompt(long, [], template, limit)
    assert template.num_encoded == 0
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.budget is StopReason.MODEL_LENGTH
    short = [Message(role="user", content="ab" * limit)]
    assert await encode_prompt(short, [], template, limit) == template.encode_prompt(short)


@pytest.mark.parametrize("num_messages", [1, 1500])
async def test_other_calls_run_while_a_large_history_is_encoded(num_messages: int):
    template = ChatTemplate(tiny_tokenizer())
    text = "hello world " * (300_000 // num_messages)
    messages = [Message(role="user", content=text)] * num_messages
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.create_task(tick())
    before = time.monotonic()
    ids = await encode_prompt(messages, [], template, 10**9)
    seconds = time.monotonic() - before
    ticking.cancel()
    assert len(ids) > 300_000
    assert max(gaps) < seconds / 2
