import asyncio
import functools
import math
import subprocess
import sys
import threading
import time
from decimal import Decimal

import numpy as np
import pytest

from agentrl.config.schema.reward import CustomRewardConfig, RewardConfig
from agentrl.errors import ConfigError, Fault, PluginError, RewardError
from agentrl.messages import FunctionCall, Message, ToolCall
from agentrl.rewards import (
    default_compute_score,
    find_scorer,
    get_reward_manager,
    make_reward_manager,
    register_reward_manager,
)
from agentrl.rewards.loading import load_scorer
from agentrl.rewards.scoring import make_extra_info, read_score, solution_text
from agentrl.rollout.records import CallRecord
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.requests import build_request, observed, said
from tests.fakes.waiting import until


def answer(text="#### 5", **fields):
    fields = {"data_source": "agentrl/arithmetic", "ground_truth": "5"} | fields
    return build_request(said(2, text=text), **fields)


def score(requests, compute_score=default_compute_score, **config) -> None:
    manager = get_reward_manager("naive")(compute_score, RewardConfig(**config))
    asyncio.run(manager.score(requests))


# What a scorer may return.


@pytest.mark.parametrize(
    "number", [1, 0.5, True, np.float32(0.5), np.int64(3), np.array(2.0), Decimal("0.25")]
)
def test_numbers_of_every_library_are_scores(number):
    value, extra = read_score(number)
    assert value == float(number)
    assert type(value) is float
    assert extra == {"acc": value}


def test_a_dict_gives_its_score_and_keeps_the_rest():
    assert read_score({"score": 1, "hint": "well done"}) == (1.0, {"hint": "well done"})


@pytest.mark.parametrize(
    "returned",
    [None, math.nan, math.inf, -math.inf, 1e31, "1.0", [1.0], {}, {"score": None},
     {"score": math.nan}, {"acc": 1.0}, 1j, np.array([1.0, 2.0]), (1.0, {})],
)  # fmt: skip
def test_anything_else_is_refused(returned):
    with pytest.raises(RewardError):
        read_score(returned)


# What a scorer is told.


def test_only_the_last_message_of_the_policy_is_the_solution():
    request = build_request(
        said(2, text="I guess #### 1"), observed(2, text="#### 5"), said(1, text="so 5")
    )
    assert solution_text(request) == "so 5"


def test_an_answer_that_only_a_tool_gave_earns_nothing():
    request = build_request(
        said(2, text="calling"),
        observed(3, text="#### 5"),
        data_source="openai/gsm8k",
        ground_truth="5",
    )
    score([request])
    assert request.reward == 0.0


def test_an_assistant_message_of_the_prompt_is_no_solution():
    messages = [Message(role="assistant", content="#### 5"), Message(role="user", content="Go on")]
    request = build_request(messages=messages, stop_reason=StopReason.MODEL_LENGTH)
    assert solution_text(request) == ""


def test_extra_info_tells_of_the_rollout():
    request = build_request(
        said(2, call_rewards=(0.25, 0.5)),
        observed(1),
        observed(1),
        said(1, reward=0.75),
        observed(1),
        said(2),
        extra_info={"index": 7},
        tool_rewards={"calculator": 1.0},
        stop_reason=StopReason.MAX_ASSISTANT_TURNS,
    )
    request.turns[3].calls.append(CallRecord(name="calculator", outcome="malformed"))
    info = make_extra_info(request)
    assert info.pop("messages")[0] == {"role": "user", "content": "What is 2 + 3?"}
    assert info == {
        "index": 7,
        "num_turns": 6,
        "num_tool_calls": {"calculator": 2},
        "turn_scores": [0.75],
        "tool_rewards": [0.25, 0.5],
        "rollout_reward_scores": {"calculator": 1.0, "user_turn_rewards": [0.75]},
        "stop_reason": "max_assistant_turns",
    }


def test_a_scorer_that_spoils_its_arguments_spoils_no_other_request():
    shared = {"answers": ["5"]}
    requests = [answer(extra_info=shared, ground_truth=["5"]) for _ in range(3)]

    def spoil(data_source, solution_str, ground_truth, extra_info):
        extra_info["answers"].append("6")
        ground_truth.append("6")
        extra_info["messages"][0]["content"] = ""
        return len(extra_info["answers"]) + len(ground_truth)

    score(requests, spoil)
    assert [request.reward for request in requests] == [4.0] * 3
    assert shared == {"answers": ["5"]}
    assert requests[0].messages[0].content == "What is 2 + 3?"


# How a scorer is called.


def test_plain_scorers_run_off_the_loop_and_async_ones_on_it():
    threads = {}

    def plain(data_source, solution_str, ground_truth, extra_info=None, *, name):
        threads[name] = threading.current_thread()
        return 1.0

    async def awaited(*, name, **arguments):
        await asyncio.sleep(0)
        return plain(**arguments, name=name)

    for function in (plain, awaited):
        score([answer()], functools.partial(function, name=function.__name__))
    assert threads["plain"] is not threading.main_thread()
    assert threads["awaited"] is threading.main_thread()


def test_reward_kwargs_reach_the_scorer(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def judge(data_source, solution_str, ground_truth, extra_info, bonus):\n"
                    "    return {'score': bonus, 'who': data_source}\n")  # fmt: skip
    custom = CustomRewardConfig(path=str(file), name="judge", reward_kwargs={"bonus": 0.5})
    request = answer()
    asyncio.run(make_reward_manager(RewardConfig(custom_reward_function=custom)).score([request]))
    assert request.reward == 0.5
    assert request.reward_extra_info == {"who": "agentrl/arithmetic"}


def test_a_scorer_path_to_no_function_is_refused():
    with pytest.raises(PluginError, match="expected: a function"):
        load_scorer("math:pi", {})
    with pytest.raises(PluginError, match="no_such_module"):
        load_scorer("no_such_module:compute_score", {})


def test_scores_are_concurrent():
    all_begun = asyncio.Barrier(20)

    async def wait(**_):
        await all_begun.wait()
        return 1.0

    requests = [answer() for _ in range(20)]
    score(requests, wait)
    assert [request.reward for request in requests] == [1.0] * 20


# A failed request is data: a scorer's failure is one request's.


class BoomError(Exception):
    pass


async def _cancels_itself():
    raise asyncio.CancelledError


async def _ignores_cancellation():
    while True:
        try:
            await asyncio.sleep(6)
        except asyncio.CancelledError:
            pass
        else:
            return 1.0


def _raise(error):
    raise error


FAILURES = {
    "raises": lambda: _raise(BoomError("no")),
    "exits": lambda: sys.exit(3),
    "stops iterating": lambda: next(iter(())),
    "none": lambda: None,
    "nan": lambda: math.nan,
    "text": lambda: "1.0",
    "hangs": lambda: time.sleep(30),
    "hangs awaiting": lambda: asyncio.sleep(30),
    "ignores cancellation": _ignores_cancellation,
    "cancels itself": _cancels_itself,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failures_are_data_a_scorer_that_fails_costs_its_request_alone(failure):
    def fail_for_one(*, ground_truth, **_):
        return FAILURES[failure]() if ground_truth == "bad" else 1.0

    requests = [answer(ground_truth=truth) for truth in ("good", "bad", "good")]
    score(requests, fail_for_one, timeout_s=2.0 if "hang" in failure else 4.0)
    assert [request.reward for request in requests] == [1.0, None, 1.0]
    bad = requests[1]
    assert bad.state is RequestState.FAILED
    assert bad.error.fault is Fault.REWARD
    assert not bad.in_baseline
    assert not bad.is_trained
    assert requests[0].state is RequestState.COMPLETED


def test_what_a_scorer_raised_is_recorded_with_its_place():
    request = answer()
    score([request], lambda **_: _raise(BoomError("no such judge")))
    assert request.error.kind == "BoomError"
    assert request.error.message.startswith("the reward function 'test_what_a_scorer_raised")
    assert ": no such judge (at test_scoring.py:" in request.error.message
    assert "test_scoring.py" in request.error.traceback


def test_a_late_scorer_says_how_late():
    request = answer()
    score([request], lambda **_: time.sleep(3), timeout_s=0.1)
    assert "0.1 s" in request.error.message


def test_an_infinite_reward_of_a_turn_or_tool_is_a_failure_of_its_request():
    requests = [
        answer(tool_rewards={"calculator": math.nan}),
        build_request(said(1, reward=math.inf), data_source="openai/gsm8k"),
        build_request(said(1, call_rewards=(math.nan,)), data_source="openai/gsm8k"),
    ]
    score(requests)
    assert [request.state for request in requests] == [RequestState.FAILED] * 3
    assert "the reward of the tool 'calculator' is nan" in requests[0].error.message


def test_failed_requests_are_not_scored():
    request = build_request(said(1), stop_reason=StopReason.WALL_CLOCK)
    score([request], lambda **_: pytest.fail("was scored"))
    assert request.reward is None
    assert request.stop_reason is StopReason.WALL_CLOCK


def test_cancelling_the_manager_cancels_its_scores():
    begun, ended = [], []

    async def wait(**_):
        begun.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        manager = get_reward_manager("naive")(wait, RewardConfig())
        task = asyncio.create_task(manager.score([answer(), answer()]))
        await until(lambda: len(begun) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True, True]


def test_a_scorer_that_never_returns_does_not_hold_up_the_end_of_the_process():
    code = (
        "import asyncio, time\n"
        "from tests.fakes.requests import build_request, said\n"
        "from agentrl.config.schema.reward import RewardConfig\n"
        "from agentrl.rewards import get_reward_manager\n"
        "manager = get_reward_manager('naive')(lambda **_: time.sleep(60), "
        "RewardConfig(timeout_s=0.1))\n"
        "asyncio.run(manager.score([build_request(said(1))]))\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# Names.


def test_an_unknown_data_source_names_the_known_ones():
    request = answer(data_source="openai/gms8k")
    score([request])
    assert "openai/gsm8k" in request.error.message
    with pytest.raises(RewardError, match="agentrl/arithmetic"):
        find_scorer("mine")


def test_a_manager_is_registered_once_and_found_by_name():
    class Constant:
        def __init__(self, compute_score, config):
            pass

        async def score(self, requests):
            for request in requests:
                request.reward = 2.0

    register_reward_manager("constant-of-a-test")(Constant)
    request = answer()
    asyncio.run(make_reward_manager(RewardConfig(manager="constant-of-a-test")).score([request]))
    assert request.reward == 2.0
    with pytest.raises(ConfigError, match="already"):
        register_reward_manager("constant-of-a-test")(type("Other", (Constant,), {}))
    with pytest.raises(ConfigError, match="did you mean 'naive'"):
        get_reward_manager("naiv")


# GSM8K.


@pytest.mark.parametrize(
    ("text", "method", "earned"),
    [("2 + 3 = 5\n#### 5", "strict", 1.0), ("#### 1,005", "strict", 0.1),
     ("#### 5.0", "strict", 1.0),
     ("it is 5", "strict", 0.0), ("it is 5", "flexible", 1.0), ("it is 5, not 6", "flexible", 0.1),
     ("", "flexible", 0.0), ("#### 6\n#### $5", "strict", 1.0)],
)  # fmt: skip
def test_gsm8k_answers_are_compared_as_numbers(text, method, earned):
    config = {"method": method, "format_score": 0.1}
    result = default_compute_score("openai/gsm8k", text, "5", {}, **config)
    assert result["score"] == earned
    assert result["acc"] == float(earned == 1.0)


def test_gsm8k_may_require_a_tool():
    extra = {"num_tool_calls": {}}
    without = default_compute_score("openai/gsm8k", "#### 5", 5, extra, require_tool=True)
    said = {"score": 0.0, "success": 0.0, "acc": 1.0, "answered": 1.0, "used_tool": 0.0}
    assert without == said
    extra = {"num_tool_calls": {"calculator": 1}}
    assert (
        default_compute_score("openai/gsm8k", "#### 5", 5, extra, require_tool=True)["score"] == 1
    )


def test_a_malformed_call_is_no_use_of_a_tool():
    request = answer()
    request.turns[0].calls.append(CallRecord(name="calculator", outcome="malformed"))
    request.messages[-1].tool_calls = [ToolCall(function=FunctionCall(name="calculator"))]
    score([request], functools.partial(default_compute_score, require_tool=True))
    assert request.reward == 0.0


SHORT_SCORERS = {
    "solution_str": "len(solution_str)",
    "solution_str, ground_truth": "len(solution_str) + (ground_truth != '5')",
    "ground_truth, *, solution_str": "len(solution_str) + (ground_truth != '5')",
    "data_source, solution_str, ground_truth": "len(solution_str) + (not data_source)",
    "solution_str, ground_truth, bonus=3": "len(solution_str) + bonus - 3",
    "solution_str, **kwargs": "len(solution_str) + len(kwargs) - 3",
}


@pytest.mark.parametrize("mode", ["naive", "prime"])
@pytest.mark.parametrize("parameters", SHORT_SCORERS)
def test_a_scorer_gets_the_arguments_that_it_takes(tmp_path, parameters, mode):
    (path := tmp_path / "mine.py").write_text(
        f"def score({parameters}):\n    return float({SHORT_SCORERS[parameters]})\n"
    )
    kwargs = {"bonus": 3} if "bonus" in parameters else {}
    custom = CustomRewardConfig(path=str(path), name="score", reward_kwargs=kwargs)
    request = answer()
    manager = make_reward_manager(RewardConfig(manager=mode, custom_reward_function=custom))
    asyncio.run(manager.score([request]))
    assert request.error is None, request.error
    assert request.reward == len("#### 5")
