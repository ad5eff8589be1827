"""Random loops: what is trained is exactly what was sampled, or the request fails."""

import asyncio
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.agent_loops import AgentLoopBase, AgentLoopOutput
from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.engines.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.errors import Fault
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import make_context, make_prompts, make_request, tiny_tokenizer

CONFIG = RunConfig.model_validate({"data": {}, "model": {"path": "policy"}})

TOKENS = st.lists(st.integers(40, 90), min_size=1, max_size=5)
STEP = st.one_of(
    st.tuples(st.just("sample"), TOKENS),
    st.tuples(st.just("observe"), TOKENS),
    st.tuples(st.just("cut"), st.integers(1, 3)),  # drop the end of what was sampled last
    st.tuples(st.just("waste"), TOKENS),  # sample, and do not use it
)


class ScriptLoop(AgentLoopBase):
    """Follows `steps`, then lets `spoil` change one token or one mask bit."""

    steps: list[tuple[str, Any]]
    spoil: tuple[str, int] | None
    sampled: list[tuple[int, int]]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids, mask = await self.apply_chat_template(kwargs["raw_prompt"]), []
        prompt, last = list(ids), 0
        for kind, value in self.steps:
            if kind == "observe":
                ids, mask, last = ids + value, mask + [0] * len(value), 0
            elif kind == "cut":
                number = min(value, last - 1)
                if number > 0:
                    del ids[-number:], mask[-number:]
                    last -= number
            else:
                output = await self.server_manager.generate(
                    "a", prompt_ids=ids, sampling_params=sampling_params
                )
                if kind == "sample":
                    ids = ids + output.token_ids
                    mask, last = mask + [1] * len(output.token_ids), len(output.token_ids)
        response = ids[len(prompt) :]
        if self.spoil and response:
            what, where = self.spoil[0], self.spoil[1] % len(response)
            if what == "token":
                response[where] = 91  # never sampled or observed
            elif mask[where] == 0:
                mask[where] = 1
        return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask)


RUNNER = AgentLoopRunner(LoopEntry("script", ScriptLoop), CONFIG, tiny_tokenizer())
"""One for all examples: it makes the loop's configuration once."""


def drive(steps: list[tuple[str, Any]], spoil: tuple[str, int] | None) -> Any:
    answers = iter([value for kind, value in steps if kind in ("sample", "waste")])
    given_out: list[tuple[int, float]] = []

    def script(ids: Any, sampling: Any, request_id: str, turn: int) -> ScriptedAnswer:
        tokens = next(answers)
        log_probs = [-0.001 * (len(given_out) + n) for n in range(len(tokens))]
        given_out.extend(zip(tokens, log_probs, strict=True))
        return ScriptedAnswer(tokens, log_probs=log_probs)

    ScriptLoop.steps, ScriptLoop.spoil = steps, spoil
    context = make_context(ScriptedEngine(script, tokenizer=tiny_tokenizer()))
    request = asyncio.run(RUNNER(make_request(), context, context.engine))
    return request, given_out


def trained(request: AsyncRolloutRequest) -> list[tuple[int, float]]:
    rows = zip(request.response_ids, request.rollout_log_probs, request.loss_mask, strict=True)
    return [(token, log_prob) for token, log_prob, bit in rows if bit]


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=8))
def test_trained_tokens_are_sampled_ones_in_order_and_the_rest_is_counted(
    steps: list[tuple[str, Any]],
):
    request, given_out = drive(steps, None)
    if request.error is not None:
        assert not any(kind == "sample" for kind, _ in steps)
        assert request.error.fault is Fault.AGENT
        return
    found = trained(request)
    # Each log-probability occurs once, so it names the sampled token.
    assert Counter(found) <= Counter(given_out)
    assert sorted(found, key=lambda pair: -pair[1]) == found
    # What a loop observes may happen to be what it sampled and did not use: masked.
    reported = ("agent_loop/dropped_tokens", "agent_loop/masked_tokens")
    assert len(found) + sum(request.metrics[name] for name in reported) == len(given_out)
    assert all(turn.weight_versions for turn in request.turns if turn.role == "assistant")


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=8),
    spoil=st.tuples(st.sampled_from(["token", "mask"]), st.integers(0, 30)),
)
def test_no_spoiled_token_is_trained(steps: list[tuple[str, Any]], spoil: tuple[str, int]):
    request, given_out = drive(steps, spoil)
    if request.error is None:
        assert Counter(trained(request)) <= Counter(given_out)
    else:
        assert request.error.fault is Fault.AGENT
        assert not request.is_trained


class ParallelLoop(AgentLoopBase):
    """Calls the policy three times at once, and continues with the second answer."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        call = self.server_manager.generate
        answers = await asyncio.gather(
            *(call(str(n), prompt_ids=ids, sampling_params=sampling_params) for n in range(3))
        )
        chosen = answers[1].token_ids
        return AgentLoopOutput(prompt_ids=ids, response_ids=chosen, response_mask=[1] * len(chosen))


async def test_parallel_calls_work_in_lock_step_and_have_seeds_of_their_own():
    seeds: list[int | None] = []

    def script(ids: Any, sampling: Any, request_id: str, turn: int) -> str:
        seeds.append(sampling.seed)
        return "Hi"

    rollout = CONFIG.rollout.model_copy(update={"deterministic": True, "n": 4})
    config = CONFIG.model_copy(update={"rollout": rollout})
    runner = AgentLoopRunner(LoopEntry("parallel", ParallelLoop), config, tiny_tokenizer())
    context = make_context(ScriptedEngine(script, tokenizer=tiny_tokenizer()))
    manager = RolloutManager(context, rollout, CONFIG.data, runner)
    requests = manager.make_requests(make_prompts(2), manager.train_plan())
    done = await asyncio.wait_for(manager.rollout(requests), 20)
    assert {request.stop_reason for request in done} == {StopReason.ANSWERED}
    assert len(seeds) == len(set(seeds)) == 2 * 4 * 3
    assert all(request.metrics["agent_loop/unused_calls"] == 2 for request in done)
