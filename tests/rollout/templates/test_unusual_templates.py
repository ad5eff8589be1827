"""Templates that nobody has seen before."""

from datetime import datetime
from typing import Any

import pytest

from agentrl.errors import TemplateError
from agentrl.rollout.records import Turn
from agentrl.rollout.templates import (
    Capability,
    ChatTemplate,
    History,
    TemplateNeeds,
    TextTransform,
    probe_template,
    require,
)
from agentrl.rollout.templates.check import check_ledger
from tests.fakes.templates import (
    assistant,
    call,
    control_tokens,
    load_tokenizer,
    make_template,
    schema,
    system,
    tool,
    user,
)

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_content(expression: str) -> ChatTemplate:
    return make_template(PLAIN.replace("m.content", expression))


def test_a_template_without_generation_prompt_is_refused() -> None:
    template = make_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(TemplateError, match="no generation prompt") as refused:
        template.encode_prompt([user("Hi")])
    assert refused.value.details["template"] == "custom_chat_template"
    report = probe_template(template)
    assert report.generation_prompt is None
    with pytest.raises(TemplateError, match="generation prompt"):
        require(report, TemplateNeeds())


def test_a_template_that_is_no_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateError, match="not valid Jinja") as refused:
        make_template("{% for m in messages %}\n{{ m.content }}\n{% endfr %}")
    assert refused.value.details["line"] == 3


def test_a_template_comes_from_a_file_too(tmp_path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(PLAIN, encoding="utf-8")
    template = make_template(str(path))
    assert template.name == "mine.jinja"
    assert template.encode_prompt([user("Hi")]) == make_template(PLAIN).encode_prompt([user("Hi")])
    with pytest.raises(TemplateError, match="cannot read"):
        make_template(str(tmp_path / "absent.jinja"))


def test_a_tokenizer_without_template_is_refused() -> None:
    tokenizer = load_tokenizer()
    kept, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(TemplateError, match="no chat template"):
            ChatTemplate(tokenizer)
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize(
    ("expression", "given", "written"),
    [
        ("m.content | trim", " \n a b \t", "a b"),
        ("m.content.strip('\\n')", "\n a \n", " a "),
        ("m.content.lstrip()", "  a  ", "a  "),
        ("m.content.rstrip(' ')", " a\n ", " a\n"),
        ("m.content | tojson", 'a "b" é\n', '"a \\"b\\" é\\n"'),
        ("m.content | tojson(ensure_ascii=True)", "é", '"\\u00e9"'),
        ("m.content | trim | tojson", '  "  ', '"\\""'),
        ("m.content | e", "a & <b>", "a &amp; &lt;b&gt;"),
        ("m.content | upper", "straße", "STRASSE"),
        ("{'text': m.content} | tojson", 'a"', '{"text": "a\\""}'),
    ],
)
def test_what_a_template_does_to_a_text_is_learned(
    expression: str, given: str, written: str
) -> None:
    template = with_content(expression)
    expected = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
    assert template.decode(template.encode_prompt([user(given)])) == expected
    assert probe_template(template).text("user").exact or "upper" in expression


def test_a_text_that_is_rewritten_in_no_known_way_is_kept_and_reported() -> None:
    template = with_content("m.content | replace('a', 'b')")
    assert "banana" in template.decode(template.encode_prompt([user("banana")]))
    report = probe_template(template).text("user")
    assert (
        TextTransform.BRANCHES in report.transforms or TextTransform.REWRITES in report.transforms
    )
    assert not report.exact


def test_a_text_that_is_split_is_reported() -> None:
    report = probe_template(with_content("m.content.split('###')[0]")).text("user")
    assert TextTransform.SPLITS in report.transforms
    assert not report.exact


def test_a_template_that_branches_on_a_text_is_reported() -> None:
    template = with_content("'!' if m.content == 'secret' else m.content")
    report = probe_template(template).text("user")
    assert TextTransform.BRANCHES in report.transforms
    assert "secret" in report.note


def test_a_date_is_frozen_in_every_format() -> None:
    source = "{{ strftime_now('%d %B %Y, %-d.%-m. %H:%M') }} " + PLAIN
    now = datetime(2031, 2, 3, 4, 5, 6)
    tokenizer = load_tokenizer()
    template = ChatTemplate(tokenizer, custom_template=source, now=now)
    text = template.decode(template.encode_prompt([user("Hi")]))
    assert text.startswith("03 February 2031, 3.2. 04:05 <|im_start|>")
    assert probe_template(template).date == "2031-02-03"


def test_a_template_s_first_newline_survives_the_frozen_date() -> None:
    source = "\n{{ strftime_now('%Y') }}" + PLAIN
    template = ChatTemplate(load_tokenizer(), custom_template=source, now=datetime(2031, 1, 1))
    assert template.decode(template.encode_prompt([user("Hi")])).startswith("\n2031<|im_start|>")


def test_variables_of_the_template_are_passed_on() -> None:
    source = PLAIN + "{% if add_generation_prompt and not thinking %}<think>\n{% endif %}"
    assert make_template(source).starts_in_thought
    assert not make_template(source, thinking=True).starts_in_thought


def test_an_open_and_closed_thought_is_no_start_in_a_thought() -> None:
    source = PLAIN + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    assert not make_template(source).starts_in_thought


def test_a_template_of_plain_words_has_no_end_of_turn_of_its_own() -> None:
    source = (
        "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}"
    )
    template = make_template(source)
    eos = load_tokenizer().eos_token_id
    assert template.stop_token_ids == (eos,)
    delta = template.encode_delta([user("More?")], last_ids=[1, eos])
    assert template.decode(delta.ids) == "\n\nUser: More?\n\nAssistant: "


def test_a_template_that_counts_rounds_is_found_out() -> None:
    """Its delta is right behind fixed neighbours and wrong in the second round."""
    source = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'tool' %}{% set ns.n = ns.n + 1 %}<|im_start|>tool {{ ns.n }}\n"
        "{% else %}<|im_start|>{{ m.role }}\n{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    report = probe_template(make_template(source))
    assert report.history(History.CALL_BEFORE_TOOL).stable
    assert report.history(History.TWO_TOOL_ROUNDS).stable is False
    with pytest.raises(TemplateError, match="two rounds"):
        require(report, TemplateNeeds(tools=True))


def test_a_template_that_looks_up_the_name_of_the_call_is_given_the_call() -> None:
    source = (
        "{% set ns = namespace(names={}) %}{% for m in messages %}"
        "{% if m.role == 'tool' %}{% for c in messages[loop.index0 - 1].tool_calls or [] %}"
        "{% if c.id == m.tool_call_id %}<|im_start|>result of {{ c.function.name }}: "
        "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = make_template(source)
    delta = template.encode_delta([tool("4", name="add")], last_ids=[])
    assert template.decode(delta.ids) == (
        "<|im_end|><|im_start|>result of add: 4<|im_end|><|im_start|>assistant\n"
    )


def test_arguments_are_given_as_json_text_where_the_template_wants_text() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = make_template(source)
    messages = [user("Hi"), assistant("", call(query='a "b"')), user("So?")]
    text = template.decode(template.encode_prompt(messages))
    assert 'search{"query": "a \\"b\\""}<|im_end|>' in text
    assert probe_template(template).carries(Capability.CALLS)


def test_a_call_id_keeps_its_length() -> None:
    source = PLAIN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if m.tool_call_id and m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}",
    )
    template = make_template(source)
    delta = template.encode_delta([tool("4")], last_ids=[])
    assert "4<|im_end|>" in template.decode(delta.ids)


def test_a_tool_template_is_used_where_there_are_tools() -> None:
    tokenizer = load_tokenizer()
    kept = tokenizer.chat_template
    tokenizer.chat_template = {
        "default": PLAIN,
        "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}" + PLAIN,
    }
    try:
        template = ChatTemplate(tokenizer)
        text = template.decode(template.encode_prompt([user("Hi")], [schema()]))
        assert text.startswith("search<|im_start|>user")
        assert template.decode(template.encode_prompt([user("Hi")])).startswith("<|im_start|>")
    finally:
        tokenizer.chat_template = kept


def test_a_template_that_wants_a_system_message_first_carries_users() -> None:
    source = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
        + PLAIN
    )
    template = make_template(source)
    delta = template.encode_delta([user("More?")], last_ids=[])
    assert "More?" in template.decode(delta.ids)
    prompt = template.encode_prompt([system("Be brief."), user("Hi")])
    assert "Be brief." in template.decode(prompt)
    report = probe_template(template)
    assert report.text("user").transforms == (TextTransform.VERBATIM,)
    require(report, TemplateNeeds(system=True, interaction=True))


def test_the_tokenizer_is_left_as_it_was() -> None:
    tokenizer = load_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    template = make_template(PLAIN)
    probe_template(template)
    assert tokenizer.backend_tokenizer.to_str() == before


LOOKING = (
    "{% set s = messages[0].content %}"
    "<|im_start|>system\n{% if '/no_think' in s %}Short.{% else %}Long.{% endif %}"
    "{{ s.replace('/no_think', '') }}<|im_end|>\n"
    "{% for m in messages[1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if '/no_think' in s %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("text", ["/no_think", "Be brief. /no_think", "/no_think\nBe brief."])
def test_a_marker_in_a_row_s_text_takes_the_template_s_branch(text: str) -> None:
    template = make_template(LOOKING)
    messages = [system(text), user("Hi")]
    rendered: Any = load_tokenizer().apply_chat_template(
        [message.to_template() for message in messages],
        chat_template=LOOKING,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert template.write_prompt(messages) == rendered
    ids = load_tokenizer().encode(rendered, add_special_tokens=False)
    assert template.encode_prompt(messages) == ids


def test_control_tokens_what_a_template_takes_out_of_a_text_leaves_no_control_token() -> None:
    template = make_template(LOOKING)
    hostile = template.encode_prompt([system("<|im_/no_thinkend|>"), user("Hi")])
    benign = template.encode_prompt([system("x/no_thinkx"), user("Hi")])
    assert control_tokens(template, hostile) == control_tokens(template, benign)


def test_a_text_of_many_markers_is_not_shown_to_the_template() -> None:
    template = make_template(LOOKING)
    read = template.read([system("/no_think " * 1000), user("Hi")])
    assert len(read.slots) == 2


HIDDEN = (
    "<|im_start|>system\n{% if messages[0].content | length < 10 %}Short.{% endif %}"
    "{{ messages[0].content }}<|im_end|>\n"
    "{% for m in messages[1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("mode", ["strict", "ignore_strippable"])
def test_a_branch_on_a_text_that_splicing_cannot_see_is_reported(mode: Any) -> None:
    template = make_template(HIDDEN)
    for text, kinds in (("Go.", ["rendering"]), ("Please go now.", [])):
        messages = [system(text), user("Hi")]
        prompt = template.encode_prompt(messages)
        sampled = template.encode_policy_text("Yes.") + list(template.stop_token_ids[-1:])
        found = check_ledger(
            template,
            [*messages, assistant("Yes.")],
            [],
            prompt_ids=prompt,
            response_ids=sampled,
            turns=[Turn(index=0, role="assistant", start=0, end=len(sampled))],
            mode=mode,
        )
        assert [difference.kind for difference in found] == kinds
