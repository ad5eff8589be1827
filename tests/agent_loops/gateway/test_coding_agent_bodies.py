"""Bodies as Claude Code, OpenCode and Codex CLI send them: accepted, one sequence, no text lost.

The fields, their order and the forms of the contents are those of the agents; the texts are short
ones of this test. Without HTTP.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from agentrl.agent_loops.gateway.server import DIALECTS
from agentrl.agent_loops.gateway.trajectory import Trajectory
from agentrl.config.schema.agent import GatewayConfig
from tests.agent_loops.gateway.test_trajectory import Played
from tests.fakes.gateway import LOOKUP
from tests.fakes.plugins import calling, decode, make_context

Item = dict[str, Any]
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = LOOKUP["function"]["parameters"]
SPOKEN = ["<think>I look.</think>First. " + calling("lookup", q="x"), calling("lookup", n=2, q="y")]
SPOKEN += ["It is done."]
RESULTS = ["one\nline", "  two  "]


def claude_code(replies: list[Item]) -> Item:
    """Claude Code 2.1.197: system blocks, a later system message, the mark of the cache moves."""
    task: list[Item] = [{"type": "text", "text": "<system-reminder>\nThe day is a Friday.\n"}]
    task += [{"type": "text", "text": "Look it up."} | ({} if replies else CACHED)]
    messages: list[Item] = [
        {"role": "user", "content": task},
        {"role": "system", "content": "Available agents:\n- one: it helps"},
    ]
    for number, reply in enumerate(replies):
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        result = {"tool_use_id": calls[0]["id"], "type": "tool_result", "content": RESULTS[number]}
        result |= {"is_error": False} if number else {}
        result |= CACHED if number == len(replies) - 1 else {}
        messages += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [result]},
        ]
    header = f"x-anthropic-billing-header: cc_version=2.1.197.{len(replies)}; cc_entrypoint=cli;"
    system = [{"type": "text", "text": header}]
    system += [{"type": "text", "text": text} | CACHED for text in ("You are C.", "\nBe brief.\n")]
    return {
        "model": "policy",
        "messages": messages,
        "system": system,
        "tools": [{"name": "lookup", "description": "Look it up.", "input_schema": SCHEMA}],
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def opencode(replies: list[Item]) -> Item:
    """OpenCode 1.18.33: no thinking, an empty content, arguments without blanks."""
    messages: list[Item] = [
        {"role": "system", "content": "You are O.\n\nBe brief."},
        {"role": "user", "content": '"Look it up."'},
    ]
    for number, reply in enumerate(replies):
        said = reply["choices"][0]["message"]
        calls = []
        for call in said["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            compact = json.dumps(arguments, separators=(",", ":"))
            function = {"name": call["function"]["name"], "arguments": compact}
            calls.append({"id": call["id"], "type": "function", "function": function})
        messages += [
            {"role": "assistant", "content": said["content"] or "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": RESULTS[number]},
        ]
    return {
        "model": "policy",
        "max_tokens": 4096,
        "messages": messages,
        "tools": [LOOKUP],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def codex(replies: list[Item]) -> Item:
    """Codex CLI 0.171.0: developer messages, other kinds of tools, items with ids of its own."""
    texts = [("developer", ["You are X."]), ("developer", ["<skills>\none", "<permissions>\nall"])]
    texts += [("user", ["<environment>\n  <cwd>/w</cwd>"]), ("user", ["Look it up."])]
    items: list[Item] = [
        {
            "type": "message",
            "id": f"msg_own-{number}",
            "role": role,
            "content": [{"type": "input_text", "text": text} for text in parts],
        }
        for number, (role, parts) in enumerate(texts)
    ]
    for number, reply in enumerate(replies):
        for item in reply["output"]:
            kept = ("type", "id", "role", "content", "summary", "name", "arguments", "call_id")
            own = {key: item[key] for key in kept if key in item}
            if item["type"] == "reasoning":
                own |= {"encrypted_content": item.get("encrypted_content")}
            items.append(own)
        call_id = reply["output"][-1]["call_id"]
        result = {"type": "function_call_output", "id": f"fco_own-{number}", "call_id": call_id}
        items.append(result | {"output": RESULTS[number]})
    function = {"type": "function", "name": "lookup", "description": "Look it up.", "strict": False}
    inner = {"type": "function", "name": "spawn", "strict": False, "parameters": SCHEMA}
    space = {"type": "namespace", "name": "agents_v1", "description": "Agents.", "tools": [inner]}
    return {
        "model": "policy",
        "stream": True,
        "input": items,
        "tools": [
            function | {"parameters": SCHEMA},
            space,
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"turn_id": "t", "x-codex-window-id": "w:0"},
    }


class Sent(NamedTuple):
    """An agent's bodies, its texts in their order, and what the gateway counts."""

    path: str
    body: Callable[[list[Item]], Item]
    texts: tuple[str, ...]
    ignored: tuple[str, ...]


SENT = {
    "claude_code": Sent(
        "/v1/messages",
        claude_code,
        ("You are C.", "\nBe brief.\n", "The day is a Friday.", "Look it up.", "- one: it helps"),
        ("context_management", "output_config", "thinking"),
    ),
    "opencode": Sent(
        "/v1/chat/completions",
        opencode,
        ("You are O.\n\nBe brief.", '"Look it up."'),
        (),
    ),
    "codex": Sent(
        "/v1/responses",
        codex,
        ("You are X.", "<skills>\none", "<permissions>\nall", "<cwd>/w</cwd>", "Look it up."),
        ("client_metadata", "tools"),
    ),
}


@pytest.mark.parametrize("name", SENT)
async def test_three_calls_of_an_agent_are_one_sequence_with_all_its_texts(name: str) -> None:
    sent, dialect = SENT[name], DIALECTS[SENT[name].path]
    played, replies = Played(lambda number: SPOKEN[number]), list[Item]()
    for _ in SPOKEN:
        call = dialect.read(json.dumps(sent.body(replies)).encode())
        assert call.stream
        assert set(call.ignored) == set(sent.ignored)
        assert "lookup" in [tool.name for tool in call.tools]
        reply, point = await played.trajectory.complete(call)
        point.is_delivered = True
        assert list(dialect.stream(reply, call))
        replies.append(json.loads(json.dumps(dialect.write(reply, call))))
    request = played.finish()
    assert request.branches == []
    played.check()
    spoken = [turn for turn in request.turns if turn.role == "assistant"]
    assert [sum(request.loss_mask[turn.start : turn.end]) for turn in spoken] == (
        [turn.num_tokens for turn in spoken]
    )
    text, at = decode(request.input_ids), 0
    assert "billing-header" not in text
    for one in (*sent.texts, SPOKEN[0], RESULTS[0], SPOKEN[1], RESULTS[1].strip(), SPOKEN[2]):
        found = text.find(one.strip(), at)
        assert found >= 0, (one, text[at:])
        at = found + len(one.strip())


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}])
async def test_the_title_call_of_opencode_is_a_side_call(fields: Item) -> None:
    answers = ["A title", *SPOKEN]
    played = Played(lambda number: answers[number])
    context = make_context(played.engine, tokenization_sanity_check_mode="ignore_strippable")
    settings = GatewayConfig(untrained_models=("small",))
    played.trajectory = Trajectory(played.request, context, played.engine, settings=settings)
    dialect, replies = DIALECTS["/v1/chat/completions"], list[Item]()
    ask = ["Write a title:\n", '"Look it up."']
    messages = [{"role": "system", "content": "You write titles."}]
    messages += [{"role": "user", "content": text} for text in ask]
    title = {"model": "small", "max_tokens": 32000, "messages": messages, "stream": True, **fields}
    for number in range(3):
        body = opencode(replies) if number else title
        call = dialect.read(json.dumps(body).encode())
        reply, point = await played.trajectory.complete(call)
        point.is_delivered = True
        replies += [json.loads(json.dumps(dialect.write(reply, call)))] if number else []
    request = played.finish()
    (side,) = request.branches
    assert side.branch_cause == "side_call"
    assert sum(side.loss_mask) == 0
    assert decode(side.response_ids) == "A title<|im_end|>"
    assert [turn.role for turn in request.turns] == ["assistant", "tool", "assistant"]
    played.check()
