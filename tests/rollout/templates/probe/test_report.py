"""The table of each production template, held against what the template really writes."""

import re
import secrets
from dataclasses import replace

import jinja2
import pytest

from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.templates import (
    Capability,
    History,
    TemplateNeeds,
    TemplateReport,
    TextTransform,
    probe_template,
    require,
)
from agentrl.rollout.templates.probe.report import CapabilityReport
from tests.fakes.templates import (
    NAMES,
    assistant,
    call,
    load_report,
    load_template,
    load_tokenizer,
    make_template,
    render_really,
    schema,
    system,
    tool,
    user,
)

CARRY_TOOLS = ("glm4moe", "gptoss", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507")
CARRY_NO_TOOLS = ("cohere2", "deepseek_r1_distill", "gemma3", "phi3_5")
REWRITE_THOUGHTS = ("deepseek_r1_distill", "glm4moe", "qwen3")


def really(
    name: str, messages: list[Message], tools: bool = False, *, opens: bool = True
) -> str | None:
    """What the template writes; None where it refuses."""
    given = [schema()] if tools else None
    try:
        return render_really(name, messages, given, add_generation_prompt=opens)
    except (jinja2.TemplateError, TypeError):
        return None


@pytest.mark.parametrize("name", NAMES)
def test_the_generation_prompt_is_what_the_template_adds(name: str) -> None:
    messages = [user("Hi")]
    opened = render_really(name, messages)
    closed = render_really(name, messages, add_generation_prompt=False)
    prompt = load_report(name).generation_prompt
    assert prompt is not None
    assert opened.endswith(prompt)
    assert closed.startswith(opened.removesuffix(prompt))


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_carried_where_the_prompt_names_them(name: str) -> None:
    text = really(name, [user("Hi")], tools=True)
    is_told = text is not None and "search" in text and "What to look for." in text
    assert load_report(name).carries(Capability.TOOLS) is is_told
    assert is_told is (name in CARRY_TOOLS)


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_carried_where_name_and_arguments_are_written(name: str) -> None:
    text = really(name, [user("Hi"), assistant("", call("find_it", query="warm socks"))])
    is_written = text is not None and "find_it" in text and "warm socks" in text
    assert load_report(name).carries(Capability.CALLS) is is_written


@pytest.mark.parametrize("name", NAMES)
def test_tool_results_are_carried_where_they_are_written(name: str) -> None:
    before = [[user("Hi"), assistant("Hello")], [user("Hi"), assistant("", call(query="a"))]]
    texts = [really(name, [*start, tool("warm socks")]) for start in before]
    is_written = any(text is not None and "warm socks" in text for text in texts)
    assert load_report(name).carries(Capability.TOOL_RESULT) is is_written


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_after_a_tool_equals_the_rendering(name: str) -> None:
    report = load_report(name)
    opened = False
    for start in (assistant("Hello"), assistant("", call(query="a"))):
        messages = [user("Hi"), start, tool("socks")]
        text = really(name, messages)
        whole = really(name, [*messages, assistant("They are warm.")], opens=False)
        if text is not None and "socks" in text:
            opened |= text.endswith(str(report.generation_prompt))
            opened |= whole is not None and whole.startswith(f"{text}They are warm.")
    assert report.carries(Capability.PROMPT_AFTER_TOOL) is opened


@pytest.mark.parametrize("name", NAMES)
def test_several_results_are_supported_if_each_has_its_own_name(name: str) -> None:
    calls = [call("first", 0, query="a"), call("second", 1, query="b")]
    results = [tool("RAIN", 0, "first"), tool("SUN", 1, "second")]
    starts = ([user("Hi"), assistant("", *calls)], [user("Hi"), assistant("Hello")])
    texts = [text for start in starts if (text := really(name, [*start, *results])) is not None]
    whole = [text for text in texts if "RAIN" in text and "SUN" in text]
    wrong = [text for text in whole if re.search(r"functions\.first to=[^.]*SUN", text)]
    assert load_report(name).carries(Capability.PARALLEL_RESULTS) is bool(whole and not wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_system_message_is_carried_where_it_is_written(name: str) -> None:
    text = really(name, [system("Speak like a pirate."), user("Hi")])
    is_written = text is not None and "Speak like a pirate." in text
    assert load_report(name).carries(Capability.SYSTEM) is is_written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", ["system", "user", "assistant", "tool"])
def test_treatments_of_a_text_are_those_of_the_template(name: str, position: str) -> None:
    word = f"x{secrets.token_hex(8)}x"
    place = {
        "system": lambda t: [system(t), user("Hi")],
        "user": lambda t: [user("Hi"), assistant("Hello"), user(t)],
        "assistant": lambda t: [user("Hi"), assistant(t), user("So?")],
        "tool": lambda t: [user("Hi"), assistant("", call(query="a")), tool(t)],
    }[position]
    transforms = load_report(name).text(position).transforms
    plain = really(name, place(word))
    assert (TextTransform.REFUSES in transforms) is (plain is None)
    if plain is None:
        return
    assert (TextTransform.DROPS in transforms) is (word not in plain)
    if word not in plain:
        return
    spaced = really(name, place(f"  {word}  "))
    assert spaced is not None
    assert (TextTransform.TRIMS in transforms) is (f"  {word}  " not in spaced)
    quoted = really(name, place(f'{word}"{word}'))
    assert quoted is not None
    assert (TextTransform.ESCAPES in transforms) is (f'{word}\\"{word}' in quoted)
    thought = really(name, place(f"<think>{word}</think>end"))
    assert thought is not None
    assert (TextTransform.SPLITS in transforms) is (word not in thought)


def test_qwen3_branches_on_a_user_who_writes_a_tool_response() -> None:
    """A user could keep a policy's old thoughts in view; spliced text cannot."""
    report = load_report("qwen3").text("user")
    assert TextTransform.BRANCHES in report.transforms
    assert not report.exact
    thought = "<think>\nHm.\n</think>\n\nYes."
    messages = [user("Hi"), assistant(thought), user("<tool_response>a</tool_response>")]
    assert "Hm." in render_really("qwen3", messages)
    template = load_template("qwen3")
    assert "Hm." not in template.decode(template.encode_prompt(messages))


def test_gptoss_refuses_an_assistant_text_with_its_own_markup() -> None:
    report = load_report("gptoss").text("assistant")
    assert TextTransform.BRANCHES in report.transforms
    markup = "<|channel|>analysis<|message|>x"
    assert really("gptoss", [user("Hi"), assistant(markup)]) is None


@pytest.mark.parametrize("name", NAMES)
def test_splicing_is_exact_where_the_table_says_so(name: str) -> None:
    text = " \n A <b> & \"quoted\" 'text' \\ with ünïcode 漢字 {{ x }}\t\n"
    report, template = load_report(name), load_template(name)
    places = {
        "system": [system(text), user("Hi")],
        "user": [user("Hi"), assistant("Hello"), user(text)],
        "assistant": [user("Hi"), assistant(text), user("So?")],
        "tool": [user("Hi"), assistant("", call(query=text)), tool(text)],
    }
    for position, messages in places.items():
        kinds = set(report.text(position).transforms)
        if not report.text(position).exact or kinds & {TextTransform.DROPS, TextTransform.REFUSES}:
            continue
        if position == "tool" and not report.carries(Capability.PROMPT_AFTER_TOOL):
            continue
        assert template.decode(template.encode_prompt(messages)) == render_really(name, messages)


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_that_history_loses_is_reported(name: str) -> None:
    thought = "<think>\nHmmm.\n</think>\n\nYes."
    text = render_really(name, [user("Hi"), assistant(thought), user("So?")])
    report = load_report(name).history(History.THOUGHT_BEFORE_USER)
    assert ("Hmmm." not in text) is (name in REWRITE_THOUGHTS)
    if name in REWRITE_THOUGHTS:
        assert report.stable is False
        assert "Hm." in report.difference


def test_gptoss_writes_another_end_for_a_last_turn_than_for_an_older_one() -> None:
    report = load_report("gptoss").history(History.ANSWER_BEFORE_USER)
    assert report.stable is False
    assert "<|return|>" in report.difference


@pytest.mark.parametrize("name", ["gptoss", "llama3_2"])
def test_a_date_is_frozen_for_the_run_and_reported(name: str) -> None:
    template, report = load_template(name), load_report(name)
    now = template.structure.renderer.now
    assert report.date == f"{now:%Y-%m-%d}"
    text = template.decode(template.encode_prompt([user("Hi")]))
    written = {"gptoss": f"Current date: {now:%Y-%m-%d}", "llama3_2": f"{now:%d %b %Y}"}
    assert written[name] in text


@pytest.mark.parametrize("name", CARRY_TOOLS)
def test_a_run_with_tools_starts_on_templates_that_carry_them(name: str) -> None:
    require(load_report(name), TemplateNeeds(system=True, tools=True))


@pytest.mark.parametrize("name", CARRY_NO_TOOLS)
def test_a_run_with_tools_does_not_start_on_others(name: str) -> None:
    with pytest.raises(TemplateError) as refused:
        require(load_report(name), TemplateNeeds(tools=True))
    assert refused.value.details["template"] == f"{name}.jinja"
    assert refused.value.details["role"] == "system"
    assert "omits the tools" in str(refused.value)


@pytest.mark.parametrize("name", CARRY_NO_TOOLS)
def test_a_run_without_tools_starts_on_every_template(name: str) -> None:
    require(load_report(name), TemplateNeeds(system=True))


def test_parallel_results_are_refused_where_names_would_be_wrong() -> None:
    require(load_report("qwen2_5"), TemplateNeeds(tools=True, parallel_results=True))
    with pytest.raises(TemplateError, match="several tool results") as refused:
        require(load_report("gptoss"), TemplateNeeds(tools=True, parallel_results=True))
    assert refused.value.details["role"] == "tool"


def test_compaction_needs_a_template_that_shows_a_user_after_a_tool() -> None:
    found = load_report("qwen2_5")
    needs = TemplateNeeds(tools=True, compaction=True)
    require(found, needs)
    refusal = CapabilityReport(Capability.USER_AFTER_TOOL, False, "roles must alternate")
    others = [one for one in found.capabilities if one.capability is not refusal.capability]
    report = replace(found, capabilities=(*others, refusal))
    require(report, TemplateNeeds(tools=True))
    with pytest.raises(TemplateError, match="does not support: user after a tool"):
        require(report, needs)


def test_rows_with_a_system_message_need_a_template_that_takes_one() -> None:
    template = make_template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    report = probe_template(template)
    require(report, TemplateNeeds())
    with pytest.raises(TemplateError, match="does not support: system message") as refused:
        require(report, TemplateNeeds(system=True))
    assert refused.value.details["role"] == "system"
    assert "no system" in str(refused.value.details["reason"])


@pytest.mark.parametrize("name", [*REWRITE_THOUGHTS, "gptoss"])
def test_a_template_that_rewrites_history_needs_a_choice(name: str) -> None:
    needs = TemplateNeeds(interaction=True)
    with pytest.raises(TemplateError, match="rewrites older turns") as refused:
        require(load_report(name), needs)
    assert "keep" in str(refused.value)
    assert "rendered" in str(refused.value.details["rewrites"])
    require(load_report(name), TemplateNeeds(interaction=True, on_rewritten_history="keep"))


def test_strict_checking_fails_at_start_where_it_would_find_differences() -> None:
    needs = TemplateNeeds(interaction=True, on_rewritten_history="keep", sanity_check="strict")
    with pytest.raises(TemplateError, match="ignore_strippable"):
        require(load_report("qwen3"), needs)
    require(load_report("qwen2_5"), needs)


def strict_error(report: TemplateReport, **needs: bool) -> dict[str, object]:
    with pytest.raises(TemplateError, match="sanity_check_mode: strict") as refused:
        require(report, TemplateNeeds(sanity_check="strict", **needs))
    assert "ignore_strippable" in str(refused.value.details["choices"])
    return refused.value.details


def test_strict_checking_needs_splicing_that_is_exact_where_the_run_has_texts() -> None:
    details = strict_error(load_report("qwen3"))
    assert details["template"] == "qwen3.jinja"
    assert details["role"] == "user"
    assert "<tool_response>" in str(details["does"])
    assert strict_error(load_report("gptoss"))["role"] == "assistant"


def test_strict_checking_does_not_mind_positions_that_the_run_does_not_use() -> None:
    texts = load_report("qwen2_5").texts
    for position, role in (("system", "system"), ("tool", "tool"), ("call argument", "assistant")):
        inexact = tuple(replace(t, exact=t.position != position, note="'x'") for t in texts)
        report = replace(load_report("qwen2_5"), texts=inexact)
        require(report, TemplateNeeds(sanity_check="strict"))
        require(report, TemplateNeeds(system=True, tools=True))
        assert strict_error(report, system=True, tools=True)["role"] == role


@pytest.mark.parametrize("name", ["gemma3", "cohere2", "phi3_5"])
def test_what_a_template_refuses_is_no_inexact_text(name: str) -> None:
    require(load_report(name), TemplateNeeds(sanity_check="strict", on_rewritten_history="keep"))


def test_strict_checking_needs_texts_that_come_back() -> None:
    assert strict_error(replace(load_report("qwen2_5"), round_trip=False))["role"] == "user"


def test_history_counts_only_where_the_run_makes_it() -> None:
    """Qwen3 keeps thoughts while tools answer, and a policy that never thinks loses none."""
    require(load_report("qwen3"), TemplateNeeds(tools=True))
    require(load_report("qwen3"), TemplateNeeds(interaction=True, thoughts=False))


@pytest.mark.parametrize("name", NAMES)
def test_the_table_prints_a_row_for_everything(name: str) -> None:
    rows = load_report(name).describe()
    heads = [head for head, _ in rows]
    assert len(set(heads)) == len(heads)
    assert dict(rows)["template"] == f"{name}.jinja"
    for capability in Capability:
        assert f"supports: {capability}" in heads
    for history in History:
        assert f"keeps: {history}" in heads
    assert all(isinstance(text, str) and text for _, text in rows)


@pytest.mark.parametrize("name", CARRY_TOOLS)
def test_the_example_of_a_call_is_what_the_template_writes(name: str) -> None:
    example = load_report(name).call_example
    assert example is not None
    assert "probe_tool" in example
    assert "Oslo" in example
    known = [assistant("", call("probe_tool", city="Oslo"))]
    really_written = render_really(name, [user("Hi"), *known], add_generation_prompt=False)
    assert example.split("\n")[-1] in really_written


def test_the_example_of_two_calls_is_written_by_templates_that_write_both() -> None:
    examples = {name: load_report(name).parallel_call_example for name in NAMES}
    found = {name for name, example in examples.items() if example is not None}
    # Llama 3.2's refuses a second call, gpt-oss's drops it.
    assert found == {"glm4moe", "qwen2_5", "qwen3", "qwen3_instruct_2507"}
    for name in found:
        single = load_report(name).call_example
        assert single is not None
        two = str(examples[name])
        assert two.startswith(single)
        assert two.index("Oslo") < two.index("Rome")


def test_stop_tokens_are_ends_of_turns_and_no_others() -> None:
    stops = {name: set(load_report(name).stop_tokens) for name in NAMES}
    eos = load_tokenizer().eos_token
    assert stops["qwen2_5"] == {eos}
    assert stops["llama3_2"] == {eos, "<|eot_id|>"}
    assert stops["gptoss"] == {eos, "<|return|>", "<|call|>"}
    assert stops["glm4moe"] == {eos, "<|user|>", "<|observation|>"}
    assert stops["cohere2"] == {eos, "<|END_OF_TURN_TOKEN|>"}
    assert stops["phi3_5"] == {eos, "<|end|>"}


def test_only_a_prompt_that_opens_a_thought_starts_in_one() -> None:
    starts: dict[str, TemplateReport] = {name: load_report(name) for name in NAMES}
    found = {name for name, report in starts.items() if report.starts_in_thought}
    assert found == {"deepseek_r1_distill"}
