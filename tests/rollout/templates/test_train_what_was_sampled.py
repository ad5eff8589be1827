"""sampled tokens: what was sampled is what is trained, through any number of turns."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.messages import Message
from agentrl.rollout.records import Turn
from agentrl.rollout.templates import ChatTemplate, check_ledger
from tests.fakes.templates import (
    assistant,
    load_template,
    load_tokenizer,
    make_template,
    read_source,
    render_really,
    schema,
    system,
    tool,
    user,
)

WITH_TOOLS = ("qwen2_5", "qwen3_instruct_2507", "llama3_2")
WITHOUT_TOOLS = ("cohere2", "gemma3", "phi3_5")
STABLE = (*WITH_TOOLS, *WITHOUT_TOOLS)

WORDS = st.text(alphabet="abc XYZ.,!?\n12é漢{}\"'\\", min_size=1, max_size=20).map(
    lambda text: f"a{text.strip()}z"
)


@dataclass(frozen=True)
class Played:
    """A ledger and the conversation that it is the ledger of."""

    messages: list[Message]
    prompt_ids: list[int]
    response_ids: list[int]
    turns: list[Turn]
    completions: list[list[int]]


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[Message], list[list[Message]], list]:
    """A prompt, the replies between completions, and the completions (text, ended by itself)."""
    prompt = [system(draw(WORDS)), user(draw(WORDS))]
    completions = draw(st.lists(st.tuples(WORDS, st.booleans()), min_size=1, max_size=5))
    replies: list[list[Message]] = []
    for _ in completions:
        num_results = draw(st.integers(0, 3)) if name in WITH_TOOLS else 0
        results = [tool(draw(WORDS), number) for number in range(num_results)]
        asks = not results or (draw(st.booleans()) and name in WITH_TOOLS)
        replies.append([*results, *([user(draw(WORDS))] if asks else [])])
    return prompt, replies, completions


def play(
    template: ChatTemplate,
    prompt: list[Message],
    replies: list[list[Message]],
    completions: list[tuple[str, bool]],
) -> Played:
    """Play a conversation as a rollout does: append what is sampled, then the delta."""
    end = load_tokenizer().encode(template.structure.end_of_turn.text, add_special_tokens=False)
    messages, prompt_ids = list(prompt), template.encode_prompt(prompt)
    response_ids: list[int] = []
    turns: list[Turn] = []
    sampled_ids: list[list[int]] = []
    for (text, ends), reply in zip(completions, replies, strict=True):
        sampled = [*template.encode_policy_text(text), *(end if ends else [])]
        start = len(response_ids)
        response_ids += sampled
        stop = len(response_ids)
        turns.append(Turn(index=len(turns), role="assistant", start=start, end=stop))
        sampled_ids.append(sampled)
        delta = template.encode_delta(reply, last_ids=sampled).ids
        response_ids += delta
        turns.append(Turn(index=len(turns), role="tool", start=stop, end=len(response_ids)))
        messages += [assistant(text), *reply]
    return Played(messages, prompt_ids, response_ids, turns, sampled_ids)


@pytest.mark.parametrize("name", STABLE)
def test_sampled_tokens_deltas_add_up_to_the_rendering_of_the_whole(name: str) -> None:
    template = load_template(name)

    @settings(max_examples=25, deadline=None)
    @given(conversations(name))
    def holds(drawn) -> None:
        played = play(template, *drawn)
        whole = template.decode([*played.prompt_ids, *played.response_ids])
        assert whole == render_really(name, played.messages)

    holds()


@pytest.mark.parametrize("name", STABLE)
def test_sampled_tokens_are_in_the_ledger_unchanged(name: str) -> None:
    template = load_template(name)

    @settings(max_examples=10, deadline=None)
    @given(conversations(name))
    def holds(drawn) -> None:
        played = play(template, *drawn)
        turns = [turn for turn in played.turns if turn.role == "assistant"]
        for turn, sampled in zip(turns, played.completions, strict=True):
            assert played.response_ids[turn.start : turn.end] == sampled

    holds()


@pytest.mark.parametrize("name", STABLE)
def test_sampled_tokens_a_ledger_built_by_deltas_shows_no_difference(name: str) -> None:
    template = load_template(name)

    @settings(max_examples=20, deadline=None)
    @given(conversations(name))
    def holds(drawn) -> None:
        played = play(template, *drawn)
        differences = check_ledger(
            template,
            played.messages,
            [],
            prompt_ids=played.prompt_ids,
            response_ids=played.response_ids,
            turns=played.turns,
            mode="strict",
        )
        assert differences == []

    holds()


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=30), budget=st.integers(0, 12))
def test_sampled_tokens_a_turn_that_is_cut_anywhere_gets_one_end_of_turn(
    text: str, budget: int
) -> None:
    template = load_template("qwen2_5")
    end = load_tokenizer().encode("<|im_end|>", add_special_tokens=False)
    sampled = [*template.encode_policy_text(text), *end][:budget]
    ids = [*sampled, *template.encode_delta([user("More?")], last_ids=sampled).ids]
    before = ids[: ids.index(151644)]
    assert before.count(end[0]) == 1
    assert template.decode(before).endswith("<|im_end|>\n")
    assert ids[: len(sampled)] == sampled


def test_sampled_tokens_a_delta_does_not_depend_on_what_was_cached_before_it() -> None:
    """Shapes are cached; the texts of one request never show up in another's delta."""
    first, second = load_template("qwen3"), make_template(read_source("qwen3"))
    for number in range(3):
        replies = [tool(f"result {number}", 0), user(f"and {number}?")]
        cached = first.encode_delta(replies, last_ids=[1], tools=[schema()])
        assert f"result {number}" in first.decode(cached.ids)
        assert "result 9" not in first.decode(cached.ids)
    fresh = second.encode_delta([tool("x"), user("y")], last_ids=[1]).ids
    assert fresh == first.encode_delta([tool("x"), user("y")], last_ids=[1]).ids
