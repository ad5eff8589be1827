import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise

import psutil
import pytest

from agentrl.config.schema.reward import CustomRewardConfig, RewardConfig, RewardFunctionConfig
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import ConfigError, Fault, PluginError
from agentrl.plugins.environment import num_cores
from agentrl.rewards import (
    StreamingRewardManager,
    drive_and_score,
    get_reward_manager,
    make_reward_manager,
    register_reward_manager,
)
from agentrl.rewards.loading import is_async, load_scorer, load_scorers
from agentrl.rewards.managers import ScoreAfterRollout
from agentrl.rewards.pool import ScorePool
from agentrl.rollout.records import Failure
from agentrl.rollout.states import RequestState
from agentrl.sandbox.factory import SharedSandbox
from tests.fakes import scorers as fakes_scorers
from tests.fakes.requests import build_request, said
from tests.fakes.sandbox import BusySandbox
from tests.fakes.scorers import MISBEHAVIORS, PROCESS_ENDS, Counter, answers, by_path, score

SCORERS = {
    "naive": "misbehave",
    "dapo": "misbehave",
    "batch": "misbehave_in_lists",
    "prime": "misbehave",
}
OF_ITEMS = ("none", "nan", "exits when read", "exits when its score is read")
"""What is wrong with one item of a batch; the rest is wrong with the whole call."""


def make(scorer, name="naive", **config):
    return get_reward_manager(name)(scorer, RewardConfig(**config))


# A failed request is data, for every manager.


@pytest.mark.parametrize("name", ["naive", "dapo"])
@pytest.mark.parametrize(
    "deed", [d for d in MISBEHAVIORS if d != "returns what no process can tell"]
)
def test_failures_are_data_a_scorer_on_a_thread_that_fails_costs_its_request_alone(name, deed):
    requests = answers("good", deed, "good")
    score(by_path("misbehave", name, timeout_s=0.2), requests)
    assert [request.reward for request in requests] == [1.0, None, 1.0]
    assert requests[1].error.fault is Fault.REWARD


def test_failures_are_data_a_scorer_in_a_process_that_fails_costs_its_request_alone():
    deeds = [*MISBEHAVIORS, *PROCESS_ENDS]
    requests = answers("good", *deeds, "good")
    score(by_path("misbehave", "prime", timeout_s=1.0, num_workers=2), requests)
    assert [request.reward for request in requests] == [1.0, *[None] * len(deeds), 1.0]
    failed = {request.ground_truth: request.error for request in requests[1:-1]}
    assert {error.fault for error in failed.values()} == {Fault.REWARD}
    assert "exit code 3" in failed["dies"].message
    assert "exit code -11" in failed["breaks"].message
    assert "no answer within 1 s" in failed["hangs"].message
    assert "TwoWordsError: no way" in failed["raises what no process can tell"].message
    assert failed["raises"].kind == "KeyError"
    assert "scorers.py" in failed["raises"].traceback


@pytest.mark.parametrize("deed", OF_ITEMS)
def test_failures_are_data_a_bad_item_of_a_batch_costs_its_request_alone(deed):
    requests = answers("good", deed, "good")
    score(by_path("misbehave_in_lists", "batch"), requests)
    assert [request.reward for request in requests] == [1.0, None, 1.0]
    assert requests[1].error.fault is Fault.REWARD


@pytest.mark.parametrize(
    "deed", [d for d in MISBEHAVIORS if d not in OF_ITEMS and "process" not in d]
)
def test_failures_are_data_a_batch_that_fails_costs_its_own_requests_and_no_others(deed):
    async def main():
        manager = by_path("misbehave_in_lists", "batch", timeout_s=0.2)
        first, second = answers("good", deed), answers("good", "good")
        await manager.score(first)
        await manager.score(second)
        await manager.close()
        return first, second

    first, second = asyncio.run(main())
    assert [request.error.fault for request in first] == [Fault.REWARD] * 2
    assert [request.reward for request in second] == [1.0, 1.0]


@pytest.mark.parametrize(
    "returned", [[1.0], [1.0, 1.0, 1.0], 1.0, None, "ab", {"score": 1.0}, {0: 1.0, 1: 1.0}]
)
def test_what_is_no_list_of_one_score_each_fails_its_batch(returned):
    requests = answers("a", "b")
    score(make(lambda **_: returned, "batch"), requests)
    assert [request.reward for request in requests] == [None, None]
    assert "2" in requests[0].error.message


def test_a_batch_scorer_gets_lists_and_may_return_dicts():
    arguments = {}

    def lists(data_sources, solution_strs, ground_truths, extra_infos, bonus):
        arguments.update(sources=data_sources, solutions=solution_strs, infos=len(extra_infos))
        return [{"score": len(truth) + bonus, "truth": truth} for truth in ground_truths]

    requests = answers("a", "bb")
    score(make(lambda **arguments: lists(**arguments, bonus=1), "batch"), requests)
    assert [request.reward for request in requests] == [2.0, 3.0]
    assert requests[1].reward_extra_info == {"truth": "bb"}
    solutions = ["#### 5"] * 2
    assert arguments == {"sources": ["agentrl/arithmetic"] * 2, "solutions": solutions, "infos": 2}


@pytest.mark.parametrize("name", SCORERS)
def test_what_had_failed_before_is_not_scored(name):
    [failed] = answers("good")
    failed.fail_scoring(_failure())
    score(by_path(SCORERS[name], name), [failed])
    assert failed.error.message == "before"
    assert failed.reward is None


def _failure():
    return Failure(fault=Fault.TOOL, kind="X", message="before", turn=0)


# Processes.


def test_processes_are_other_ones_than_this_and_hold_no_torch():
    requests = answers(*"abcdefgh")
    score(by_path("report_process", "prime", num_workers=2), requests)
    info = [request.reward_extra_info for request in requests]
    assert os.getpid() not in {one["pid"] for one in info}
    assert len({one["pid"] for one in info}) <= 2
    assert not any(one["has_torch"] for one in info)


def test_closing_ends_the_workers_even_if_a_scorer_hangs():
    async def main():
        manager = by_path("write_pid_and_hang", "prime", num_workers=2, timeout_s=60.0)
        with tempfile.TemporaryDirectory() as folder:
            scoring = asyncio.create_task(manager.score(answers(folder, folder)))
            while len(os.listdir(folder)) < 2:  # noqa: ASYNC110 - other processes write them
                await asyncio.sleep(0.02)
            workers = [psutil.Process(int(name)) for name in os.listdir(folder)]
        scoring.cancel()
        with suppress(asyncio.CancelledError):
            await scoring
        await manager.close()
        return workers

    _, alive = psutil.wait_procs(asyncio.run(main()), timeout=5)
    assert not alive


def test_a_scorer_that_cannot_be_sent_to_a_process_is_refused_at_once():
    bonus = 1.0

    def closure(**_):
        return bonus

    with pytest.raises(PluginError, match="cannot be sent to the process"):
        make(closure, "prime")


def test_async_scorers_stay_on_the_loop_of_prime():
    requests = answers("good", "nan")
    score(by_path("misbehave_later", "prime"), requests)
    assert [request.reward for request in requests] == [1.0, None]


def test_a_closed_pool_starts_again():
    async def main():
        pool = ScorePool(num_workers=1, timeout_s=20.0, max_waiting=4)
        arguments = {"data_source": "", "solution_str": "", "ground_truth": ""}
        first = await pool.run(fakes_scorers.misbehave, arguments)
        await pool.close()
        await pool.close()
        second = await pool.run(fakes_scorers.misbehave, arguments)
        await pool.close()
        return first, second

    assert asyncio.run(main()) == (1.0, 1.0)


@pytest.mark.slow
def test_no_scorer_outlives_a_trainer_that_was_killed():
    code = (
        "import asyncio\n"
        "from tests.fakes.scorers import answers, by_path\n"
        "async def main():\n"
        "    manager = by_path('misbehave', 'prime', num_workers=2, timeout_s=100.0)\n"
        "    await manager.score(answers('good'))\n"
        "    print('up', flush=True)\n"
        "    await manager.score(answers('hangs'))\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout.readline() == "up\n"
        time.sleep(0.5)
        children = psutil.Process(trainer.pid).children(recursive=True)
        trainer.kill()
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


# Objects.


def test_a_class_is_built_once_called_for_each_and_closed():
    scorer = load_scorer(f"{fakes_scorers.__file__}:Counter", {"start": 10})
    requests = answers("a", "b")
    score(make(scorer, max_concurrent_scores=1), requests)
    assert [request.reward for request in requests] == [11.0, 12.0]
    assert scorer.func.is_closed


def test_a_class_that_does_not_take_its_arguments_is_refused():
    with pytest.raises(PluginError, match="unexpected keyword"):
        load_scorer(f"{fakes_scorers.__file__}:Counter", {"begin": 10})
    with pytest.raises(PluginError, match="__call__"):
        load_scorer("pathlib:PurePath", {})


def test_what_is_awaited_is_known_beforehand():
    class Awaited:
        async def __call__(self):
            pass

    assert is_async(fakes_scorers.misbehave_later)
    assert is_async(load_scorer(f"{fakes_scorers.__file__}:misbehave_later", {}))
    assert is_async(Awaited())
    assert not is_async(fakes_scorers.misbehave)
    assert not is_async(Counter())


# Rate limit and concurrency.


def test_scores_begin_no_faster_than_the_rate_limit():
    begun = []

    async def note(**_):
        begun.append(time.monotonic())
        return 1.0

    score(make(note, rate_limit=20.0), answers(*range(6)))
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert begun[-1] - begun[0] >= 5 / 20.0 * 0.9
    assert min(gaps) > 0.02


def test_waiting_for_the_rate_limit_is_no_time_of_the_scorer():
    requests = answers(*range(4))
    score(make(fakes_scorers.misbehave_later, rate_limit=5.0, timeout_s=0.3), requests)
    assert all(request.reward == 1.0 for request in requests)


def test_no_more_scores_are_at_work_than_allowed():
    at_work, most = 0, 0

    async def count(**_):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.01)
        at_work -= 1
        return 1.0

    score(make(count, max_concurrent_scores=3), answers(*range(12)))
    assert most == 3


# While others still roll out.


class Driver:
    """A fake rollout: its requests end one after another."""

    def __init__(self, *, pause_s: float, error: Exception | None = None) -> None:
        self._pause_s, self._error = pause_s, error

    async def drive(self, requests, *, on_finished):
        for request in requests:
            await asyncio.sleep(self._pause_s)
            on_finished(request)
        if self._error is not None:
            await asyncio.sleep(0.05)
            raise self._error
        return list(requests)


def run_overlapped(driver, manager, requests):
    begun = time.monotonic()
    finished = []

    async def main():
        try:
            return await drive_and_score(driver, manager, requests, on_finished=finished.append)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}
            await manager.close()

    assert asyncio.run(main()) == requests
    assert finished == requests
    return time.monotonic() - begun


async def _slow(**_):
    await asyncio.sleep(0.3)
    return 1.0


def test_a_slow_scorer_costs_no_more_than_its_last_score():
    # With room for two at a time scoring takes 0.6 s, as long as the rollout, and half of it and
    # more is beside the rollout.
    room = {"max_concurrent_scores": 2}
    early = run_overlapped(Driver(pause_s=0.15), make(_slow, **room), answers(*range(4)))
    behind = ScoreAfterRollout(make(_slow, **room))
    late = run_overlapped(Driver(pause_s=0.15), behind, answers(*range(4)))
    assert late >= 0.6 + 0.6
    assert early < 0.6 + 0.3 + 0.25


def test_a_batch_is_a_group_that_has_ended_or_all_at_once():
    calls = []

    async def note(ground_truths, **_):
        calls.append(ground_truths)
        await asyncio.sleep(0.05)
        return [float(truth) for truth in ground_truths]

    def groups():
        requests = answers(*range(9))
        for place, request in enumerate(requests):
            request.uid, request.rollout_offset = f"group {place % 3}", place // 3
        return requests

    requests = groups()
    run_overlapped(Driver(pause_s=0.03), make(note, "batch"), requests)
    assert sorted(calls) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [request.reward for request in requests] == [float(n) for n in range(9)]
    calls.clear()
    run_overlapped(Driver(pause_s=0.0), ScoreAfterRollout(make(note, "batch")), groups())
    assert calls == [[*range(9)]]


def test_a_failed_rollout_cancels_the_scores_and_raises_its_error():
    ended = []

    async def wait(**_):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    for name in ("naive", "batch"):
        manager = make(wait, name)
        with pytest.raises(ZeroDivisionError):
            run_overlapped(Driver(pause_s=0.01, error=ZeroDivisionError()), manager, answers(1, 2))
    assert ended == [True] * 4


@pytest.mark.parametrize("name", ["naive", "batch"])
def test_cancelling_after_the_rollout_cancels_the_scores(name):
    ended = []

    async def wait(**_):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def main():
        manager = make(wait, name)
        work = drive_and_score(Driver(pause_s=0.0), manager, answers(1), on_finished=id)
        task = asyncio.create_task(work)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert ended == [True]


def test_a_manager_that_has_only_score_is_called_after_the_rollout():
    seen = []

    class Plain:
        def __init__(self, compute_score, config):
            pass

        async def score(self, requests):
            seen.append(list(requests))

    register_reward_manager("plain-of-a-test")(Plain)
    requests = answers(1, 2)
    run_overlapped(
        Driver(pause_s=0.0), make_reward_manager(RewardConfig(manager="plain-of-a-test")), requests
    )
    assert seen == [requests]


@pytest.mark.parametrize("name", SCORERS)
def test_every_bundled_manager_scores_early_unless_configured_otherwise(name):
    assert isinstance(by_path(SCORERS[name], name), StreamingRewardManager)
    behind = by_path(SCORERS[name], name, launch_reward_fn_async=False)
    assert not isinstance(behind, StreamingRewardManager)
    score(behind, requests := answers("good"))
    assert requests[0].reward == 1.0


def test_rollout_and_scoring_are_timed():
    entered = []

    class Timer:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            pass

    async def main(manager):
        driver = Driver(pause_s=0.0)
        await drive_and_score(driver, manager, answers(1), on_finished=id, timer=Timer)

    manager = make(fakes_scorers.misbehave_later)
    asyncio.run(main(manager))
    asyncio.run(main(ScoreAfterRollout(manager)))
    assert entered == ["gen", "reward"] * 2


def test_seconds_of_a_score_are_recorded_on_its_request():
    requests = answers(1)
    score(make(_slow), requests)
    assert 0.3 <= requests[0].metrics["seconds_reward"] < 1.0


# Several functions.


def functions(*configs, manager="naive", **config):
    listed = [RewardFunctionConfig(**one) for one in configs]
    return make_reward_manager(RewardConfig(manager=manager, functions=listed, **config))


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_several_functions_are_summed_by_their_weights_and_kept_apart(manager, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def length(data_source, solution_str, ground_truth, extra_info=None, times=1):\n"
        "    return len(solution_str) * times\n"
        "async def note(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1, 'acc': 0.5, 'note': 'well'}\n"
    )
    requests = answers("5", "6")
    manager = functions(
        {"name": "gsm8k", "weight": 2.0},
        {"name": "size", "path": str(file), "function": "length", "weight": 0.5,
         "reward_kwargs": {"times": 2}},
        {"name": "note", "path": str(file), "function": "note", "weight": 0.0},
        manager=manager, num_workers=1,
    )  # fmt: skip
    score(manager, requests)
    assert [request.reward for request in requests] == [2.0 + 6.0, 6.0]
    extra = requests[0].reward_extra_info
    assert (extra["gsm8k"], extra["size"], extra["note"]) == (1.0, 12.0, 1.0)
    # If several functions return a key, the first one's value counts.
    assert (extra["acc"], extra["success"]) == (1.0, 1.0)
    assert requests[1].reward_extra_info["acc"] == 0.0


def test_failures_are_data_a_function_that_fails_is_named_and_costs_its_request_alone():
    requests = answers("good", "nan", "raises")
    manager = functions(
        {"name": "mine", "path": fakes_scorers.__file__, "function": "misbehave"},
        {"name": "qa"},
    )
    score(manager, requests)
    assert [request.reward for request in requests] == [1.0, None, None]
    for request in requests[1:]:
        assert request.state is RequestState.FAILED
        assert "the reward function 'mine'" in request.error.message


def test_a_manager_of_the_users_gets_several_functions_as_one():
    async def main():
        config = RewardConfig(
            functions=[RewardFunctionConfig(name="gsm8k", weight=2.0)], manager="naive"
        )
        return await load_scorers(config)(
            data_source="openai/gsm8k", solution_str="#### 5", ground_truth="5", extra_info={}
        )

    said = asyncio.run(main())
    assert said["score"] == 2.0
    assert said["gsm8k"] == 1.0


def test_a_function_without_a_path_is_a_bundled_one():
    with pytest.raises(PluginError, match="no bundled scorer 'gms8k'"):
        functions({"name": "gms8k"})


def test_a_path_to_a_bundled_scorer_is_that_scorer():
    custom = CustomRewardConfig(path="agentrl.rewards.math_answer")
    requests = answers("5", data_source="mine")
    requests += answers("6", data_source="mine")
    for request in requests:
        request.messages[-1].content = r"\boxed{5}"
    score(make_reward_manager(RewardConfig(custom_reward_function=custom)), requests)
    assert [request.reward for request in requests] == [1.0, 0.0]


def test_a_manager_scores_code_in_one_event_loop_after_another():
    made = []

    def make_crowded(_):
        made.append(BusySandbox("3"))
        return made[-1]

    manager = functions({"name": "code"})
    vars(vars(manager)["_caller"])["_sandbox"] = SharedSandbox(SandboxConfig(), make_crowded)

    async def rewards(*, then_close=False):
        requests = answers(*[{"inputs": ["1 2"], "outputs": ["3"]}] * 4 * num_cores())
        await manager.score(requests)
        if then_close:
            await manager.close()
        return {request.reward for request in requests}

    assert asyncio.run(rewards()) == {1.0}
    assert asyncio.run(rewards(then_close=True)) == {1.0}
    assert asyncio.run(rewards()) == {1.0}
    asyncio.run(manager.close())
    assert [sandbox.is_closed for sandbox in made] == [False, True, False]


# Invalid arguments are reported before anything is scored.


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"name": "gsm8k", "reward_kwargs": {"methd": "strict"}}, "did you mean 'method'"),
        ({"name": "code", "reward_kwargs": {"continous": True}}, "did you mean 'continuous'"),
        ({"name": "qa", "reward_kwargs": {"zzz": 1}}, "unknown key 'zzz'"),
        ({"name": "data_source", "reward_kwargs": {"methd": "strict"}}, "did you mean 'method'"),
        ({"name": "mine", "path": fakes_scorers.__file__, "function": "misbehave",
          "reward_kwargs": {"truth": 1}}, "unknown key 'truth'"),
        ({"name": "judge", "reward_kwargs": {"model": "m", "rubric": "r"}}, "base_url is missing"),
    ],
)  # fmt: skip
def test_arguments_that_no_scorer_takes_are_refused_at_once(one, message):
    with pytest.raises(ConfigError, match=message) as error:
        functions({"name": "math", "weight": 0.0}, one)
    assert error.value.details["key"].startswith("reward.functions[1].reward_kwargs")


def test_arguments_of_a_single_scorer_are_checked_too():
    custom = CustomRewardConfig(path="agentrl.rewards.gsm8k", reward_kwargs={"methd": "strict"})
    with pytest.raises(ConfigError, match="did you mean 'method'") as error:
        make_reward_manager(RewardConfig(custom_reward_function=custom))
    key = "reward.custom_reward_function.reward_kwargs.methd"
    assert error.value.details["key"] == key


def test_arguments_are_taken_that_a_scorer_names_or_takes_whatever_they_are():
    functions(
        {"name": "any", "path": fakes_scorers.__file__, "function": "report_process",
         "reward_kwargs": {"whatever": 1}},
        {"name": "data_source", "reward_kwargs": {"metric": "f1"}},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["naive", "prime"])
def test_a_plain_scorer_may_run_what_it_awaits_in_its_threads_event_loop(name):
    requests = answers("5", "6")
    score(by_path("runs_a_loop", name), requests)
    assert [request.reward for request in requests] == [1.0, 1.0]


def needs_the_main_thread(data_source: str, solution_str: str, ground_truth: str, **_: object):
    from math_verify import parse, verify

    return float(verify(parse(ground_truth), parse(solution_str)))


def test_a_scorer_that_needs_the_main_thread_is_told_of_prime_and_gets_it_there():
    request = build_request(said(2, text="$42$"), ground_truth="$42$")
    score(make_reward_manager(RewardConfig(), needs_the_main_thread), [request])
    assert request.error is not None
    assert "reward.manager: prime" in request.error.message
    request = build_request(said(2, text="$42$"), ground_truth="$42$")
    score(make_reward_manager(RewardConfig(manager="prime"), needs_the_main_thread), [request])
    assert request.reward == 1.0
