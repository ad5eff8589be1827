"""Prompts: their budget, the side that is cut, and when a rendering is shared."""

from typing import Any

import pytest

from agentrl.errors import DataError
from agentrl.messages import Message
from agentrl.rollout.fitting import MAX_CACHED_GROUPS, PromptEncoder
from tests.fakes.plugins import FakeTool, decode, make_request, tiny_template

OPEN, CLOSE = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def encoder(max_tokens: int, truncation: Any = "error") -> PromptEncoder:
    return PromptEncoder(tiny_template(), max_tokens=max_tokens, truncation=truncation)


def test_a_prompt_within_its_budget_is_whole():
    prompt = encoder(100).encode(make_request("Hello"))
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
def test_a_cut_keeps_the_generation_prompt(side: str, text: str):
    generation = tiny_template().generation_prompt_ids
    prompt = encoder(len(generation) + 7, side).encode(make_request("abcdefghij"))
    shown = decode(prompt.ids)
    assert len(prompt.ids) == len(generation) + 7
    assert shown.endswith("<|im_start|>assistant\n")
    assert shown.startswith(text)
    whole = encoder(1000).encode(make_request("abcdefghij"))
    assert prompt.num_cut == len(whole.ids) - len(prompt.ids)


def test_a_budget_below_the_generation_prompt_is_kept_too():
    prompt = encoder(4, "right").encode(make_request("abc"))
    assert len(prompt.ids) == 4


def test_an_overlong_prompt_is_refused_with_its_numbers():
    with pytest.raises(DataError, match=r"a prompt of 22 tokens is longer than .*, 21"):
        encoder(21).encode(make_request("abc"))


def test_what_differs_within_a_uid_is_never_shared():
    encode = encoder(1000).encode
    texts = ["one", "two", "one"]
    shown = [decode(encode(make_request(text, uid="same")).ids) for text in texts]
    assert shown == [f"{OPEN}{text}{CLOSE}" for text in texts]
    opened = make_request("one", uid="same")
    opened.messages.append(Message(role="tool", content="Here.", name="lookup"))
    assert "Here." in decode(encode(opened).ids)
    tooled = make_request("one", uid="same", tool_schemas=[FakeTool().tool_schema])
    assert "lookup" not in decode(encode(make_request("one", uid="same")).ids)
    assert "lookup" in decode(encode(tooled).ids)


def test_a_group_shares_one_rendering():
    prompts = encoder(200)
    first = prompts.encode(make_request("one", uid="same"))
    assert prompts.encode(make_request("one", uid="same")) is first
    assert prompts.encode(make_request("one", uid="other")) is not first


def test_the_cache_does_not_grow_for_ever():
    prompts = encoder(200)
    for number in range(MAX_CACHED_GROUPS + 10):
        prompts.encode(make_request("one", uid=str(number)))
    assert len(prompts._cached) == MAX_CACHED_GROUPS
