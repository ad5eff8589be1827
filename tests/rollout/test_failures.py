"""Failed calls are counted by tool, and too many of them end the run."""

import pytest

from agentrl.errors import Fault, RewardError, RolloutError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.failures import (
    MIN_CALLS,
    CallCount,
    CallJudge,
    FailureSummary,
    count_calls,
    describe_failure,
)
from agentrl.rollout.records import CallRecord, Failure
from agentrl.rollout.request import AsyncRolloutRequest
from tests.fakes.requests import build_request, observed, said

LOST = "RuntimeError: connection lost (at sql_tool.py:22)"


def with_calls(*outcomes: str, **fields: object) -> AsyncRolloutRequest:
    request = build_request(said(2), observed(1), said(1), **fields)
    request.turns[0].calls.extend(
        CallRecord(name="sql", outcome=outcome, message="" if outcome == "ok" else LOST)
        for outcome in outcomes
    )
    return request


def counted(num_calls: int, num_failed: int) -> dict[str, CallCount]:
    calls = ["crashed"] * num_failed + ["ok"] * (num_calls - num_failed)
    return count_calls([with_calls(*calls)])


def test_calls_that_never_ran_and_errors_for_the_model_are_no_failures_of_the_tool():
    outcomes = ("ok", "tool_error", "crashed", "timeout", "unavailable", "malformed", "skipped")
    count = count_calls([with_calls(*outcomes)])["tool 'sql'"]
    assert (count.num_calls, count.num_failed) == (5, 3)


def test_crash_on_arguments_that_the_schema_refuses_is_no_failure_of_the_tool():
    parameters = {
        "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"],
    }  # fmt: skip
    tool = OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": "sql", "parameters": parameters}}
    )
    request = with_calls("crashed", "crashed", "ok", tool_schemas=[tool])
    request.turns[0].calls[1].arguments = {"query": "select 1"}
    count = count_calls([request])["tool 'sql'"]
    assert (count.num_calls, count.num_failed) == (2, 1)


def test_summaries_of_ranks_merge_and_are_described_in_one_line():
    first, second = with_calls("crashed", "ok"), with_calls("crashed", "timeout")
    parts = [FailureSummary.of([first]), FailureSummary.of([second])]
    request = build_request(said(1))
    why = Failure(fault=Fault.REWARD, kind="KeyError", message="'a' (at score.py:3)", turn=1)
    request.fail_scoring(why)
    whole = FailureSummary.merge([*parts, FailureSummary.of([request])])
    assert whole.describe() == (
        f"tool 'sql' failed in 3 of 4 calls: {LOST}; "
        "1 of 3 requests failed: 1 x reward: KeyError: 'a' (at score.py:3)"
    )
    assert FailureSummary.of([with_calls("ok")]).describe() == ""


def test_most_frequent_message_is_shown():
    count = CallCount(9) + counted(3, 2)["tool 'sql'"]
    count.failures["TypeError: once"] += 1
    assert count.describe("it") == f"it failed in 3 of 12 calls: most often {LOST}"


def test_details_of_an_error_are_separated_in_one_line():
    error = RewardError("the scorer returned 'good'", expected="a finite number")
    failed = with_calls()
    failed.fail_scoring(describe_failure(error, Fault.REWARD, turn=1))
    assert "returned 'good'; expected: a finite number" in FailureSummary.of([failed]).describe()


def test_releases_that_fail_are_counted_by_request():
    failing = with_calls(release_failures=["tool 'sql', release: TypeError: no (at a.py:1)"])
    counts = count_calls([failing, with_calls("ok")])
    assert counts["tool 'sql', release"].describe("release") == (
        "release failed in 1 of 2 calls: TypeError: no (at a.py:1)"
    )


def test_share_of_failed_calls_ends_the_run_and_names_tool_and_message():
    judge = CallJudge(0.5)
    judge.judge(counted(32, 16))
    with pytest.raises(RolloutError) as caught:
        judge.judge(counted(32, 17))
    assert str(caught.value).startswith(f"tool 'sql' failed in 17 of 32 calls: {LOST}")
    assert "max_failed_calls_frac" in str(caught.value)
    CallJudge(1.0).judge(counted(32, 32))


def test_few_calls_are_judged_together_with_those_of_later_batches():
    judge = CallJudge(0.5)
    for _ in range(3):
        judge.judge(counted(MIN_CALLS // 4, MIN_CALLS // 4))
    with pytest.raises(RolloutError, match="failed in 16 of 16 calls"):
        judge.judge(counted(MIN_CALLS // 4, MIN_CALLS // 4))


def test_tool_that_breaks_late_is_not_excused_by_its_earlier_calls():
    judge = CallJudge(0.5)
    for _ in range(10):
        judge.judge(counted(MIN_CALLS, 0))
    with pytest.raises(RolloutError):
        judge.judge(counted(MIN_CALLS, MIN_CALLS))
