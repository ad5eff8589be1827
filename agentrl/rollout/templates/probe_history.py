"""Find out whether a template leaves older turns as they were sampled.

A story is played as a rollout would play it, and its ledger is held against the rendering of the
whole: what differs is what the template rewrites, wherever in the template that happens.
"""

import re
from collections.abc import Sequence

from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.records import TokenDifference, Turn
from agentrl.rollout.templates.anatomy import THOUGHTS
from agentrl.rollout.templates.check import check_ledger
from agentrl.rollout.templates.conversation import encode_turn
from agentrl.rollout.templates.report import Capability, History, HistoryReport
from agentrl.rollout.templates.stories import (
    THOUGHT,
    calling,
    prefaced,
    reason_of,
    result,
    saying,
    tool_schema,
    user,
)
from agentrl.rollout.templates.template import ChatTemplate, Tools

_STORIES: dict[History, list[Message]] = {
    History.ANSWER_BEFORE_USER: [user(), saying("Oslo."), user("And now?")],
    History.THOUGHT_BEFORE_USER: [user(), saying(THOUGHT), user("And now?")],
    History.CALL_BEFORE_TOOL: [user(), calling("Oslo"), result()],
    History.THOUGHT_BEFORE_TOOL: [user(), calling("Oslo", text=THOUGHT), result()],
    History.TWO_TOOL_ROUNDS: [
        user(),
        calling("Oslo"),
        result(),
        calling("Bern"),
        result("The sun shines."),
    ],
    History.TOOL_ROUND_BEFORE_USER: [
        user(),
        calling("Oslo"),
        result(),
        saying("It rains."),
        user("And now?"),
    ],
}

_EMPTY_THOUGHT = "|".join(
    rf"\A\s*{re.escape(opening)}\s*{re.escape(closing)}\s*" for opening, closing in THOUGHTS.items()
)


def probe_history(template: ChatTemplate, history: History) -> HistoryReport:
    """Play a story and say whether its ledger is what the template writes for the whole.

    A policy may leave out the empty thought that some templates write before an answer: the story
    is played both ways, and the better counts.
    """
    try:
        story = prefaced(template.anatomy.preface, _STORIES[history])
        plays = [_play(template, story, bare=bare) for bare in (False, True)]
    except TemplateError as error:
        return HistoryReport(history, None, reason_of(error))
    differences = min(plays, key=len)
    if not differences:
        return HistoryReport(history, True)
    first = differences[0]
    if first.kind == "missing":
        return HistoryReport(history, None, first.expected)
    return HistoryReport(history, False, f"sampled {first.actual!r}, rendered {first.expected!r}")


def _play(template: ChatTemplate, story: Sequence[Message], *, bare: bool) -> list[TokenDifference]:
    """Differences of a ledger in which each turn was sampled as the story has it."""
    tools = [tool_schema()] if any(message.tool_calls for message in story) else []
    spoken = [index for index, message in enumerate(story) if message.role == "assistant"]
    response_ids: list[int] = []
    turns: list[Turn] = []
    for at, until in zip(spoken, [*spoken[1:], len(story)], strict=True):
        replies = story[at + 1 : until]
        sampled = _sample(template, story[at], replies, tools, bare=bare)
        end = len(response_ids) + len(sampled)
        turns.append(Turn(index=len(turns), role="assistant", start=len(response_ids), end=end))
        response_ids += sampled
        response_ids += template.encode_delta(replies, last_ids=sampled, tools=tools).ids
    return check_ledger(
        template,
        story,
        tools,
        prompt_ids=template.encode_prompt(story[: spoken[0]], tools),
        response_ids=response_ids,
        turns=turns,
        mode="strict",
    )


def _sample(
    template: ChatTemplate,
    message: Message,
    replies: Sequence[Message],
    tools: Tools,
    *,
    bare: bool,
) -> list[int]:
    """Tokens of a turn as a policy would sample it; `bare`: without an empty thought."""
    if message.tool_calls and template.anatomy.call_style is None:
        raise TemplateError(f"the template carries no {Capability.CALLS}")
    *ids, stop = encode_turn(template, message, replies, tools)
    text = template.decode(ids)
    if message.text and message.text.split()[-1] not in text:
        # The template cannot write this before a call; a policy can.
        text = f"{message.text}\n{text}"
    elif not bare:
        return [*ids, stop]
    return [*template.encode_policy_text(re.sub(_EMPTY_THOUGHT, "", text)), stop]
