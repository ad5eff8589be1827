"""Small templates with the structure of whole families of chat templates."""

from typing import Any

import pytest

from agentrl.errors import TemplateError
from agentrl.rollout.templates import (
    Capability,
    History,
    TemplateNeeds,
    TemplateReport,
    probe_template,
    require,
)
from tests.fakes.templates import assistant, call, make_template, schema, tool, user

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)


def chatml(turn: str, *, prompt: str = PROMPT, end: str = "<|im_end|>\n") -> str:
    """A template that writes assistant turns by an expression of its own."""
    return (
        TOOLS + "{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + turn + end + "{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + prompt
    )


def refusal(report: TemplateReport, **needs: Any) -> str:
    with pytest.raises(TemplateError) as refused:
        require(report, TemplateNeeds(**needs))
    return str(refused.value)


# An answer that directly follows the user's turn

SILENT = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|assistant|>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "<|observation|>{{ m.tool_call_id }} {{ m.content }}<|assistant|>"
    "{% else %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
)


def test_a_template_may_need_no_generation_prompt() -> None:
    template = make_template(SILENT)
    report = probe_template(template)
    require(report, TemplateNeeds(tools=True, interaction=True))
    assert report.generation_prompt == ""
    assert template.decode(template.encode_prompt([user("Hi")])) == "<|im_start|>Hi<|assistant|>"
    sampled = [*template.encode_text("Hello"), template.stop_token_ids[0]]
    delta = template.encode_delta([user("More?")], last_ids=sampled)
    assert template.decode(delta.ids) == "<|im_start|>More?<|assistant|>"


def test_a_call_may_end_with_its_id() -> None:
    named = "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    template = make_template(
        SILENT.replace("[ARGS]{{ c.function.arguments | tojson }}", "").replace(
            "{{ c.function.name }}", named + "{{ c.id }}"
        )
    )
    require(probe_template(template), TemplateNeeds(tools=True, interaction=True))
    end = template.stop_token_ids[0]
    delta = template.encode_delta([tool("4")], last_ids=[end])
    assert template.decode(delta.ids) == "<|observation|>call00000 4<|assistant|>"


def test_where_turns_of_user_and_assistant_look_alike_an_empty_prompt_is_refused() -> None:
    report = probe_template(
        make_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    )
    assert "a user's turn ends as an assistant's does" in refusal(report)


def test_a_template_that_always_writes_its_prompt_needs_no_other() -> None:
    template = make_template(chatml("{{ m.content }}", prompt="<|im_start|>assistant\n"))
    require(probe_template(template), TemplateNeeds(interaction=True))
    text = template.decode(template.encode_prompt([user("Hi")]))
    assert text.endswith("<|im_end|>\n<|im_start|>assistant")


def test_a_template_that_always_writes_another_prompt_is_refused_in_these_words() -> None:
    source = chatml("Says: {{ m.content }}", prompt="<|im_start|>assistant\nThinks: ")
    message = refusal(probe_template(make_template(source)))
    assert "with and without `add_generation_prompt`" in message
    assert "Says: " in message


# A turn that calls a tool ends with another token than an answer

OTHER_END = chatml(
    "{{ m.content or '' }}"
    + CALLS
    + "{% if m.tool_calls %}<|call|>{% else %}<|im_end|>{% endif %}",
    end="\n",
)


def test_the_end_of_a_call_is_a_stop_token_and_is_not_written_again() -> None:
    template = make_template(OTHER_END)
    report = probe_template(template)
    require(report, TemplateNeeds(tools=True, interaction=True))
    assert report.stop_tokens == ("<|im_end|>", "<|call|>")
    sampled = template.encode_policy_text('<tool_call>{"name": "f"}</tool_call>')
    sampled.append(template.structure.encoder.added["<|call|>"])
    delta = template.encode_delta([tool("4")], last_ids=sampled)
    expected = "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert template.decode(delta.ids) == expected


def test_what_closes_each_call_of_a_turn_is_no_end_of_it() -> None:
    source = chatml("{{ m.content or '' }}" + CALLS, end="")
    assert "</tool_call>" not in probe_template(make_template(source)).stop_tokens


def test_an_end_of_two_equal_tokens_is_sampled_up_to_the_first() -> None:
    template = make_template(chatml("{{ m.content }}", end="\n<|im_end|>\n<|im_end|>\n"))
    sampled = [*template.encode_text("Hello\n"), template.stop_token_ids[0]]
    delta = template.encode_delta([user("More?")], last_ids=sampled)
    assert template.decode(delta.ids).startswith("\n<|im_end|>\n<|im_start|>user\nMore?")
    require(probe_template(template), TemplateNeeds(interaction=True))


# Thoughts

APART = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
LAST_ONLY = APART.replace("if m.reasoning", "if loop.last and m.reasoning")
THINKING = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"


def test_a_prompt_that_opens_a_thought_is_followed_by_no_second_opening() -> None:
    source = chatml(APART + "{{ m.content or '' }}" + CALLS, prompt=THINKING)
    report = probe_template(make_template(source))
    require(report, TemplateNeeds(tools=True, interaction=True))
    assert report.starts_in_thought


@pytest.mark.parametrize("turn", [LAST_ONLY, LAST_ONLY.replace("loop.last", "loop.revindex < 3")])
def test_thoughts_that_a_template_keeps_apart_and_drops_later_are_found(turn: str) -> None:
    report = probe_template(make_template(chatml(turn + "{{ m.content }}")))
    assert report.history(History.THOUGHT_BEFORE_USER).stable is False
    assert "a thought, when a user follows" in refusal(report, interaction=True)
    require(report, TemplateNeeds(interaction=True, thoughts=False))
    require(report, TemplateNeeds(interaction=True, on_rewritten_history="keep"))


def test_a_thought_that_ends_with_the_stop_token_of_an_answer_is_found() -> None:
    thought = "{% if m.reasoning %}{{ m.reasoning }}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    report = probe_template(make_template(chatml(thought + "{{ m.content }}")))
    message = refusal(report, interaction=True, on_rewritten_history="keep")
    assert "the stop token '<|im_end|>' ends the turn before" in message


def test_a_call_after_the_stop_token_of_an_answer_is_found() -> None:
    report = probe_template(make_template(chatml("{{ m.content or '' }}<|im_end|>" + CALLS)))
    assert "this chat template ends a turn too early" in refusal(report, tools=True)
    require(report, TemplateNeeds(interaction=True))


# System messages, tools, ids

LOSES_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + "{% if not ("
    "m.role == 'tool' and not loop.last and messages[0].role == 'system') %}<|im_end|>{% endif %}\n"
    "{% endfor %}" + PROMPT
)


def test_a_template_that_rewrites_after_a_system_message_is_refused_for_such_rows() -> None:
    report = probe_template(make_template(TOOLS + LOSES_END))
    require(report, TemplateNeeds(tools=True, system=False))
    assert "two rounds of tools" in refusal(report, tools=True, system=True)
    assert "two rounds of tools" in refusal(report, tools=True)  # nobody says that there is none
    rows = dict(report.describe())
    assert "not after a system message" in rows["keeps: two rounds of tools"]


NEEDS_TOOLS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>\n"
    "{% endfor %}" + PROMPT
)


def test_a_template_that_fails_without_tools_carries_a_run_with_tools_only() -> None:
    report = probe_template(make_template(NEEDS_TOOLS))
    require(report, TemplateNeeds(tools=True, interaction=True))
    assert report.call_example is not None
    assert "without tools" in refusal(report, interaction=True)


BY_ID = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{% for o in messages %}{% for c in o.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{{ c.function.name }}: {% endif %}{% endfor %}{% endfor %}"
    "{% endif %}{{ m.content or '' }}" + CALLS + "<|im_end|>\n{% endfor %}" + PROMPT
)


def test_a_template_that_looks_calls_up_by_their_ids_finds_them() -> None:
    template = make_template(BY_ID)
    require(probe_template(template), TemplateNeeds(tools=True, parallel_results=True))
    messages = [user("Hi"), assistant("", call("search", query="a")), tool("Found.")]
    assert "tool\nsearch: Found." in template.decode(template.encode_prompt(messages, [schema()]))


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
)


def test_a_template_that_wants_parts_says_so() -> None:
    assert "list of parts" in refusal(probe_template(make_template(PARTS)), interaction=True)


def test_what_a_template_says_on_a_call_is_the_reason_that_it_carries_none() -> None:
    source = chatml(
        "{% if m.tool_calls %}{{ raise_exception('no calls here') }}{% endif %}{{ m.content }}"
    )
    report = probe_template(make_template(source))
    assert "no calls here" in report.capability(Capability.CALLS).reason


# Tokens that the tokenizer lacks

PLAIN_FRAMES = (
    "{% for m in messages %}<|lacks_start|>{{ m.role }}<|lacks_mid|>{{ m.content }}<|lacks_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|lacks_start|>assistant<|lacks_mid|>{% endif %}"
)


def test_turn_frames_that_any_user_could_write_are_refused() -> None:
    message = refusal(probe_template(make_template(PLAIN_FRAMES)))
    for token in ("<|lacks_start|>", "<|lacks_mid|>", "<|lacks_end|>"):
        assert token in message
    assert "model.tokenizer_path" in message


def test_a_token_that_the_tokenizer_lacks_is_reported_where_frames_have_others() -> None:
    source = chatml("<|lacks_mid|>{{ m.content }}")
    report = probe_template(make_template(source))
    require(report, TemplateNeeds())
    assert report.missing_tokens == ("<|lacks_mid|>",)
    assert dict(report.describe())["not in the tokenizer"] == "<|lacks_mid|>"
    assert probe_template(make_template(SILENT)).missing_tokens == ("[TOOL_CALLS]", "[ARGS]")
