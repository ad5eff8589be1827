"""The token check of a run: what it costs, what it is drawn for, and that haste changes nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings

from agentrl.config.schema.run import MultiTurnConfig
from agentrl.messages import Message
from agentrl.rollout.records import TokenDifference
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import should_check
from agentrl.rollout.templates import ChatTemplate, CheckMode, check_request
from agentrl.rollout.templates.text import TextEncoder
from agentrl.trainer.setup.rollout_setup import make_token_check
from tests.fakes import plugins as fakes
from tests.fakes.conversations import Plan, plans, play
from tests.fakes.plugins import (
    FakeTool,
    calling,
    make_context,
    make_engine,
    make_request,
    tiny_template,
)
from tests.fakes.templates import assistant, call, load_template, schema, tool, user


class Kept:
    """Holds a request's ledger and its wording, in place of a check."""

    def __init__(self) -> None:
        self.wording: Sequence[str] = ()

    def check(
        self, template: Any, request: Any, mode: Any, *, wording: Sequence[str]
    ) -> list[TokenDifference]:
        self.wording = wording
        return []


async def roll_out(monkeypatch: pytest.MonkeyPatch, *answers: str) -> tuple[Any, Sequence[str]]:
    from agentrl.rollout.runner import run_request

    kept = Kept()
    monkeypatch.setattr(fakes, "check_request", kept.check)
    context = make_context(make_engine(*answers), tools=[FakeTool()])
    return await run_request(make_request(), context), kept.wording


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(cancelled=False))
def test_sampled_tokens_the_wording_of_a_ledger_tells_what_the_ledger_itself_tells(plan: Plan):
    def compare(
        template: ChatTemplate,
        request: AsyncRolloutRequest,
        _: CheckMode,
        *,
        wording: Sequence[str],
    ) -> list[TokenDifference]:
        whole = check_request(template, request, "ignore_strippable")
        event("differs" if whole else "agrees")
        assert check_request(template, request, "ignore_strippable", wording=wording) == whole
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes, "check_request", compare)
        request = play(plan).request
    assert [d for d in request.differences if d.kind == "check_failed"] == []


async def test_where_the_wording_is_the_rendering_nothing_is_encoded_again(
    monkeypatch: pytest.MonkeyPatch,
):
    request, wording = await roll_out(monkeypatch, calling("lookup", q="a"), "Bern.")
    encoded: list[str] = []
    monkeypatch.setattr(TextEncoder, "encode_text", lambda _, text: encoded.append(text))
    assert check_request(tiny_template(), request, "ignore_strippable", wording=wording) == []
    assert not encoded
    monkeypatch.undo()


async def test_a_message_that_changed_afterwards_is_found(monkeypatch: pytest.MonkeyPatch):
    request, wording = await roll_out(monkeypatch, calling("lookup", q="a"), "Bern.")
    request.messages[2] = request.messages[2].model_copy(update={"content": "forged"})
    found = check_request(tiny_template(), request, "ignore_strippable", wording=wording)
    assert found == check_request(tiny_template(), request, "ignore_strippable") != []


def finished(seed: int) -> AsyncRolloutRequest:
    return AsyncRolloutRequest(messages=[Message(role="user", content="Hi")], seed=seed)


def test_a_share_of_the_requests_is_checked_and_always_the_same_ones():
    check = make_token_check(tiny_template(), MultiTurnConfig())
    drawn: list[list[bool]] = []
    for _ in range(2):
        requests = [finished(seed) for seed in range(2000)]
        for request in requests:
            check(request, list)
        drawn.append([request.is_checked for request in requests])
    assert drawn[0] == drawn[1] == [should_check(finished(seed), 0.25) for seed in range(2000)]
    assert 400 < sum(drawn[0]) < 600


@pytest.mark.parametrize(("share", "mode", "number"), [(1.0, "strict", 50), (0.5, "disable", 0)])
def test_all_are_checked_or_none(share: float, mode: Any, number: int):
    config = MultiTurnConfig(
        tokenization_sanity_check_frac=share, tokenization_sanity_check_mode=mode
    )
    check = make_token_check(tiny_template(), config)
    requests = [finished(seed) for seed in range(50)]
    for request in requests:
        check(request, list)
    assert sum(request.is_checked for request in requests) == number


def test_numbers_in_calls_make_no_new_shapes():
    template, tools = load_template("qwen2_5"), [schema()]
    reading = template.structure.text_options

    def key_of(value: Any) -> Any:
        said = [user("Hi"), assistant("", call(a=value)), tool("ok")]
        return template.read(said, tools, options=reading).key

    assert key_of(3) == key_of(-17) == key_of(2.5) != key_of("3")
    assert len({key_of(3), key_of(True), key_of(None), key_of([3])}) == 4
