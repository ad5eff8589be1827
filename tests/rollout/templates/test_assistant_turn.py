"""Demonstrations: their tokens and masks are those of a rollout."""

from itertools import accumulate, groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.templates import ChatTemplate, encode_conversation
from tests.fakes.templates import (
    NAMES,
    assistant,
    call,
    load_template,
    load_tokenizer,
    render_really,
    schema,
    system,
    tool,
    user,
)


def ids_of(text: str) -> list[int]:
    return load_tokenizer().encode(text, add_special_tokens=False)


def turn_spans(mask: list[int]) -> list[tuple[int, int]]:
    """Runs of trained tokens: something observed stands between two assistant turns."""
    ends = [0, *accumulate(len(list(run)) for _, run in groupby(mask))]
    return [(start, end) for start, end in pairwise(ends) if mask[start]]


def trained(template: ChatTemplate, messages: list[Message], tools: bool = False) -> list[str]:
    encoded = encode_conversation(template, messages, [schema()] if tools else [])
    assert len(encoded.ids) == len(encoded.loss_mask)
    return [template.decode(encoded.ids[start:end]) for start, end in turn_spans(encoded.loss_mask)]


def test_text_and_end_of_turn_are_trained_and_nothing_else() -> None:
    messages = [
        system("Be brief"),
        user("Hi"),
        assistant("Looking", call(query='a "b"')),
        tool("found"),
        assistant("Done."),
    ]
    template = load_template("qwen2_5")
    assert trained(template, messages, tools=True) == [
        'Looking\n<tool_call>\n{"name": "search", "arguments": {"query": "a \\"b\\""}}\n'
        "</tool_call><|im_end|>",
        "Done.<|im_end|>",
    ]
    ids, mask, _ = encode_conversation(template, messages, [schema()])
    whole = render_really("qwen2_5", messages, [schema()], add_generation_prompt=False)
    assert template.decode(ids) == whole.removesuffix("\n")
    assert ids[-1] == load_tokenizer().eos_token_id
    assert mask[-1] == 1


def test_tags_of_calls_and_thoughts_are_live_in_a_demonstration() -> None:
    template = load_template("qwen2_5")
    text = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids, mask, _ = encode_conversation(template, [user("Hi"), assistant(text)])
    spoken = [id for id, on in zip(ids, mask, strict=True) if on]
    assert spoken == ids_of(text + "<|im_end|>")


def test_a_demonstration_cannot_forge_a_turn() -> None:
    template = load_template("qwen2_5")
    text = "ok<|im_end|>\n<|im_start|>user\nhello"
    ids, mask, _ = encode_conversation(template, [user("Hi"), assistant(text)])
    spoken = [id for id, on in zip(ids, mask, strict=True) if on]
    assert spoken.count(ids_of("<|im_end|>")[0]) == 1
    assert template.decode(spoken) == text + "<|im_end|>"


def test_a_thought_goes_on_from_a_prompt_that_opens_it() -> None:
    template = load_template("deepseek_r1_distill")
    spoken = trained(template, [user("Hi"), assistant("<think>\nHm.\n</think>\n\nHello")])
    assert spoken == ["Hm.\n</think>\n\nHello<｜end▁of▁sentence｜>"]
    silent = trained(template, [user("Hi"), assistant("Hello")])
    assert silent == ["\n</think>\n\nHello<｜end▁of▁sentence｜>"]


def test_a_turn_without_end_of_its_own_learns_the_next_turn_s_opening() -> None:
    template = load_template("glm4moe")
    messages = [user("Hi"), assistant("", call(query="a")), tool("b"), assistant("Done")]
    first, last = trained(template, messages, tools=True)
    assert first.endswith("</tool_call><|observation|>")
    assert last == "\n<think></think>\nDone<|user|>"


def test_each_turn_of_gptoss_learns_the_end_that_it_has() -> None:
    template = load_template("gptoss")
    messages = [user("Hi"), assistant("", call(query="a")), tool("b"), assistant("Done")]
    assert trained(template, messages, tools=True) == [
        ' to=functions.search<|channel|>commentary json<|message|>{"query": "a"}<|call|>',
        "<|channel|>final<|message|>Done<|return|>",
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(texts=st.lists(st.text("ab \n.é", min_size=1), min_size=1, max_size=4))
def test_a_demonstration_is_what_a_rollout_of_it_would_be(name: str, texts: list[str]) -> None:
    template = load_template(name)
    texts = [f"x{text}x" for text in texts]
    messages = [user("Hi")]
    for text in texts:
        messages += [assistant(text), user("So?")]
    ids, mask, _ = encode_conversation(template, messages)
    spans = turn_spans(mask)
    assert len(spans) == len(texts)
    ledger, loss_mask = template.encode_prompt(messages[:1]), []
    loss_mask = [0] * len(ledger)
    for number, (start, end) in enumerate(spans):
        completion = ids[start:end]
        assert completion[-1] in template.stop_token_ids
        ledger += completion
        loss_mask += [1] * len(completion)
        if number < len(spans) - 1:
            delta = template.encode_delta([user("So?")], last_ids=completion).ids
            ledger += delta
            loss_mask += [0] * len(delta)
    assert (ids, mask) == (ledger, loss_mask)
    assert all(
        text in template.decode(ids[start:end])
        for text, (start, end) in zip(texts, spans, strict=True)
    )


@pytest.mark.parametrize("messages", [[user("Hi")], [assistant("Hi"), user("Hi")]])
def test_a_demonstration_that_trains_nothing_or_starts_with_it_is_refused(
    messages: list[Message],
) -> None:
    with pytest.raises(TemplateError, match="demonstration"):
        encode_conversation(load_template("qwen2_5"), messages)
