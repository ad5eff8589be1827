"""Find out whether a template leaves older turns as they were sampled.

A conversation is sampled as a rollout would sample it, and its ledger is compared with the
rendering of the whole. A difference means that the template rewrites an older turn. A turn ends at
its first stop token, as an engine ends it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.errors import TemplateError
from agentrl.messages import THOUGHTS, Message
from agentrl.rollout.records import TokenDifference, Turn
from agentrl.rollout.templates.assistant_turn import encode_turn, follow_prompt, spoken_text
from agentrl.rollout.templates.check import check_ledger
from agentrl.rollout.templates.probe.report import Capability, History, HistoryReport
from agentrl.rollout.templates.probe_conversations import (
    PARALLEL_CITIES,
    REASONING,
    answer_message,
    call_message,
    parallel_calls_message,
    reason_of,
    result_message,
    tool_schema,
    user_message,
    with_preface,
)
from agentrl.rollout.templates.template import ChatTemplate, Tools

_SYSTEM = Message(role="system", content="Be brief.")
_CONVERSATIONS: dict[History, list[Message]] = {
    History.ANSWER_BEFORE_USER: [
        *(user_message(), answer_message("Oslo."), user_message("And now?")),
        *(answer_message("Bern."), user_message("Thanks.")),
    ],
    History.CALL_BEFORE_TOOL: [user_message(), call_message("Oslo"), result_message()],
    History.TWO_TOOL_ROUNDS: [
        *(user_message(), call_message("Oslo"), result_message()),
        *(call_message("Bern", 1), result_message("The sun shines.", 1), answer_message("Done.")),
    ],
    History.PARALLEL_CALLS: [
        *(user_message(), parallel_calls_message(*PARALLEL_CITIES), result_message()),
        *(result_message("The sun shines.", 1), answer_message("Done.")),
    ],
    History.TOOL_ROUND_BEFORE_USER: [
        *(user_message(), call_message("Oslo"), result_message(), answer_message("It rains.")),
        *(user_message("And now?"), call_message("Bern", 1), result_message("The sun shines.", 1)),
        answer_message("Done."),
    ],
}
_WITH_THOUGHTS = {
    History.THOUGHT_BEFORE_USER: History.ANSWER_BEFORE_USER,
    History.THOUGHT_BEFORE_TOOL: History.TWO_TOOL_ROUNDS,
    History.THOUGHT_OF_ROUND_BEFORE_USER: History.TOOL_ROUND_BEFORE_USER,
}

_EMPTY_THOUGHT = "|".join(
    rf"\A\s*{re.escape(opening)}\s*{re.escape(closing)}\s*" for opening, closing in THOUGHTS.items()
)


class _Finding(NamedTuple):
    """What is wrong with a conversation; empty: nothing."""

    rewrites: str = ""
    rewrites_empty: str = ""
    """The difference if the policy writes the empty thought that the template writes."""
    is_cut: bool = False
    """Whether a turn ends before its text is complete."""


class _CutError(Exception):
    """A stop token occurs before the end of a turn."""


def probe_history(template: ChatTemplate, history: History) -> HistoryReport:
    """Sample a conversation, and compare its ledger with what the template writes for the whole.

    Some templates write an empty thought before an answer, which a policy may omit. The
    conversation is sampled with and without it, and the better result counts.
    """
    conversation = plain = _CONVERSATIONS[_WITH_THOUGHTS.get(history, history)]
    preface = template.structure.preface
    try:
        opens = template.starts_in_thought
        # After a prompt that opens a thought, each turn contains one.
        if (opens or history in _WITH_THOUGHTS) and not template.structure.closes_thought:
            conversation = [_thinking(template, message, REASONING) for message in plain]
        found = _examine(template, with_preface(preface, conversation))
    except TemplateError as error:
        return HistoryReport(history, None, reason_of(error))
    after_system, rewrites_empty = "", found.rewrites_empty
    if not found.rewrites and not preface and _takes_system(template):
        after_system = _rewrites(template, [_SYSTEM, *conversation])
    if not found.rewrites and opens:
        empty = [_thinking(template, message, "") for message in plain]
        rewrites_empty = _rewrites(template, with_preface(preface, empty))
    return HistoryReport(
        history,
        not found.rewrites,
        found.rewrites,
        found.is_cut,
        after_system,
        rewrites_empty,
    )


def _takes_system(template: ChatTemplate) -> bool:
    try:
        template.encode_prompt([_SYSTEM, user_message()])
    except TemplateError:
        return False  # the capabilities say so
    return True


def _rewrites(template: ChatTemplate, conversation: Sequence[Message]) -> str:
    """Return what the template rewrites, or why it refuses the conversation; empty if neither."""
    try:
        return _examine(template, conversation).rewrites
    except TemplateError as error:
        return reason_of(error)


def _thinking(template: ChatTemplate, message: Message, thought: str) -> Message:
    """Add a thought to an assistant message, in the template's own form."""
    if message.role != "assistant":
        return message
    if field := template.structure.reasoning_field:
        return message.model_copy(update={field: thought})
    said = message.text or "I see."
    opening, closing = next(iter(template.structure.thought_tags.items()))
    content = f"{opening}\n{thought}\n{closing}\n\n{said}"
    return message.model_copy(update={"content": content})


def _examine(template: ChatTemplate, conversation: Sequence[Message]) -> _Finding:
    try:
        differences = full = _play(template, conversation, bare=False)
        if full:
            differences = min(full, _play(template, conversation, bare=True), key=len)
    except _CutError as cut:
        return _Finding(str(cut), is_cut=True)
    if not full:
        return _Finding()
    first = differences[0] if differences else full[0]
    if first.kind == "missing":
        raise TemplateError(first.expected)
    what = f"sampled {first.actual!r}, rendered {first.expected!r}"
    return _Finding(what) if differences else _Finding(rewrites_empty=what)


def _play(
    template: ChatTemplate, conversation: Sequence[Message], *, bare: bool
) -> list[TokenDifference]:
    """Return the differences of the ledger that results from sampling each turn as it is."""
    tools = [tool_schema()] if any(message.tool_calls for message in conversation) else []
    spoken = [index for index, message in enumerate(conversation) if message.role == "assistant"]
    response_ids: list[int] = []
    turns: list[Turn] = []
    for at, until in zip(spoken, [*spoken[1:], len(conversation)], strict=True):
        replies = conversation[at + 1 : until]
        sampled = _sample(template, conversation[at], replies, tools, bare=bare)
        end = len(response_ids) + len(sampled)
        turns.append(Turn(index=len(turns), role="assistant", start=len(response_ids), end=end))
        response_ids += sampled
        if replies:
            response_ids += template.encode_delta(replies, last_ids=sampled, tools=tools).ids
    found = check_ledger(
        template,
        conversation,
        tools,
        prompt_ids=template.encode_prompt(conversation[: spoken[0]], tools),
        response_ids=response_ids,
        turns=turns,
        mode="strict",
    )
    # A last answer makes the turns before it older ones, and is no older turn itself.
    is_older = conversation[-1].role != "assistant"
    return [difference for difference in found if is_older or difference.turn < turns[-1].index]


def _sample(
    template: ChatTemplate,
    message: Message,
    replies: Sequence[Message],
    tools: Tools,
    *,
    bare: bool,
) -> list[int]:
    """Return a turn's tokens as a policy would sample them; `bare`: without an empty thought."""
    if message.tool_calls and template.structure.call_style is None:
        raise TemplateError(f"the template does not support: {Capability.CALLS}")
    *ids, stop = encode_turn(template, message, replies, tools)
    text = template.decode(ids)
    said = [*message.text.split()[-1:], REASONING if REASONING in spoken_text(message) else ""]
    calls = message.tool_calls or []
    if any(str(call.function.arguments["city"]) not in text for call in calls):
        raise TemplateError("the template leaves out a call of a turn with several")
    if any(word not in text for word in said):
        # The template does not write this text in a turn, or not before a call; a policy can.
        call = f"\n{text.lstrip()}" if message.tool_calls else ""
        text = spoken_text(message) + call
    if (followed := follow_prompt(template.structure, text)) != template.decode(ids):
        # The turn closes the thought that its prompt opened.
        text, ids = followed, template.encode_policy_text(followed)
    if bare:
        ids = template.encode_policy_text(re.sub(_EMPTY_THOUGHT, "", text))
    return _up_to_stop(template, message, [*ids, stop])


def _up_to_stop(template: ChatTemplate, message: Message, ids: list[int]) -> list[int]:
    """Cut a turn at its first stop token, as an engine does.

    Raises:
        _CutError: if the message is not complete by then.
    """
    stops = set(template.stop_token_ids)
    length = next((n + 1 for n, token in enumerate(ids) if token in stops), len(ids))
    text = template.decode(ids[:length])
    said = [*message.text.split()[-1:]]
    said += [str(call.function.arguments["city"]) for call in message.tool_calls or []]
    lost = next((word for word in said if word not in text), None)
    if lost is not None:
        stop = template.decode(ids[length - 1 : length])
        whole = template.decode(ids)
        raise _CutError(f"the stop token {stop!r} ends the turn before {lost!r} in {whole!r}")
    return ids[:length]
