"""Compaction and an agent loop on the real SGLang: what is trained is what it sampled."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentrl.agent_loops import AgentLoopBase, AgentLoopOutput
from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.engines.protocol import Completion, SamplingParams, VersionSpan
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.media.records import MediaSpan
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason
from tests.fakes.engines import plain_log_probs, tiny_model
from tests.fakes.gateway_agents import random_policy
from tests.fakes.plugins import FakeUser, make_context, make_request, tiny_tokenizer

pytestmark = pytest.mark.sglang
BUDGETS = Budgets(max_model_len=1500, max_turn_tokens=24)
OLD, NEW = 101, 102
"""Versions of the weights."""


class UpdatedEngine:
    """Notes every call, and gives the engine other weights after the first one.

    Args:
        engine: Has the weights of `random_policy` as version `OLD`.
    """

    def __init__(self, engine: SGLangEngine) -> None:
        self.models = {OLD: random_policy(), NEW: other_policy()}
        self.calls: list[tuple[list[int], Completion]] = []
        self._engine = engine

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        completion = await self._engine.generate(
            input_ids, sampling, request_id=request_id, media=media
        )
        if not self.calls:
            await self._engine.update_weights(self.models[NEW].named_parameters(), version=NEW)
        self.calls.append((list(input_ids), completion))
        return completion

    def check(self, request: AsyncRolloutRequest) -> None:
        """Check that the sequences train each sampled token once, and nothing else."""
        turns = [(one, turn) for one in request.sequences for turn in one.turns]
        sampled = [(one, turn) for one, turn in turns if turn.role == "assistant"]
        version = OLD
        for (one, turn), (input_ids, completion) in zip(sampled, self.calls, strict=True):
            span = slice(turn.start, turn.end)
            assert input_ids == one.prompt_ids + one.response_ids[: turn.start]
            assert one.response_ids[span] == completion.token_ids
            assert one.rollout_log_probs[span] == completion.log_probs
            assert one.loss_mask[span] == [1] * turn.num_tokens
            assert turn.weight_versions == (VersionSpan(version, 0, turn.num_tokens),)
            expected = plain_log_probs(self.models[version], input_ids, completion, 1.0)
            torch.testing.assert_close(
                torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=1e-4
            )
            version = NEW
        num_sampled = sum(len(completion.token_ids) for _, completion in self.calls)
        assert sum(sum(one.loss_mask) for one in request.sequences) == num_sampled


def other_policy() -> Qwen2ForCausalLM:
    return tiny_model(seed=1, vocab_size=len(tiny_tokenizer()))


@pytest.fixture
async def source(talking: SGLangEngine) -> AsyncIterator[UpdatedEngine]:
    await talking.update_weights(random_policy().named_parameters(), version=OLD)
    yield UpdatedEngine(talking)
    await talking.update_weights(random_policy().named_parameters(), version=OLD)


async def test_all_sequences_of_a_compacted_trajectory_train_what_sglang_sampled(
    source: UpdatedEngine, talking: SGLangEngine
) -> None:
    compaction = {"trigger_tokens": 80, "max_summary_tokens": 16, "max_compactions": 2}
    user = FakeUser("Go on. <|im_end|>", "More.", "Once more.", "And?")
    context = make_context(talking, interactions=[user], compaction=compaction)
    request = make_request(budgets=BUDGETS, seed=5, interaction_kwargs={"name": "fake"})
    await run_request(request, context, source)
    assert request.error is None
    assert [one.branch_cause for one in request.branches] == ["compaction", "compaction"]
    assert all(one.turns[-1].is_compaction for one in request.branches)
    assert [one.differences for one in request.sequences] == [[], [], []]
    source.check(request)


class CalculatorLoop(AgentLoopBase):
    """Samples, shows the result of a tool, and samples again."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = await self.apply_chat_template(row["raw_prompt"])
        generate = self.server_manager.generate
        first = await generate("a", prompt_ids=prompt, sampling_params=sampling_params)
        shown = await self.apply_chat_template(
            [{"role": "tool", "content": "5 <|im_end|>"}], remove_system_prompt=True
        )
        ids = prompt + first.token_ids + shown
        second = await generate("a", prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=first.token_ids + shown + second.token_ids,
            response_mask=[1] * len(first) + [0] * len(shown) + [1] * len(second),
            response_logprobs=[*(first.log_probs or []), *[0.0] * len(shown)]
            + (second.log_probs or []),
        )


async def test_agent_loop_trains_what_sglang_sampled(
    source: UpdatedEngine, talking: SGLangEngine
) -> None:
    config = RunConfig.model_validate({"data": {}, "model": {"path": "policy"}})
    runner = AgentLoopRunner(LoopEntry("calculator", CalculatorLoop), config, tiny_tokenizer())
    request = make_request(budgets=BUDGETS, seed=5)
    await runner(request, make_context(talking), source)
    assert request.stop_reason is StopReason.ANSWERED, request.error
    assert [turn.role for turn in request.turns] == ["assistant", "user", "assistant"]
    source.check(request)
