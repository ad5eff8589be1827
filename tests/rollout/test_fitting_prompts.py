"""Prompts: their budget, the side that is cut, and when a rendering is shared."""

import asyncio
from typing import Any

import pytest

from agentrl.errors import DataError
from agentrl.messages import Message
from agentrl.rollout.fitting import MAX_CACHED_GROUPS, PromptEncoder
from tests.fakes.plugins import FakeTool, decode, make_request, tiny_template

OPEN, CLOSE = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def encoder(max_tokens: int, truncation: Any = "error") -> PromptEncoder:
    return PromptEncoder(tiny_template(), max_tokens=max_tokens, truncation=truncation)


async def test_a_prompt_within_its_budget_is_whole():
    prompt = await encoder(100).encode(make_request("Hello"))
    assert decode(prompt.ids) == f"{OPEN}Hello{CLOSE}"
    assert prompt.num_cut == 0


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "fghij<|im_end|>\n"),
        ("right", "<|im_start|>user\na"),
        ("middle", "<|im_start|>us"),
    ],
)
async def test_a_cut_keeps_the_generation_prompt(side: str, text: str):
    generation = tiny_template().generation_prompt_ids
    prompt = await encoder(len(generation) + 7, side).encode(make_request("abcdefghij"))
    shown = decode(prompt.ids)
    assert len(prompt.ids) == len(generation) + 7
    assert shown.endswith("<|im_start|>assistant\n")
    assert shown.startswith(text)
    whole = await encoder(1000).encode(make_request("abcdefghij"))
    assert prompt.num_cut == len(whole.ids) - len(prompt.ids)


async def test_a_budget_below_the_generation_prompt_is_kept_too():
    prompt = await encoder(4, "right").encode(make_request("abc"))
    assert len(prompt.ids) == 4


async def test_an_overlong_prompt_is_refused_with_its_numbers():
    with pytest.raises(DataError, match=r"a prompt of 22 tokens is longer than .*, 21"):
        await encoder(21).encode(make_request("abc"))


async def test_what_differs_within_a_uid_is_never_shared():
    encode = encoder(1000).encode
    texts = ["one", "two", "one"]
    shown = [decode((await encode(make_request(text, uid="same"))).ids) for text in texts]
    assert shown == [f"{OPEN}{text}{CLOSE}" for text in texts]
    opened = make_request("one", uid="same")
    opened.messages.append(Message(role="tool", content="Here.", name="lookup"))
    assert "Here." in decode((await encode(opened)).ids)
    tooled = make_request("one", uid="same", tool_schemas=[FakeTool().tool_schema])
    assert "lookup" not in decode((await encode(make_request("one", uid="same"))).ids)
    assert "lookup" in decode((await encode(tooled)).ids)


async def test_a_group_shares_one_rendering():
    prompts = encoder(200)
    first = await prompts.encode(make_request("one", uid="same"))
    assert await prompts.encode(make_request("one", uid="same")) is first
    assert await prompts.encode(make_request("one", uid="other")) is not first


async def test_the_cache_does_not_grow_for_ever():
    prompts = encoder(200)
    for number in range(MAX_CACHED_GROUPS + 10):
        await prompts.encode(make_request("one", uid=str(number)))
    assert len(prompts._cached) == MAX_CACHED_GROUPS


async def test_samples_of_a_group_wait_for_the_one_that_encodes_their_prompt():
    prompts = encoder(200)
    same = [prompts.encode(make_request("one", uid="same")) for _ in range(3)]
    first, *others, other = await asyncio.gather(
        *same, prompts.encode(make_request("two", uid="other"))
    )
    assert all(prompt is first for prompt in others)
    assert other.ids != first.ids


async def test_a_sample_that_is_cancelled_does_not_cost_its_group_the_prompt():
    prompts = encoder(200)
    gone = asyncio.create_task(prompts.encode(make_request("one", uid="same")))
    stays = asyncio.create_task(prompts.encode(make_request("one", uid="same")))
    await asyncio.sleep(0)
    gone.cancel()
    assert decode((await stays).ids) == f"{OPEN}one{CLOSE}"


async def test_a_prompt_that_is_refused_is_refused_for_each_sample():
    prompts = encoder(21)
    asked = [prompts.encode(make_request("abc", uid="same")) for _ in range(3)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in found] == [DataError] * 3
    assert not prompts._cached
