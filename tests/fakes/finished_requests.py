"""Finished requests, made by hand or generated, for tests that show or save them."""

from collections.abc import Sequence

from hypothesis import strategies as st

from agentrl.engines.protocol import FinishReason, VersionSpan
from agentrl.errors import Fault
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.records import CallRecord, Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, RequestState, StopReason

CALCULATOR = OpenAIFunctionToolSchema.model_validate({"function": {"name": "calculator"}})


def decode_bytes(ids: Sequence[int]) -> str:
    """Decode tokens that are bytes, as a byte-level tokenizer does."""
    return bytes(ids).decode("utf-8", errors="replace")


def start_request(prompt: str = "2 + 3?", **fields: object) -> AsyncRolloutRequest:
    request = AsyncRolloutRequest.model_validate(
        {"messages": [Message(role="user", content=prompt)], "tool_schemas": [CALCULATOR], **fields}
    )
    request.begin(list(prompt.encode()) or [0])
    request.take_edge(RequestState.RUNNING)
    return request


def append_answer(
    request: AsyncRolloutRequest, text: str, *, calls: Sequence[CallRecord] = (), version: int = 0
) -> None:
    """Append `text` as sampled tokens: one per byte, each with log-probability -0.5."""
    ids = list(text.encode())
    turn = request.append_sampled(
        ids,
        [-0.5] * len(ids),
        finish_reason=FinishReason.STOP,
        weight_versions=(VersionSpan(version, 0, len(ids)),) if ids else (),
        seconds=0.25,
    )
    turn.calls.extend(calls)


def make_tool_request(
    reason: StopReason = StopReason.ANSWERED, **fields: object
) -> AsyncRolloutRequest:
    """Make a request with a calculator call (4 tokens), its result (3) and an answer (5)."""
    request = start_request(**fields)
    append_answer(request, "call", calls=[CallRecord(name="calculator", seconds=0.5, num_tokens=3)])
    request.append_observed(list(b"=5\n"), role="tool", seconds=0.5)
    append_answer(request, "is 5.")
    finish_request(request, reason)
    return request


def finish_request(
    request: AsyncRolloutRequest, reason: StopReason, fault: Fault = Fault.TOOL
) -> None:
    broke = ENDS[reason].state is RequestState.FAILED
    error = Failure(
        fault=ENDS[reason].fault or fault, kind="OSError", message="gone", turn=len(request.turns)
    )
    request.finish(reason, error if broke else None)


TEXTS = st.text(max_size=12)
"""Any text: other scripts, control characters, markup."""

CALLS = st.builds(
    CallRecord,
    name=TEXTS,
    arguments=st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=2),
    outcome=st.sampled_from(["ok", "tool_error", "malformed", "timeout", "crashed", "skipped"]),
    message=TEXTS,
    seconds=st.floats(0, 10),
    num_cut_tokens=st.integers(0, 3),
)


@st.composite
def finished_requests(draw: st.DrawFn) -> AsyncRolloutRequest:
    """Draw a conversation of up to five turns with any roles, any end and excluded turns."""
    request = start_request(draw(TEXTS), reward=draw(st.none() | st.floats(-5, 5)))
    for role in draw(st.lists(st.sampled_from(["assistant", "tool", "user"]), max_size=5)):
        if role == "assistant":
            append_answer(request, draw(TEXTS), calls=draw(st.lists(CALLS, max_size=2)))
        else:
            request.append_observed(list(draw(TEXTS).encode()), role=role)
    for turn in request.turns:
        if turn.role == "assistant" and draw(st.integers(0, 3)) == 0:
            request.exclude_turn(turn.index, draw(TEXTS) or "malformed")
    finish_request(request, draw(st.sampled_from(list(ENDS))), draw(st.sampled_from(list(Fault))))
    return request
