"""Deltas: separator, end of turn, new messages and the next generation prompt."""

import time

import pytest

from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.templates import encode_conversation
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

IM_END = "<|im_end|>"


def ids_of(text: str) -> list[int]:
    return load_tokenizer().encode(text, add_special_tokens=False)


def test_prompt_is_what_the_template_writes() -> None:
    messages = [system("Be brief"), user("What is 2 + 2?")]
    ids = load_template("qwen2_5").encode_prompt(messages, [schema()])
    assert ids == ids_of(render_really("qwen2_5", messages, [schema()]))


def test_separator_follows_a_sampled_end_of_turn() -> None:
    template = load_template("qwen2_5")
    delta = template.encode_delta([user("More?")], last_ids=[*ids_of("4"), *ids_of(IM_END)])
    assert template.decode(delta.ids) == (
        "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert delta.end_of_turn_ids == []


def test_end_of_turn_is_observed_where_a_budget_cut_it_off() -> None:
    template = load_template("qwen2_5")
    delta = template.encode_delta([user("More?")], last_ids=ids_of("4"))
    assert template.decode(delta.ids).startswith("<|im_end|>\n<|im_start|>user\n")
    assert delta.end_of_turn_ids == ids_of(IM_END)


def test_a_foreign_stop_token_leaves_the_template_s_own_to_be_observed() -> None:
    template = load_template("qwen2_5")
    delta = template.encode_delta([user("More?")], last_ids=ids_of("4<|endoftext|>"))
    assert delta.end_of_turn_ids == ids_of(IM_END)


@pytest.mark.parametrize(
    ("last", "missing"),
    [
        ("x", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("x<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        ("x<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", ""),
        ("x<|END_OF_TURN_TOKEN|>", ""),
    ],
)
def test_what_is_missing_of_an_end_of_two_tokens_is_observed(last: str, missing: str) -> None:
    template = load_template("cohere2")
    delta = template.encode_delta([user("More?")], last_ids=ids_of(last))
    assert template.decode(delta.end_of_turn_ids) == missing
    assert template.decode(delta.ids).startswith(missing + "<|START_OF_TURN_TOKEN|>")


def test_the_opening_of_the_next_turn_may_be_what_the_policy_sampled_as_its_stop() -> None:
    template = load_template("glm4moe")
    stop = ids_of("<|observation|>")
    delta = template.encode_delta([tool("4")], last_ids=[*ids_of("x"), *stop])
    assert template.decode(delta.ids) == "\n<tool_response>\n4\n</tool_response><|assistant|>"
    other = template.encode_delta([tool("4")], last_ids=ids_of("x<|user|>"))
    assert template.decode(other.ids).startswith("<|observation|>\n<tool_response>")


def test_a_call_has_an_end_of_its_own() -> None:
    template = load_template("gptoss")
    assert ids_of("<|call|>")[0] in template.stop_token_ids
    assert ids_of("<|end|>")[0] not in template.stop_token_ids
    delta = template.encode_delta([tool("4")], last_ids=ids_of("{}<|call|>"))
    assert template.decode(delta.ids) == (
        "<|start|>functions.search to=assistant<|channel|>commentary<|message|>"
        '"4"<|end|><|start|>assistant'
    )


def test_results_of_one_turn_come_in_one_delta_in_their_order() -> None:
    template = load_template("qwen2_5")
    results = [tool("one", 0), tool("two", 1), tool("three", 2)]
    delta = template.encode_delta(results, last_ids=ids_of(IM_END))
    assert template.decode(delta.ids) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response>\n<tool_response>\nthree\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    spans = [template.decode(delta.ids[start:end]) for _, start, end in delta.message_spans]
    assert spans == ["one", "two", "three"]
    assert [message for message, _, _ in delta.message_spans] == [0, 1, 2]


def test_spans_point_at_the_texts_where_the_end_of_turn_was_sampled_and_where_not() -> None:
    template = load_template("qwen2_5")
    for last in (IM_END, "x"):
        delta = template.encode_delta([user("hello there")], last_ids=ids_of(last))
        ((_, start, end),) = delta.message_spans
        assert template.decode(delta.ids[start:end]) == "hello there"


def test_a_result_under_another_tool_s_name_is_refused() -> None:
    template = load_template("gptoss")
    stop = ids_of("<|call|>")
    template.encode_delta([tool("a", 0), tool("b", 1)], last_ids=stop)
    with pytest.raises(TemplateError, match="result of other to search"):
        template.encode_delta([tool("a", 0), tool("b", 1, name="other")], last_ids=stop)


def test_a_result_without_its_tool_s_name_is_refused_where_the_template_writes_it() -> None:
    nameless = Message(role="tool", content="4", tool_call_id="call00000")
    with pytest.raises(TemplateError, match="name of the tool") as refused:
        load_template("gptoss").encode_delta([nameless], last_ids=ids_of("<|call|>"))
    assert refused.value.details["role"] == "tool"
    load_template("qwen2_5").encode_delta([nameless], last_ids=ids_of(IM_END))


@pytest.mark.parametrize("name", NAMES)
def test_a_user_can_follow_an_assistant_in_every_template(name: str) -> None:
    template = load_template(name)
    delta = template.encode_delta([user("And now?")], last_ids=ids_of("x"))
    text = template.decode(delta.ids)
    assert "And now?" in text
    assert text.endswith(template.structure.generation_prompt)


@pytest.mark.parametrize("name", ["phi3_5", "gemma3", "cohere2"])
def test_a_template_that_cannot_carry_a_tool_result_says_so(name: str) -> None:
    with pytest.raises(TemplateError) as refused:
        load_template(name).encode_delta([tool("4")], last_ids=ids_of("x"))
    assert refused.value.details["template"] == f"{name}.jinja"
    assert refused.value.details["role"] == "tool"


def test_empty_and_blank_texts_are_written_as_they_are() -> None:
    template = load_template("qwen2_5")
    for text in ("", " \n", "\u3000"):
        delta = template.encode_delta([tool(text)], last_ids=ids_of(IM_END))
        expected = f"<tool_response>\n{text}\n</tool_response>"
        assert expected in template.decode(delta.ids)


def test_a_prompt_that_loses_a_message_is_refused() -> None:
    messages = [user("a"), assistant("", call(query="x")), tool("4")]
    with pytest.raises(TemplateError) as refused:
        load_template("phi3_5").encode_prompt(messages)
    assert refused.value.details["role"] == "tool"


def test_text_parts_of_a_content_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    message = Message.model_validate({"role": "user", "content": parts})
    template = load_template("qwen2_5")
    assert template.encode_prompt([message]) == template.encode_prompt([user("Hello there")])


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5"])
@pytest.mark.parametrize("part", [{"type": "image", "image": "a.png"}, {"type": "video"}])
def test_a_part_that_is_no_text_is_refused_before_a_template_writes_its_token(
    name: str, part: dict[str, str]
) -> None:
    template = load_template(name)
    parts = [{"type": "text", "text": "Look: "}, part]
    pictured = Message.model_validate({"role": "user", "content": parts})
    for encode in (
        lambda: template.encode_prompt([user("Hello"), assistant("Hello"), pictured]),
        lambda: template.encode_delta([pictured], last_ids=ids_of("4")),
        lambda: encode_conversation(template, [pictured, assistant("A cat.")]),
    ):
        with pytest.raises(TemplateError, match="no processor has read") as refused:
            encode()
        details = refused.value.details
        assert (details["template"], details["role"], details["part"]) == (
            f"{name}.jinja", "user", part["type"],
        )  # fmt: skip


def test_the_cost_of_a_turn_is_that_of_encoding_its_text() -> None:
    template = load_template("qwen2_5")
    text = "The quick brown fox jumps over the lazy dog, again and again. " * 15

    def seconds(times: int) -> tuple[float, float]:
        started = time.process_time()
        for _ in range(times):
            template.encode_text(text)
        between = time.process_time()
        for number in range(times):
            template.encode_delta([tool(text, number % 10)], last_ids=[1], tools=[SEARCH])
        return between - started, time.process_time() - between

    seconds(5)
    rounds = [seconds(40) for _ in range(5)]
    plain, whole = min(p for p, _ in rounds), min(w for _, w in rounds)
    assert whole < 2 * plain + 40 * 0.0002


SEARCH = schema()


SEAMS = ['{"a": 1}', "It rains.", '"quoted"', "\n\nIt rains.\n", "  indented", "\u0301e", "漢🙂"]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_2", "gptoss"])
@pytest.mark.parametrize("text", SEAMS)
def test_observed_tokens_are_those_of_the_template_s_own_rendering(name: str, text: str) -> None:
    template, tools = load_template(name), [schema(description=text)]
    story = [system(text), user(text), assistant("", call()), tool(text)]
    rendered = [render_really(name, story[:end], tools) for end in (2, 4)]
    prompt, whole = (load_tokenizer().encode(r, add_special_tokens=False) for r in rendered)
    assert template.encode_prompt(story[:2], tools) == prompt
    delta = template.encode_delta(story[3:], last_ids=[], tools=tools)
    assert whole[-len(delta.ids) :] == delta.ids
