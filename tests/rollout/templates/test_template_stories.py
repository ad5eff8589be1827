"""What the start accepts is exact, or reported, whatever a template does to older text."""

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.templates import ChatTemplate, TemplateReport, probe_template
from tests.fakes.template_stories import STORIES, Verdict, play
from tests.fakes.templates import NAMES, load_report, load_template, make_template

HONEST = {Verdict.REFUSED, Verdict.FAILED, Verdict.EXACT}
WHITESPACE = ["whitespace"]
"""Kinds of a play that differs in blanks between a thought and a call, which are not recorded."""
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
TURN = "{{ m.content or '' }}" + CALLS + "<|im_end|>\n"
APART = "{% if m.reasoning_content is string %}{{ m.reasoning_content | trim }}{% endif %}"
THOUGHT_APART = "<think>\n" + APART + "\n</think>\n\n"
OPENED = "<think>\n"
HEAD = (
    "{% set text = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"


def write_template(
    *,
    start: str = "{{ text }}" + TOOLS,
    before_user: str = "",
    turn: str = TURN,
    prompt: str = "",
    result_end: str = "<|im_end|>\n",
    result: str = "{{ m.content }}",
) -> str:
    """A template in the form of ChatML, by its parts."""
    return (
        HEAD + "<|im_start|>system\n" + start + "<|im_end|>\n{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + turn + "{% elif m.role == 'tool' "
        "%}<|im_start|>tool\n" + result + result_end + "{% elif m.role == 'user' %}" + before_user +
        "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    )  # fmt: skip


LAST_USER = "{% if loop.index0 == ns.asked %}"
REWRITES = {
    "system_before_last_user": {"start": TOOLS, "before_user": LAST_USER + "{{ text }}{% endif %}"},
    "system_if_user_is_last": {
        "start": TOOLS,
        "before_user": "{% if loop.last %}{{ text }}{% endif %}",
    },
    "system_until_an_answer": {
        "start": "{% if 'assistant' not in messages | map(attribute='role') | list %}{{ text }}"
        "{% endif %}" + TOOLS
    },
    "tools_before_last_user": {
        "start": "{{ text }}",
        "before_user": LAST_USER + TOOLS + "{% endif %}",
    },
    "result_end_before_assistant": {
        "result_end": "{% if not loop.nextitem or loop.nextitem.role != 'assistant' %}<|im_end|>"
        "{% endif %}\n"
    },
    "result_end_before_answer": {
        "result_end": "{% if not loop.nextitem or loop.nextitem.tool_calls %}<|im_end|>{% endif %}"
        "\n"
    },
    "result_end_after_system": {
        "result_end": "{% if loop.last or not text %}<|im_end|>{% endif %}\n"
    },
    "older_results": {"result": "{% if loop.revindex0 > 2 %}(old){% else %}{{ m.content }}"
                      "{% endif %}"},
    "thoughts_before_late_user": {
        "turn": "{% if loop.index0 > ns.asked %}" + THOUGHT_APART + "{% endif %}" + TURN,
        "prompt": OPENED,
    },
    "thoughts_of_calls_before_late_user": {
        "turn": "{% if loop.index0 > ns.asked or not m.tool_calls %}" + THOUGHT_APART
        + "{% endif %}" + TURN,
        "prompt": OPENED,
    },
    "first_call_only": {"turn": TURN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")},
    "number_of_messages": {"start": "{{ text }}" + TOOLS + "{{ messages | length }}"},
    "older_turns_open_otherwise": {
        "turn": "{% if not loop.last and messages[-1].role == 'user' %}(old) {% endif %}" + TURN
    },
}  # fmt: skip
KEEPS = {
    "plain": {},
    "thoughts_apart": {"turn": THOUGHT_APART + TURN, "prompt": OPENED},
    "thought_split_off": {
        "turn": "{% set parts = m.content.split('</think>') %}<think>\n"
        "{{ parts[0].split('<think>')[-1].strip('\n') if parts[1:] else '' }}\n</think>\n\n"
        "{{ parts[-1].lstrip('\n') }}" + CALLS + "<|im_end|>\n",
        "prompt": OPENED,
    },
}


@lru_cache(maxsize=32)
def probe(source: str) -> tuple[ChatTemplate, TemplateReport]:
    template = make_template(source)
    return template, probe_template(template)


@pytest.mark.parametrize("name", REWRITES)
def test_what_rewrites_older_text_is_found_at_start(name: str) -> None:
    template, report = probe(write_template(**REWRITES[name]))
    found = {what: play(template, report, story) for what, story in STORIES.items()}
    for what, one in found.items():
        assert one.verdict in HONEST or one.kinds == WHITESPACE, (what, one)
    assert any("rewrites" in one.why or "several tool calls" in one.why for one in found.values())


@pytest.mark.parametrize("name", REWRITES)
def test_what_is_kept_by_choice_is_reported(name: str) -> None:
    template, report = probe(write_template(**REWRITES[name]))
    kept = [
        play(template, report, story, story.needs(on_rewritten_history="keep")).verdict
        for story in STORIES.values()
    ]
    assert set(kept) <= HONEST | {Verdict.REPORTED}, kept


def test_a_template_that_writes_calls_in_another_format_than_the_chosen_one_is_refused() -> None:
    calls = TURN.replace("<tool_call>", "<|fim_suffix|>").replace("</tool_call>", "")
    template, report = probe(write_template(turn=calls))
    for story in STORIES.values():
        found = play(template, report, story)
        is_refused = "does not read the tool calls" in found.why
        assert is_refused or found.verdict is Verdict.EXACT or found.kinds == WHITESPACE


@pytest.mark.parametrize("name", KEEPS)
def test_a_template_that_only_appends_plays_every_story_exactly(name: str) -> None:
    template, report = probe(write_template(**KEEPS[name]))
    for what, story in STORIES.items():
        found = play(template, report, story)
        assert found.verdict is Verdict.EXACT or found.kinds == WHITESPACE, (what, found)


@pytest.mark.parametrize("name", NAMES)
def test_production_templates_are_exact_reported_or_refused(name: str) -> None:
    template, report = load_template(name), load_report(name)
    found = [play(template, report, story).verdict for story in STORIES.values()]
    assert set(found) <= HONEST | {Verdict.REPORTED}, found


CHOICES = {
    part: st.sampled_from(
        [None, *(given[part] for given in (REWRITES | KEEPS).values() if part in given)]
    )
    for part in ("start", "before_user", "turn", "prompt", "result_end", "result")
}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries(CHOICES))
def test_templates_of_any_parts_are_exact_or_refused(parts: dict[str, str | None]) -> None:
    chosen = {part: text for part, text in parts.items() if text is not None}
    template, report = probe(write_template(**chosen))
    for what, story in STORIES.items():
        found = play(template, report, story)
        assert found.verdict in HONEST | {Verdict.REPORTED}, (what, found)
