"""Agents on the embedded engine: a random model samples any tokens, control tokens included."""

from typing import Any

import pytest

from agentrl.engines import TransformersEngine
from tests.fakes.gateway_agents import AGENTS, check_trained_tokens, random_policy
from tests.fakes.plugins import tiny_tokenizer


@pytest.mark.parametrize("agent", AGENTS)
async def test_the_trained_tokens_are_those_that_the_model_sampled(agent: Any) -> None:
    model = random_policy()
    engine = TransformersEngine.from_model(model, tokenizer=tiny_tokenizer())
    try:
        await check_trained_tokens(agent, engine, model)
    finally:
        await engine.close()
