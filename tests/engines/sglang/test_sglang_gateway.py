"""Agents of each dialect, and the clients of the examples, on the real SGLang."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import Qwen2ForCausalLM

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from tests.fakes.client_agents import (
    FIRST_CALLS,
    MAX_MODEL_LEN,
    check_client_trains_what_was_sampled,
    random_policy_for_clients,
)
from tests.fakes.gateway_agents import AGENTS, check_trained_tokens
from tests.fakes.plugins import tiny_tokenizer

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def policy() -> Qwen2ForCausalLM:
    return random_policy_for_clients()


@pytest.fixture(scope="module")
def engine(
    policy: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    """An engine with the tiny tokenizer, which has a chat template."""
    folder = tmp_path_factory.mktemp("agents") / "policy"
    policy.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    needs = SGLangNeeds(
        model_path=str(folder), max_model_len=MAX_MODEL_LEN, max_requests=8, dtype="float32"
    )
    engine = SGLangEngine.start(needs, tiny_tokenizer(), bucket_bytes=20_000)
    yield engine
    engine._host.close()


@pytest.mark.parametrize("agent", AGENTS)
async def test_the_trained_tokens_are_those_that_sglang_sampled(
    agent: Any, engine: SGLangEngine, policy: Qwen2ForCausalLM
) -> None:
    await check_trained_tokens(agent, engine, policy)


@pytest.mark.parametrize("name", FIRST_CALLS)
async def test_a_client_trains_what_sglang_sampled(
    name: str, engine: SGLangEngine, policy: Qwen2ForCausalLM
) -> None:
    await check_client_trains_what_was_sampled(name, engine, policy)
