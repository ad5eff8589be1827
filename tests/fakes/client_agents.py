"""The clients of `examples/agents` as programs, and the check of what they train."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentrl.agent_loops.external import ExternalAgent
from agentrl.agent_loops.gateway import Gateway
from agentrl.config.schema.agent import AgentConfig
from agentrl.engines import Completion, Engine, SamplingParams
from agentrl.engines.protocol import CompletionSource
from agentrl.media.records import MediaSpan
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.engines import plain_logits, tiny_model
from tests.fakes.plugins import calling, make_context, make_engine, make_request, tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/agents"

MULTIPLIES = calling("multiply", b=7, a=6)
FIRST_CALLS = {
    "openai_client": calling("calculator", expression="6 * 7"),
    "anthropic_client": MULTIPLIES,
    "openai_agents": MULTIPLIES,
    "langgraph_agent": MULTIPLIES,
    "litellm_agent": MULTIPLIES,
    "mini_swe_agent": calling("bash", command="echo $((6 * 7))"),
}
"""What the model asks of each client's tool. Each tool answers 42."""

CLIENT_MODEL_LEN = 12_288  # mini-swe-agent's own prompt has 8,000 of these small tokens


def agents_python() -> str:
    """The Python that has the clients' packages; SGLang's environment has other versions."""
    python = os.environ.get("AGENTRL_AGENTS_PYTHON")
    if python is None and importlib.util.find_spec("minisweagent") is None:
        pytest.skip("AGENTRL_AGENTS_PYTHON does not name a Python with agentrl[agents]")
    return python or sys.executable


async def run_client(
    name: str,
    context: Any,
    source: CompletionSource,
    request: AsyncRolloutRequest,
    **keys: Any,
) -> None:
    """Let a client solve the request's row as a program."""
    config = AgentConfig(
        command=[agents_python(), str(EXAMPLES / name / "agent.py"), "{row}"],
        timeout_s=240,
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # it loads prices from the network otherwise
        **keys,
    )
    agent = ExternalAgent(config, Gateway())
    try:
        await agent(request, context, source)
    finally:
        await agent.close()


def random_policy_for_clients() -> Qwen2ForCausalLM:
    """A model of random weights with room for a client's prompts."""
    return tiny_model(vocab_size=len(tiny_tokenizer()), max_position_embeddings=CLIENT_MODEL_LEN)


class _CallsFirst:
    """An engine whose first completion is given, so that the client calls its tool; a spy."""

    def __init__(self, engine: Engine, text: str) -> None:
        self._engine = engine
        self._given = make_engine(text)
        self.calls: list[tuple[list[int], Completion]] = []

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        engine = self._engine if self.calls else self._given
        completion = await engine.generate(input_ids, sampling, request_id=request_id, media=media)
        self.calls.append((list(input_ids), completion))
        return completion


async def check_client_trains_what_was_sampled(
    name: str, engine: Engine, model: Qwen2ForCausalLM
) -> None:
    """Let a client call its tool and go on; check that what is trained is what was sampled.

    A random policy never writes a tool call, so the first completion is given. The engine samples
    all that follow, behind the tool's result and behind what the client makes of its own words.
    """
    source = _CallsFirst(engine, FIRST_CALLS[name])
    budgets = Budgets(max_model_len=CLIENT_MODEL_LEN, max_turn_tokens=80)
    request = make_request("What is 6 * 7?", budgets=budgets, seed=5)
    limits = {"provider": "subprocess", "trusted": True, "memory_bytes": 4 << 30}
    context = make_context(engine, max_prompt_tokens=CLIENT_MODEL_LEN, max_assistant_turns=4)
    await run_client(name, context, source, request, sandbox=limits)
    expected_end = (StopReason.ANSWERED, StopReason.MAX_ASSISTANT_TURNS)
    assert request.stop_reason in expected_end, (request.error, request.agent_run)
    assert len(source.calls) >= 2
    if name != "mini_swe_agent":  # it leaves replies without a command out of its history
        assert not request.branches
    num_trained = sum(sum(part.loss_mask) for part in request.sequences)
    assert num_trained == sum(len(completion.token_ids) for _, completion in source.calls)
    for number, (input_ids, completion) in enumerate(source.calls):
        (part,) = [p for p in request.sequences if _trains(p, input_ids, completion.token_ids)]
        if number:  # the first was given
            start = len(input_ids) - len(part.prompt_ids)
            ids = completion.token_ids
            logits = plain_logits(model, input_ids, ids)
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            log_probs = torch.tensor(part.rollout_log_probs[start : start + len(ids)])
            torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=1e-4)


def _trains(part: AsyncRolloutRequest, input_ids: list[int], sampled: list[int]) -> bool:
    """Whether a sequence has these sampled tokens behind these inputs, and trains them."""
    tokens = [*part.prompt_ids, *part.response_ids]
    start, end = len(input_ids), len(input_ids) + len(sampled)
    mask = part.loss_mask[start - len(part.prompt_ids) : end - len(part.prompt_ids)]
    return start >= len(part.prompt_ids) and tokens[:end] == input_ids + sampled and all(mask)
