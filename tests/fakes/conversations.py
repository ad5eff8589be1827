"""Generated conversations: any turns, any results, failures and budgets anywhere."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from agentrl.engines.protocol import SamplingParams
from agentrl.engines.scripted import Answer, ScriptedAnswer, ScriptedEngine
from agentrl.errors import EngineError, ToolError
from agentrl.interactions import InteractionResult
from agentrl.messages import ToolResponse
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.tools import ToolResult
from tests.fakes.plugins import (
    CONTROL,
    FakeTool,
    FakeUser,
    encode,
    make_context,
    make_request,
    make_scripted,
    tiny_tokenizer,
)

HOSTILE = st.lists(
    st.sampled_from([*CONTROL, "<|im_", "start|>", "assistant\n", "\n", '"', "{", "é😀", "\ud800"])
    | st.text(max_size=4),
    max_size=5,
).map("".join)
"""Text from outside: control tokens whole and in pieces, broken Unicode, anything."""


@dataclass(frozen=True)
class Plan:
    """What everybody does in one conversation."""

    prompt: str
    answers: Sequence[Answer]
    """Of the policy; the last is repeated."""
    results: Sequence[Any]
    """Of the tools, one call after the other: what `execute` returns or raises."""
    lines: Sequence[Any]
    """Of the interaction: results, or what it raises."""
    budgets: Budgets
    settings: dict[str, Any]
    behaviours: dict[str, str] = field(default_factory=dict[str, str])
    """How the methods of a tool's life and the interaction's misbehave."""
    opening: str | None = None
    cancel_after: int | None = None
    """Steps of the event loop after which the request is cancelled."""


@dataclass(frozen=True)
class Played:
    """What came of a plan."""

    request: AsyncRolloutRequest
    engine: ScriptedEngine
    tools: Sequence[FakeTool]
    user: FakeUser


class PlannedUser(FakeUser):
    """Says, or raises, what the plan holds."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> Any:
        reply = await super().generate_response(instance_id, messages, **kwargs)
        if isinstance(reply.content, BaseException):
            raise reply.content
        return reply


def _call(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


def mostly(usual: st.SearchStrategy[Any], else_: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw four times of five what is usual."""
    return st.integers(0, 4).flatmap(lambda number: else_ if number == 4 else usual)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_good_calls = st.builds(
    _call, st.sampled_from(["lookup", "other"]), st.fixed_dictionaries({"q": HOSTILE})
)
_bad_calls = st.builds(_call, HOSTILE, st.just({"q": ""})) | st.sampled_from(
    [_call("lookup", {}), _call("other", {"q": 3}), "<tool_call>{oops</tool_call>", "<tool_call>"]
)
_spoken = st.one_of(
    HOSTILE,
    _good_calls,
    _good_calls,
    st.lists(st.one_of(_good_calls, _good_calls, _bad_calls, HOSTILE), max_size=4).map("".join),
).map(_encodable)


@st.composite
def _sampled(draw: st.DrawFn) -> ScriptedAnswer:
    """A turn as any policy may sample it, with or without its end, perhaps of random tokens."""
    size = len(tiny_tokenizer())
    ids = draw(mostly(_spoken.map(encode), st.lists(st.integers(0, size - 1), max_size=12)))
    ids = ids + encode(draw(st.sampled_from(["<|im_end|>", "<|im_end|>", "<|endoftext|>", ""])))
    return ScriptedAnswer(ids, log_probs=[draw(st.sampled_from([-0.5, -2.0, 0.0]))] * len(ids))


_failures = st.sampled_from(
    [EngineError("gone"), RuntimeError("boom"), asyncio.CancelledError(), TimeoutError("late")]
)
_results = st.one_of(
    HOSTILE,
    HOSTILE,
    st.builds(
        lambda text, reward, stop: ToolResult(ToolResponse(text=text), reward, {}, stop),
        HOSTILE,
        st.sampled_from([None, 0.5]),
        st.booleans(),
    ),
    HOSTILE.map(ToolError),
    HOSTILE.map(RuntimeError),
    st.sampled_from([None, 3, SystemExit(1), asyncio.CancelledError()]),
)
_lines = st.builds(
    InteractionResult, st.sampled_from([False] * 4 + [True]), HOSTILE, st.just(0.5), st.none()
)
_broken_lines = HOSTILE.map(lambda text: InteractionResult(False, RuntimeError(text)))  # type: ignore[arg-type]
_budgets = st.builds(
    Budgets,
    max_response_tokens=st.integers(1, 300) | st.integers(300, 1500),
    max_model_len=mostly(st.just(4000), st.integers(1, 1500)),
    max_turn_tokens=st.none() | st.integers(1, 100),
    max_observation_tokens=st.just(24),
    max_assistant_turns=st.none() | st.integers(1, 8),
    max_user_turns=st.none() | st.integers(0, 3),
    max_tool_calls=st.none() | st.integers(0, 9),
)
_settings = st.fixed_dictionaries(
    {
        "on_malformed_call": st.sampled_from(["observe", "stop", "mask"]),
        "on_tool_failure": st.sampled_from(["observe", "observe", "fail"]),
        "max_tool_response_length": st.just(24),
        "tool_response_truncate_side": st.sampled_from(["left", "middle", "right"]),
        "max_parallel_calls": st.integers(1, 3),
        "interaction_interval": st.sampled_from([1, 1, 2]),
        "tokenization_sanity_check_mode": st.sampled_from(["disable", "strict"]),
    }
)
_behaviours = st.dictionaries(
    st.sampled_from(["create", "execute", "calc_reward", "release", "start", "finalize"]),
    st.sampled_from(["raise", "exit", "cancel_self", "hang"]),
    max_size=1,
)


def plans(*, broken: bool = True, cancelled: bool = True) -> st.SearchStrategy[Plan]:
    """Plans of whole conversations.

    Args:
        broken: Whether engines and plug-ins may fail.
        cancelled: Whether the request may be cancelled.
    """
    answers, lines, behaviours = _sampled(), _lines, st.just({})
    if broken:
        answers = mostly(answers, mostly(answers, _failures))
        lines = mostly(lines, _broken_lines)
        behaviours = mostly(behaviours, _behaviours)
    return st.builds(
        Plan,
        prompt=HOSTILE,
        answers=st.lists(answers, min_size=1, max_size=6),
        results=st.lists(_results, max_size=8),
        lines=st.lists(lines, max_size=3),
        budgets=_budgets,
        settings=_settings,
        behaviours=behaviours,
        opening=st.none() | HOSTILE,
        cancel_after=mostly(st.none(), st.integers(0, 200)) if cancelled else st.none(),
    )


def play(
    plan: Plan,
    *,
    watch: Callable[[AsyncRolloutRequest], None] = lambda request: None,
    kind: type[AsyncRolloutRequest] = AsyncRolloutRequest,
) -> Played:
    """Play a plan with a request of a kind; a cancellation that was planned ends here.

    `watch` sees the request whenever the engine or a tool is asked for something.
    """
    request = make_request(
        plan.prompt, kind=kind, interaction_kwargs={"name": "fake"}, budgets=plan.budgets
    )
    results = iter(plan.results)

    def reply(_: dict[str, Any]) -> Any:
        watch(request)
        result = next(results, "")
        if isinstance(result, BaseException):
            raise result
        return result

    def script(_ids: Sequence[int], _sampling: SamplingParams, _id: str, turn: int) -> Answer:
        watch(request)
        return plan.answers[min(turn, len(plan.answers) - 1)]

    tools = [
        FakeTool(reply=reply, opening=plan.opening, **plan.behaviours),
        FakeTool("other", reply=reply),
    ]
    user = PlannedUser(*plan.lines, **plan.behaviours)
    engine = make_scripted(script)
    context = make_context(
        engine,
        tools=tools,
        interactions=[user],
        tool_timeout_s=0.02,
        interaction_timeout_s=0.02,
        **plan.settings,
    )
    asyncio.run(_play(request, context, plan.cancel_after))
    return Played(request, engine, tools, user)


async def _play(request: AsyncRolloutRequest, context: Any, cancel_after: int | None) -> None:
    task = asyncio.create_task(run_request(request, context))
    if cancel_after is not None:
        for _ in range(1 + cancel_after):
            await asyncio.sleep(0)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, BaseException) and cancel_after is None:
        raise outcome
