"""Whole bodies of the three dialects, changed as clients change them. Without HTTP."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent_loops.gateway.histories import Difference
from agentrl.agent_loops.gateway.server import DIALECTS
from agentrl.rollout.records import Budgets
from tests.agent_loops.gateway.test_trajectory import Played, completions
from tests.fakes.conversations import HOSTILE
from tests.fakes.gateway import LOOKUP
from tests.fakes.plugins import control_ids

Item = dict[str, Any]
FUNCTIONS: list[Item] = [LOOKUP["function"], LOOKUP["function"] | {"name": "other"}]
CHANGES = (
    Difference.ARGUMENTS,
    Difference.CALL_IDS,
    Difference.DROPPED_THINKING,
    Difference.INLINE_THINKING,
    Difference.WHITESPACE,
    Difference.CONTENT_PARTS,
    Difference.SPLIT_MESSAGE,
)


class Style(NamedTuple):
    """How a client writes its history."""

    changes: frozenset[Difference]
    results: Literal["text", "parts", "text, later parts"]
    reorders_tools: bool


class Chat:
    """OpenAI chat completions."""

    def __init__(self) -> None:
        self.items: list[Item] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]

    def body(self, items: list[Item], tools: list[Item]) -> Item:
        return {"messages": items, "tools": [{"type": "function", "function": t} for t in tools]}

    def own(self, reply: Item) -> list[Item]:
        return [reply["choices"][0]["message"]]

    def calls(self, own: list[Item]) -> list[str]:
        return [call["id"] for call in own[0].get("tool_calls", [])]

    def results(self, texts: dict[str, Any]) -> list[Item]:
        return [{"role": "tool", "tool_call_id": id, "content": t} for id, t in texts.items()]

    def change(self, item: Item, change: Difference) -> list[Item]:
        text, calls = item.get("content"), item.get("tool_calls") or []
        parts = isinstance(text, list)
        if item["role"] == "tool" and change is Difference.CALL_IDS:
            return [item | {"tool_call_id": f"own_{item['tool_call_id']}"}]
        if item["role"] != "assistant":
            return [item]
        match change:
            case Difference.ARGUMENTS if calls:
                functions = [c["function"] for c in calls]
                changed = [f | {"arguments": turned(f["arguments"])} for f in functions]
                pairs = zip(calls, changed, strict=True)
                return [item | {"tool_calls": [c | {"function": f} for c, f in pairs]}]
            case Difference.CALL_IDS if calls:
                return [item | {"tool_calls": [c | {"id": f"own_{c['id']}"} for c in calls]}]
            case Difference.DROPPED_THINKING:
                return [{k: v for k, v in item.items() if k != "reasoning_content"}]
            case Difference.INLINE_THINKING if "reasoning_content" in item and text and not parts:
                thought = item["reasoning_content"]
                kept = {k: v for k, v in item.items() if k != "reasoning_content"}
                return [kept | {"content": f"<think>\n{thought}\n</think>\n\n{text}"}]
            case Difference.WHITESPACE if isinstance(text, str) and text:
                return [item | {"content": trimmed(text)}]
            case Difference.CONTENT_PARTS if isinstance(text, str) and text:
                return [item | {"content": [{"type": "text", "text": text}]}]
            case Difference.SPLIT_MESSAGE if text and calls:
                head = {k: v for k, v in item.items() if k != "tool_calls"}
                return [head, {"role": "assistant", "content": None, "tool_calls": calls}]
            case _:
                return [item]


class Anthropic:
    """Anthropic messages. The system text is a field of its own."""

    def __init__(self) -> None:
        self.items: list[Item] = [{"role": "user", "content": "Hi"}]

    def body(self, items: list[Item], tools: list[Item]) -> Item:
        renamed = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in tools
        ]
        return {"system": "Be brief.", "messages": items, "tools": renamed, "max_tokens": 4000}

    def own(self, reply: Item) -> list[Item]:
        return [{"role": "assistant", "content": reply["content"]}]

    def calls(self, own: list[Item]) -> list[str]:
        return [block["id"] for block in own[0]["content"] if block["type"] == "tool_use"]

    def results(self, texts: dict[str, Any]) -> list[Item]:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": text}
            for id, text in texts.items()
        ]
        return [{"role": "user", "content": blocks}]

    def change(self, item: Item, change: Difference) -> list[Item]:
        blocks = item["content"]
        if isinstance(blocks, str):
            return [item]
        kinds = [block["type"] for block in blocks]
        match change:
            case Difference.ARGUMENTS:
                changed = [
                    b | {"input": dict(reversed(b["input"].items()))} if "input" in b else b
                    for b in blocks
                ]
            case Difference.CALL_IDS:
                names = ("id", "tool_use_id")
                changed = [b | {k: f"own_{b[k]}" for k in names if k in b} for b in blocks]
            case Difference.DROPPED_THINKING:
                changed = [b for b in blocks if b["type"] != "thinking"]
            case Difference.WHITESPACE:
                changed = [
                    b | {"text": trimmed(b["text"])} if b["type"] == "text" else b for b in blocks
                ]
            case Difference.SPLIT_MESSAGE if "text" in kinds and "tool_use" in kinds:
                cut = kinds.index("tool_use")
                return [item | {"content": blocks[:cut]}, item | {"content": blocks[cut:]}]
            case _:
                return [item]
        return [item | {"content": changed}]


class Responses:
    """OpenAI responses. Each part of a completion is an item."""

    def __init__(self) -> None:
        self.items: list[Item] = [
            {"role": "developer", "content": "Add."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ]

    def body(self, items: list[Item], tools: list[Item]) -> Item:
        written = [{"type": "function", "strict": False, **t} for t in tools]
        return {"instructions": "Be brief.", "input": items, "tools": written}

    def own(self, reply: Item) -> list[Item]:
        return reply["output"]

    def calls(self, own: list[Item]) -> list[str]:
        return [item["call_id"] for item in own if item["type"] == "function_call"]

    def results(self, texts: dict[str, Any]) -> list[Item]:
        return [
            {"type": "function_call_output", "call_id": id, "output": text}
            for id, text in texts.items()
        ]

    def change(self, item: Item, change: Difference) -> list[Item]:
        kind = item.get("type")
        match change:
            case Difference.ARGUMENTS if kind == "function_call":
                return [item | {"arguments": turned(item["arguments"])}]
            case Difference.CALL_IDS if "call_id" in item:
                return [item | {"call_id": f"own_{item['call_id']}"}]
            case Difference.DROPPED_THINKING if kind == "reasoning":
                return []
            case Difference.WHITESPACE if kind == "message":
                parts = [part | {"text": trimmed(part["text"])} for part in item["content"]]
                return [item | {"content": parts}]
            case _:
                return [item]


def turned(arguments: str) -> str:
    """The same JSON with the keys in another order."""
    return json.dumps(dict(reversed(json.loads(arguments).items())), indent=1)


def trimmed(text: str) -> str:
    """The same words with other blanks at the end."""
    return text.strip() + "\n"


def as_parts(item: Item, field: str) -> Item:
    text = item.get(field)
    if isinstance(text, list):  # Anthropic's results are blocks of a message
        return item | {field: [as_parts(block, "content") for block in text]}
    return item | {field: [{"type": "text", "text": text}]} if isinstance(text, str) else item


CLIENTS: dict[str, Callable[[], Any]] = {
    "/v1/chat/completions": Chat,
    "/v1/messages": Anthropic,
    "/v1/responses": Responses,
}
styles = st.builds(
    Style,
    st.frozensets(st.sampled_from(CHANGES), max_size=4),
    st.sampled_from(["text", "parts", "text, later parts"]),
    st.booleans(),
)
# Clients cannot send half of a surrogate pair.
texts = HOSTILE.map(lambda text: text.encode("utf-8", "replace").decode())
steps = st.tuples(completions(), st.lists(texts, min_size=2, max_size=2))


async def converse(
    played: Played, path: str, plan: list[tuple[str, list[str]]], style: Style
) -> set[Difference]:
    """Send a conversation in one dialect; return the differences that it has."""
    client, dialect = CLIENTS[path](), DIALECTS[path]
    expected: set[Difference] = set()
    num_shown = 0
    for number, (_, texts) in enumerate(plan):
        sent: list[Item] = []
        for index, item in enumerate(client.items):
            is_new = index >= num_shown
            field = "output" if "output" in item else "content"
            is_result = "tool_call_id" in item or field == "output" or holds_results(item)
            if is_result and (style.results == "parts" or (style.results != "text" and not is_new)):
                item = as_parts(item, field)
                if style.results != "parts" and path == "/v1/chat/completions":
                    expected.add(Difference.CONTENT_PARTS)
            written = [item]
            for change in sorted(style.changes):
                before = json.dumps(written)
                written = [new for one in written for new in client.change(one, change)]
                # Ids of results alone are those of the calls before them.
                if json.dumps(written) != before and not is_result:
                    expected.add(change)
            sent += written
        num_shown = len(client.items)
        is_reordered = style.reorders_tools and number % 2
        if is_reordered:
            expected.add(Difference.TOOL_ORDER)
        body = client.body(sent, FUNCTIONS[::-1] if is_reordered else FUNCTIONS)
        call = dialect.read(json.dumps(body).encode())
        reply, point = await played.trajectory.complete(call)
        point.is_delivered = True
        own = client.own(json.loads(json.dumps(dialect.write(reply, call))))
        ids = client.calls(own)
        client.items += own
        answers = client.results(dict(zip(ids, texts, strict=False)))
        client.items += answers if ids else [{"role": "user", "content": f"u{texts[0]}"}]
    return expected


def holds_results(item: Item) -> bool:
    content = item.get("content")
    return isinstance(content, list) and [b.get("type") for b in content[:1]] == ["tool_result"]


@pytest.mark.parametrize("path", CLIENTS)
@settings(max_examples=60, deadline=None)
@given(plan=st.lists(steps, min_size=1, max_size=4), style=styles)
def test_bodies_of_a_client_keep_one_sequence(
    path: str, plan: list[tuple[str, list[str]]], style: Style
) -> None:
    budgets = Budgets(max_response_tokens=8000, max_model_len=9000)
    played = Played(lambda n: plan[min(n, len(plan) - 1)][0], budgets=budgets)
    expected = asyncio.run(converse(played, path, plan, style))
    request = played.finish()
    played.check()
    assert request.branches == []
    assert len(request.turns) == 2 * len(plan) - 1
    counted = {name for name in Difference if played.trajectory.counts[name]}
    assert counted - {Difference.EMPTY_CONTENT} == expected
    for turn in request.turns[1::2]:
        shown = control_ids(request.response_ids[turn.start : turn.end])
        assert set(shown) <= {"<|im_start|>", "<|im_end|>"}
        assert shown.count("<|im_end|>") == shown.count("<|im_start|>") - 1
