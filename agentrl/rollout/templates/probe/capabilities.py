"""Find out, once when a run starts, what a chat template does and what it supports.

Everything is found by rendering: nothing here knows a model's name. For each text that is tried,
the template's output is compared with that of the compiled template, so the report says for which
positions the compiled template is exact.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from agentrl.errors import TemplateError
from agentrl.media.records import MediaKind
from agentrl.messages import Message
from agentrl.rollout.templates.assistant_turn import encode_turn
from agentrl.rollout.templates.cutting import slots_in_order
from agentrl.rollout.templates.delta import borrowed_names
from agentrl.rollout.templates.probe.history import probe_history
from agentrl.rollout.templates.probe.report import (
    Capability,
    CapabilityReport,
    History,
    TemplateReport,
)
from agentrl.rollout.templates.probe.texts import AWKWARD, POSITIONS, TextProbe
from agentrl.rollout.templates.probe_conversations import (
    PARALLEL_CITIES,
    parallel_calls_message,
    reason_of,
    result_message,
    tool_schema,
    user_message,
    with_preface,
)
from agentrl.rollout.templates.template import ChatTemplate, Tools

T = TypeVar("T")
SYSTEM = Message(role="system", content="Be brief.")
RARE = "▁Ġ\0\x1b\x7f\xa0\u200b\u202e\u2028\u3000\ue000\ufeff\ufffd\U0010ffff"
"""Characters that some vocabularies use for internal purposes, or lack."""

TOKEN_LIKE = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>\uff5c\s]{1,40}\uff5c>|<\|\w{1,40}>|<\w{1,40}\|>|<(?:start|end)_of_\w+>|"
    r"\[/?[A-Z][A-Z_]{2,40}\]"
)
"""Matches what is a control token in the templates of most models."""


def probe_template(template: ChatTemplate, tools: Tools = ()) -> TemplateReport:
    """Make the report on a template.

    Args:
        template: The run's template.
        tools: The run's tools; the report says whether the prompt names all of them.
    """
    structure = template.structure
    prompt = _or_none(lambda: structure.generation_prompt)
    stops = _or_none(lambda: structure.stop_token_ids) or ()
    texts = TextProbe(template)
    example = _or_none(lambda: _write_calls(template, ["Oslo"]))
    frames, control = _frames(template), structure.encoder.control_pattern
    # Of frames without a control token only; below, `[INST]` and the like are left out.
    missing = _missing_tokens(template, [frame for frame in frames if not control.search(frame)])
    return TemplateReport(
        template=template.name,
        generation_prompt=prompt,
        starts_in_thought=prompt is not None and template.starts_in_thought,
        thinks=structure.thinks,
        end_of_turn=_or_none(lambda: structure.end_of_turn.text) or "",
        stop_tokens=tuple(template.decode([id]) for id in stops),
        date=f"{structure.renderer.now:%Y-%m-%d}" if structure.renderer.writes_date else None,
        texts=tuple(texts.probe(position) for position in POSITIONS),
        capabilities=tuple(_probe_capability(template, c, tools) for c in Capability),
        histories=tuple(probe_history(template, history) for history in History),
        call_example=example,
        parallel_call_example=_or_none(lambda: _write_calls(template, PARALLEL_CITIES)),
        round_trip=_is_round_trip(template),
        lost_characters=tuple(c for c in RARE if not _comes_back(template, f"a{c}b")),
        missing_tokens=_missing_tokens(template, [*frames, prompt or "", example or ""]),
        plain_frames=tuple(token for token in missing if not token.startswith("[")),
    )


def _frames(template: ChatTemplate) -> list[str]:
    """Return what the template writes between a user's text and an assistant's, and after that."""
    pieces = _or_none(lambda: template.structure.alternating) or []
    return [str(piece) for piece in pieces[2:5:2]]


def _missing_tokens(template: ChatTemplate, texts: Sequence[str]) -> tuple[str, ...]:
    """Return what looks like a control token in these texts of the template, but is none."""
    found = [token for text in texts for token in TOKEN_LIKE.findall(text)]
    known = template.structure.encoder.added
    return tuple(dict.fromkeys(token for token in found if token not in known))


def _probe_capability(
    template: ChatTemplate, capability: Capability, tools: Tools
) -> CapabilityReport:
    try:
        _TRIALS[capability](template, tools)
    except TemplateError as error:
        return CapabilityReport(capability, False, reason_of(error))
    return CapabilityReport(capability, True)


def _try_generation_prompt(template: ChatTemplate, tools: Tools) -> None:
    if template.structure.wants_parts:
        raise TemplateError(
            "the template writes a message's text only if the content is a list of parts, but "
            "agentrl gives it a string"
        )
    _ = template.structure.generation_prompt


def _try_without_tools(template: ChatTemplate, tools: Tools) -> None:
    structure = template.structure
    if structure.needed_tools:
        try:
            structure.render_node(
                [*structure.preface, {"role": "user", "content": "Hi"}], (), True
            )({})
        except TemplateError as error:
            raise TemplateError(f"the template fails without tools ({error.args[0]})") from error


def _try_system(template: ChatTemplate, tools: Tools) -> None:
    template.encode_prompt([SYSTEM, user_message()])


def _try_tools(template: ChatTemplate, tools: Tools) -> None:
    """Check that the prompt contains every tool and a parameter's description."""
    known = [tool_schema(), *tools]
    words = [*(tool.name for tool in known), "A city."]
    messages = with_preface(template.structure.preface, [user_message()])
    prompt = template.decode(template.encode_prompt(messages, known))
    if not all(word in prompt for word in words):
        raise TemplateError("the template omits the tools from the prompt")


def _try_calls(template: ChatTemplate, tools: Tools) -> None:
    if template.structure.call_style is None:
        raise TemplateError(template.structure.why_no_calls)


def _try_delta(*messages: Message, opens: bool) -> Callable[[ChatTemplate, Tools], None]:
    """Make the trial that these messages can follow an assistant turn."""

    def attempt(template: ChatTemplate, tools: Tools) -> None:
        read = template.read(messages, [tool_schema()])
        finder = template.structure.finder(read.tools.nodes, read.tools.slots)
        found = finder.find(read.nodes, read.message_slots, add_generation_prompt=opens)
        if borrowed_names(read.nodes, found.pieces):
            raise TemplateError("the template writes the first call's name for every result")
        contents = [slot.number for slot in read.message_slots if slot.is_content]
        order = [index for index in slots_in_order(found.pieces) if index in contents]
        if order != contents:
            raise TemplateError("the template changes the order of the messages")

    return attempt


def _try_parallel_calls(template: ChatTemplate, tools: Tools) -> None:
    _write_calls(template, PARALLEL_CITIES)


def _try_tool_images(template: ChatTemplate, tools: Tools) -> None:
    """Check that an image in a tool result becomes a placeholder."""
    if template.media is None:
        raise TemplateError("the model reads text only")
    read = template.read([result_message()], [tool_schema()])
    texts = [{"type": "text", "text": node["content"]} for node in read.nodes]
    nodes = [read.nodes[0] | {"content": [{"type": "image"}, *texts]}]
    found = template.structure.finder(read.tools.nodes, read.tools.slots).find(
        nodes, read.message_slots
    )
    written = "".join(piece for piece in found.pieces if isinstance(piece, str))
    if template.media.placeholders[MediaKind.IMAGE] not in written:
        raise TemplateError("the template writes no placeholder for it")


_TRIALS: dict[Capability, Callable[[ChatTemplate, Tools], None]] = {
    Capability.GENERATION_PROMPT: _try_generation_prompt,
    Capability.WITHOUT_TOOLS: _try_without_tools,
    Capability.SYSTEM: _try_system,
    Capability.TOOLS: _try_tools,
    Capability.CALLS: _try_calls,
    Capability.TOOL_RESULT: _try_delta(result_message(), opens=False),
    Capability.PARALLEL_CALLS: _try_parallel_calls,
    Capability.TOOL_IMAGES: _try_tool_images,
    Capability.PARALLEL_RESULTS: _try_delta(
        result_message("Rain.", 0, "first_tool"),
        result_message("Sun.", 1, "second_tool"),
        opens=False,
    ),
    Capability.PROMPT_AFTER_TOOL: _try_delta(result_message(), opens=True),
    Capability.USER_AFTER_ASSISTANT: _try_delta(user_message(), opens=True),
    Capability.USER_AFTER_TOOL: _try_delta(result_message(), user_message(), opens=False),
}


def _write_calls(template: ChatTemplate, cities: Sequence[str]) -> str:
    """Write a turn that calls `probe_tool` for each city.

    Raises:
        TemplateError: if the template refuses or omits a call.
    """
    _try_calls(template, ())
    results = [result_message(number=number) for number in range(len(cities))]
    ids = encode_turn(template, parallel_calls_message(*cities), results, [tool_schema()])
    text = template.decode(ids[:-1] if ids[-1] in template.stop_token_ids else ids)
    if not all(city in text for city in cities):
        raise TemplateError("the template leaves out a call of a turn with several")
    return text


def _is_round_trip(template: ChatTemplate) -> bool:
    added = template.structure.encoder.added
    control = "".join(token for token in added if not any(c in RARE for c in token))
    texts = [AWKWARD, control, f" {AWKWARD}", f"\n{control}\n"]
    return all(_comes_back(template, text) for text in texts)


def _comes_back(template: ChatTemplate, text: str) -> bool:
    return template.decode(template.encode_text(text)) == template.structure.encoder.normalize(text)


def _or_none(find: Callable[[], T]) -> T | None:
    try:
        return find()
    except TemplateError:
        return None
