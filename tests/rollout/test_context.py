"""The tool-call format that fits a chat template, found by reading the template's own writing."""

from dataclasses import replace

import pytest

from agentrl.errors import ConfigError
from agentrl.rollout.context import _FORMATS, choose_parser, reads_example
from agentrl.rollout.templates import TemplateReport, probe_template
from agentrl.rollout.tool_parsers import get_tool_parser, tool_parser_names
from tests.fakes.plugins import tiny_template
from tests.fakes.templates import load_report, make_template


@pytest.mark.parametrize(
    ("template", "parser"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3_2", "llama3_json")],
)
def test_the_format_of_a_production_template_is_found(template: str, parser: str):
    chosen = choose_parser(None, load_report(template))
    assert type(chosen) is type(get_tool_parser(parser))


def test_the_format_of_the_tiny_template_is_found():
    report = probe_template(tiny_template())
    assert type(choose_parser(None, report)) is type(get_tool_parser("hermes"))


def test_a_configured_format_is_taken_whatever_the_template_writes():
    chosen = choose_parser("search_r1", load_report("qwen2_5"))
    assert type(chosen) is type(get_tool_parser("search_r1"))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2", "gptoss", "glm4moe"])
@pytest.mark.parametrize("format", _FORMATS)
def test_a_chosen_format_must_read_the_calls_of_the_template(name: str, format: str):
    fitting = {"llama3_2": {"llama3_json", "json"}, "gptoss": {"harmony"}, "glm4moe": set[str]()}
    if format in fitting.get(name, {"hermes", "json"}):
        assert choose_parser(format, load_report(name))
    else:
        with pytest.raises(ConfigError, match=f"{format} does not read the tool calls"):
            choose_parser(format, load_report(name))


def test_a_format_that_loses_one_of_two_calls_is_refused():
    report = load_report("qwen2_5")
    one = replace(report, parallel_call_example=f"{report.call_example} and no other")
    with pytest.raises(ConfigError, match="and no other"):
        choose_parser("hermes", one)
    assert choose_parser("hermes", replace(report, parallel_call_example=None))


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        choose_parser("hermés", load_report("qwen2_5"))


def report_of(call: str) -> TemplateReport:
    """The report of a template that writes a call like this."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return probe_template(make_template(source))


ARGUMENTS = "{{ c.function.arguments | tojson }}"


def test_a_template_with_unreadable_calls_needs_a_format():
    with pytest.raises(ConfigError, match=r"no tool-call format of agentrl reads") as caught:
        choose_parser(None, report_of("!{{ c.function.name }}! " + ARGUMENTS))
    message = str(caught.value)
    assert "rollout.multi_turn.format" in message
    assert "!probe_tool! " in message
    for way_out in (*tool_parser_names(), "sglang:NAME", "register_tool_parser"):
        assert way_out in message


def test_a_template_that_writes_no_calls_is_refused_in_these_words():
    with pytest.raises(ConfigError, match="does not render tool calls") as caught:
        choose_parser(None, report_of("!{{ c.function.name }}!"))
    assert "leaves out the name or the arguments" in str(caught.value)
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        "[TOOL_CALLS][{{ c.function | tojson }}]",
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]" + ARGUMENTS,
    ],
)
def test_the_format_of_both_kinds_of_mistral_templates_is_found(call: str):
    chosen = choose_parser(None, report_of(call))
    assert type(chosen) is type(get_tool_parser("mistral"))


@pytest.mark.parametrize("name", tool_parser_names())
def test_a_missing_example_is_read_by_no_parser(name: str):
    assert not reads_example(get_tool_parser(name), None)
