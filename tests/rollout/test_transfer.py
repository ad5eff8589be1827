"""Requests and completions that travel to another process and back."""

import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.protocol import Completion, FinishReason, VersionSpan
from agentrl.rollout.records import Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.transfer import (
    dump,
    dump_inputs,
    dump_results,
    dump_score,
    load,
    load_results,
)
from tests.fakes.requests import build_request, finished_requests, make_failure, observed, said
from tests.fakes.tools import schema

LOOKUP = schema("lookup", q={"type": "string"})


@given(request=finished_requests())
def test_a_finished_request_arrives_as_it_was_sent(request: AsyncRolloutRequest):
    assert load(dump(request)) == request
    own = AsyncRolloutRequest(
        messages=[], **{name: getattr(request, name) for name in ("request_id", "uid", "seed")}
    )
    for name in ("batch_data_id", "rollout_offset", "attempt", "tools_kwargs", "columns"):
        setattr(own, name, getattr(request, name))
    load_results(own, dump_results(request, b"", {}), {})
    assert own == request


@given(
    ids=st.lists(st.integers(0, 2**40)),
    numbers=st.lists(st.floats(-1e30, 0.0)),
    is_single=st.booleans(),
)
def test_every_number_of_a_completion_is_kept(
    ids: list[int], numbers: list[float], is_single: bool
):
    log_probs = (numbers * (len(ids) + 1))[: len(ids)] or [-0.1] * len(ids)
    if is_single:
        log_probs = [float(f"{number:.3e}") for number in log_probs]
    spans = (VersionSpan(3, 0, len(ids)),) if ids else ()
    completion = Completion(
        token_ids=ids,
        log_probs=log_probs,
        finish_reason=FinishReason.STOP,
        weight_versions=spans,
        cached_tokens=7,
    )
    assert load(dump(completion)) == completion


def test_inputs_return_only_if_they_were_changed():
    request = build_request(said(3))
    request.columns["picture"] = "x" * 10_000
    inputs = dump_inputs(request)
    assert len(dump_results(request, inputs, {})) < 5_000
    request.columns["seen"] = 1
    own = request.model_copy(update={"columns": {}})
    load_results(own, dump_results(request, inputs, {}), {})
    assert own.columns == request.columns


def test_the_tools_of_the_run_are_named_and_others_travel():
    request, own = build_request(said(3)), AsyncRolloutRequest(messages=[])
    request.tool_schemas = [LOOKUP]
    results = dump_results(request, b"", {"lookup": LOOKUP})
    load_results(own, results, {"lookup": LOOKUP})
    assert own.tool_schemas[0] is LOOKUP
    load_results(own, dump_results(request, b"", {}), {})
    assert own.tool_schemas == [LOOKUP]
    assert own.tool_schemas[0] is not LOOKUP


def test_a_score_changes_what_a_score_sets_and_nothing_else():
    sent, own = build_request(said(3)), build_request(said(3))
    own.tool_schemas = [LOOKUP]
    before: dict[str, Any] = own.model_dump()
    sent.reward, sent.reward_extra_info = 0.5, {"seen": "yes"}
    load_results(own, dump_score(sent), {})
    changed = {name for name, value in own.model_dump().items() if value != before[name]}
    assert changed == {"reward", "reward_extra_info"}
    sent.fail_scoring(make_failure())
    load_results(own, dump_score(sent), {})
    assert own.state == "failed"
    assert isinstance(own.error, Failure)


def test_a_request_takes_less_than_with_plain_pickle():
    request = build_request(said(400), observed(200), said(400))
    assert len(dump(request)) < 0.75 * len(pickle.dumps(request))
