"""Details of bodies in which clients differ: the same effect in every dialect. Without HTTP."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.agent_loops.gateway.calls import CallError, ChatCall, ChatReply, SentMessage
from agentrl.agent_loops.gateway.server import DIALECTS
from agentrl.agent_loops.gateway.trajectory import Trajectory
from agentrl.config.schema.agent import GatewayConfig
from agentrl.engines.protocol import FinishReason
from agentrl.rollout.states import StopReason
from tests.agent_loops.gateway.test_trajectory import SYSTEM, Played, user
from tests.fakes.gateway import LOOKUP
from tests.fakes.plugins import calling, decode, make_context

Item = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARAMETERS = LOOKUP["function"]["parameters"]
ASK = [{"role": "user", "content": "Hi"}]


def body_of(path: str, **fields: Any) -> Item:
    return {"input" if path == RESPONSES else "messages": ASK} | fields


def read(path: str, body: Item) -> ChatCall:
    return DIALECTS[path].read(json.dumps(body).encode())


def tool_of(path: str, **fields: Any) -> Item:
    """A function tool; `parameters` is `input_schema` for Anthropic."""
    if path == MESSAGES:
        renamed = {"input_schema" if k == "parameters" else k: v for k, v in fields.items()}
        return {"name": "lookup", **renamed}
    function = {"name": "lookup", **fields}
    return {"type": "function"} | ({"function": function} if path == CHAT else function)


OTHER_TOOLS: list[Item] = [
    {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar"}}},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp", "server_label": "x", "tools": "all", "name": 7, "description": []},
    {"type": "namespace", "name": None, "tools": 3},
]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("other", OTHER_TOOLS, ids=lambda tool: tool["type"])
def test_tools_of_other_kinds_are_left_out_and_counted(path: str, other: Item) -> None:
    if path == MESSAGES and other["type"] == "custom":
        other = other | {"type": "custom_20260101"}
    tools = [tool_of(path, parameters=PARAMETERS), other]
    call = read(path, body_of(path, tools=tools))
    assert [tool.name for tool in call.tools] == ["lookup"]
    assert call.ignored == ("tools",)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("field", ["description", "parameters", "strict", "type"])
def test_a_null_of_a_tool_is_an_absent_field(path: str, field: str) -> None:
    tool = tool_of(path, description="d", parameters=PARAMETERS)
    absent, null = dict(tool), tool_of(path, description="d", parameters=PARAMETERS)
    if field == "type":
        absent, null = {k: v for k, v in tool.items() if k != "type"}, tool | {"type": None}
    else:
        kept = {"description": "d", "parameters": PARAMETERS} | {field: None}
        null = tool_of(path, **kept)
        absent = tool_of(path, **{k: v for k, v in kept.items() if v is not None})
    calls = [read(path, body_of(path, tools=[one])) for one in (absent, null)]
    assert calls[0].tools == calls[1].tools
    assert calls[1].ignored == ()


NULLS = ["model", "tools", "tool_choice", "stop", "stop_sequences", "temperature", "top_p"]
NULLS += ["stream", "system", "instructions", "metadata", "max_tokens", "parallel_tool_calls"]
NULLS += ["n", "logprobs", "stream_options", "include", "reasoning", "thinking", "other"]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("field", NULLS)
def test_a_null_is_an_absent_field(path: str, field: str) -> None:
    call, plain = read(path, body_of(path, **{field: None})), read(path, body_of(path))
    assert (call.messages, call.tools, call.stop, call.tool_choice, call.ignored) == (
        (plain.messages, plain.tools, plain.stop, plain.tool_choice, plain.ignored)
    )


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("stops", [[""], ["", "Observation:"], ["Observation:", "", ""]])
def test_empty_stops_are_left_out_and_counted(path: str, stops: list[str]) -> None:
    field = "stop" if path == CHAT else "stop_sequences"
    call = read(path, body_of(path, **{field: stops}))
    assert call.stop == tuple(text for text in stops if text)
    assert call.ignored == (field,)
    if path == CHAT:
        assert read(path, body_of(path, stop="")).stop == ()


@pytest.mark.parametrize("path", DIALECTS)
async def test_an_unknown_choice_of_tools_has_no_effect_and_is_counted(path: str) -> None:
    played = Played(lambda _: "Well.")
    call = read(path, body_of(path, tool_choice={"type": "hosted", "mode": "auto"}))
    reply, _ = await played.trajectory.complete(call)
    assert reply.unmet == ("tool_choice",)


def allowed(path: str, *names: Any, **fields: Any) -> Item:
    """A `tool_choice` of allowed tools, as the API writes it."""
    listed = [{"type": "function", "name": name} for name in names]
    if path != CHAT:
        return {"type": "allowed_tools", "tools": listed} | fields
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"tools": listed} | fields}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("mode", ["auto", "required", None])
@pytest.mark.parametrize("names", [["lookup"], ["other", "lookup"], ["lookup", "absent"]])
def test_allowed_tools_are_the_tools_of_the_call(
    path: str, mode: str | None, names: list[str]
) -> None:
    other = tool_of(path, parameters=PARAMETERS)
    (other["function"] if path == CHAT else other)["name"] = "other"
    tools = [tool_of(path, parameters=PARAMETERS), other]
    choice = allowed(path, *names, **({"mode": mode} if mode else {}))
    call = read(path, body_of(path, tools=tools, tool_choice=choice))
    assert [tool.name for tool in call.tools] == [n for n in ("lookup", "other") if n in names]
    assert (call.tool_choice, call.ignored) == (mode or "auto", ())


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    "given",
    [{}, {"tools": []}, {"tools": 3}, {"tools": [3]}, {"mode": "none"}, {"tools": [{"name": 7}]}],
    ids=str,
)
def test_allowed_tools_that_are_none_are_refused_by_field(path: str, given: Item) -> None:
    tools, names = [tool_of(path, parameters=PARAMETERS)], ["absent"] if not given else []
    choice = allowed(path, *names, **given)
    with pytest.raises(CallError, match="tool_choice") as caught:
        read(path, body_of(path, tools=tools, tool_choice=choice))
    assert str(caught.value.param).startswith("tool_choice")


def test_allowed_tools_may_be_in_a_namespace() -> None:
    function = {"type": "function", "name": "run", "parameters": PARAMETERS}
    space = {"type": "namespace", "name": "agents", "tools": [function]}
    choice = {"type": "allowed_tools", "tools": [{"name": "run", "namespace": "agents"}]}
    call = read(RESPONSES, body_of(RESPONSES, tools=[space], tool_choice=choice))
    assert [tool.name for tool in call.tools] == ["agents__run"]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("half", ["\\ud83d", "\\udc00 x", "\\ud83d\\ud83d\\ude00"])
def test_halves_of_surrogate_pairs_are_replaced_and_counted(path: str, half: str) -> None:
    body = json.dumps(body_of(path)).replace("Hi", half)
    call = DIALECTS[path].read(body.encode())
    expected = json.loads(f'"{half}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert call.messages[-1].text == expected
    assert "\ufffd" in expected
    assert call.ignored == ("surrogates",)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3, "input": 3}', b"\xff{}"])
def test_what_cannot_be_read_is_refused_by_field(path: str, body: bytes) -> None:
    with pytest.raises(CallError) as caught:
        DIALECTS[path].read(body)
    assert caught.value.status == 400


PARTS = [{"type": "text", "text": "src/a.py"}, {"type": "text", "text": ""}]
PARTS += [{"type": "text", "text": "tests/b.py"}]
RESULTS: dict[str, Callable[[Any], list[Item]]] = {
    CHAT: lambda content: [{"role": "tool", "tool_call_id": "1", "content": content}],
    RESPONSES: lambda content: [
        {"type": "function_call_output", "call_id": "1", "output": content}
    ],
    MESSAGES: lambda content: [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}],
        }
    ],
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_text_blocks_are_joined_by_line_breaks(path: str, role: str) -> None:
    items = RESULTS[path](PARTS) if role == "tool" else [{"role": role, "content": PARTS}, *ASK]
    call = read(path, {"input" if path == RESPONSES else "messages": items})
    (message,) = [one for one in call.messages if one.text != "Hi"]
    assert (message.role, message.text) == (role, "src/a.py\ntests/b.py")


def test_the_system_blocks_of_messages_are_joined_and_a_failed_result_says_so() -> None:
    items = RESULTS[MESSAGES]("no such file")
    items[0]["content"][0]["is_error"] = True
    call = read(MESSAGES, {"messages": items, "system": PARTS})
    assert [m.text for m in call.messages] == ["src/a.py\ntests/b.py", "Error: no such file"]


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (CHAT, lambda body: body["choices"][0]["finish_reason"]),
        (RESPONSES, lambda body: f"{body['status']} {body['incomplete_details']}"),
        (MESSAGES, lambda body: body["stop_reason"]),
    ],
)
@pytest.mark.parametrize("calls", [0, 1, 2])
async def test_a_cut_completion_says_so(path: str, end: Callable[[Item], str], calls: int) -> None:
    ends = {CHAT: "length", MESSAGES: "max_tokens"}
    spoken = calling("lookup", q="x") * calls + "and more text"
    played = Played(lambda _: spoken)
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    sizes = {limit: len(spoken) - 4 - calls * (len("<tool_call></tool_call>") - 2)}
    call = read(path, body_of(path, tools=[tool_of(path, parameters=PARAMETERS)], **sizes))
    reply, _ = await played.trajectory.complete(call)
    assert reply.finish_reason is FinishReason.LENGTH
    assert len(reply.message.calls) == calls
    written = DIALECTS[path].write(reply, call)
    assert end(written) == ends.get(path, "incomplete {'reason': 'max_output_tokens'}")
    events = [event.data for event in DIALECTS[path].stream(reply, call)]
    assert ends.get(path, "response.incomplete") in json.dumps(events)
    assert played.trajectory.counts["cut_max_tokens"] == 1


SPACE = {"type": "namespace", "name": "agents_v1", "description": "Sub-agents."}
INNER = [{"type": "function", "name": "spawn", "parameters": None}, {"type": "custom", "name": "c"}]


async def test_functions_of_a_namespace_are_called_by_their_qualified_name() -> None:
    tools = [tool_of(RESPONSES, parameters=PARAMETERS), SPACE | {"tools": INNER}]
    call = read(RESPONSES, body_of(RESPONSES, tools=tools))
    assert [tool.name for tool in call.tools] == ["lookup", "agents_v1__spawn"]
    assert call.ignored == ("tools",)
    answers = [calling("agents_v1__spawn") + calling("lookup", q="x"), "Done."]
    played = Played(lambda number: answers[number])
    reply, _ = await played.trajectory.complete(call)
    output = DIALECTS[RESPONSES].write(reply, call)["output"]
    named = [(item.get("namespace"), item["name"]) for item in output]
    assert named == [("agents_v1", "spawn"), (None, "lookup")]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in output
    ]
    items = [*ASK, *output, *results]
    await played.trajectory.complete(read(RESPONSES, {"input": items, "tools": tools}))
    assert played.finish().branches == []
    played.check()


VOLATILE = [
    "x-anthropic-billing-header: cc_version=2.1; cch={0};",
    "Current time: 2026-11-27T13:04:0{0}Z",
    "Today's date is Fri Nov 2{0} 2026",
    "<request_id>{0}</request_id>",
    "Trace ID = {0}",
    "timestamp: 179578468{0}",
]


@pytest.mark.parametrize("line", VOLATILE)
@pytest.mark.parametrize("form", ["{line}\nBe brief.", "Be brief.\n{line}\nGo on.", "{line}"])
async def test_volatile_lines_do_not_split_a_trajectory(line: str, form: str) -> None:
    played, history = Played(lambda _: "Well."), [user("Hi")]
    for number in range(4):
        text = form.format(line=line.format(number))
        system = SentMessage(role="system", text=text)
        history += [await played.ask([system, *history]), user("More.")]
    request = played.finish()
    assert request.branches == []
    assert played.trajectory.counts["volatile_line"] >= 3
    assert ("header" in decode(request.prompt_ids)) is False
    played.check()


@pytest.mark.parametrize("change", ["Remaining turns: {0}", "Mode: plan {0}", "x-axis: {0}"])
async def test_other_lines_of_a_system_message_are_its_content(change: str) -> None:
    played, history = Played(lambda _: "Well."), [user("Hi")]
    for number in range(2):
        system = SentMessage(role="system", text=change.format(number))
        history += [await played.ask([system, *history]), user("More.")]
    assert len(played.finish().branches) == 1


@pytest.mark.parametrize("repeated", [SYSTEM, user("Hi")])
async def test_a_repeated_message_is_shown(repeated: SentMessage) -> None:
    played, history = Played(lambda _: "Well."), [SYSTEM, user("Hi")]
    history += [await played.ask(history), repeated, user("More.")]
    history += [await played.ask(history), user("Again.")]
    await played.ask(history)
    request = played.finish()
    assert request.branches == []
    assert decode(request.input_ids).count(repeated.text) == 2
    played.check()


@pytest.mark.parametrize("order", ["before", "between", "after"])
async def test_side_calls_are_kept_and_not_trained(order: str) -> None:
    played = Played(lambda _: "Well.")
    context = make_context(played.engine, tokenization_sanity_check_mode="ignore_strippable")
    settings = GatewayConfig(untrained_models=("small", "*haiku*"))
    played.trajectory = Trajectory(played.request, context, played.engine, settings=settings)
    history = [SYSTEM, user("Hi")]

    async def ask_side() -> None:
        for model in ("small", "claude-haiku-4"):
            await played.ask([*history, user("A title?")], tools=(), model=model)

    if order == "before":
        await ask_side()
    history += [await played.ask(history, model="policy"), user("More.")]
    if order == "between":
        await ask_side()
    await played.ask(history, model="policy")
    if order == "after":
        await ask_side()
    assert played.trajectory.cut is None
    request = played.finish()
    assert request.stop_reason is StopReason.ANSWERED
    assert [turn.role for turn in request.turns] == ["assistant", "user", "assistant"]
    assert request.parent_id is None
    assert {branch.branch_cause for branch in request.branches} == {"side_call"}
    assert len(request.branches) == 2
    assert [sum(branch.loss_mask) for branch in request.branches] == [0, 0]
    assert sum(request.loss_mask) == 2 * (len("Well.") + 1)
    assert played.trajectory.counts["discarded"] == 0
    played.check()


def test_a_reply_names_its_end() -> None:
    reply = ChatReply(
        reply_id="r",
        message=SentMessage(role="assistant"),
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        created=0,
    )
    assert reply.outcome == "length"
