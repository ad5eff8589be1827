"""Agents of each dialect, and the clients of the examples, on the real SGLang."""

from typing import Any

import pytest
from transformers import Qwen2ForCausalLM

from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from tests.fakes.client_agents import (
    FIRST_CALLS,
    check_client_trains_what_was_sampled,
    random_policy_for_clients,
)
from tests.fakes.gateway_agents import AGENTS, check_trained_tokens

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def policy() -> Qwen2ForCausalLM:
    return random_policy_for_clients()


@pytest.mark.parametrize("agent", AGENTS)
async def test_the_trained_tokens_are_those_that_sglang_sampled(
    agent: Any, talking: SGLangEngine, policy: Qwen2ForCausalLM
) -> None:
    await check_trained_tokens(agent, talking, policy)


@pytest.mark.parametrize("name", FIRST_CALLS)
async def test_a_client_trains_what_sglang_sampled(
    name: str, talking: SGLangEngine, policy: Qwen2ForCausalLM
) -> None:
    await check_client_trains_what_was_sampled(name, talking, policy)
