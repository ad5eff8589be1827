"""Agents of each dialect on the real SGLang, through the gateway."""

from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from tests.fakes.gateway_agents import AGENTS, check_trained_tokens, random_policy
from tests.fakes.plugins import tiny_tokenizer

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """An engine with the tiny tokenizer, which has a chat template."""
    folder = tmp_path_factory.mktemp("agents") / "policy"
    random_policy().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    needs = SGLangNeeds(model_path=str(folder), max_model_len=1500, max_requests=8, dtype="float32")
    engine = SGLangEngine.start(needs, tiny_tokenizer(), bucket_bytes=20_000)
    yield engine
    engine._host.close()


@pytest.mark.parametrize("agent", AGENTS)
async def test_the_trained_tokens_are_those_that_sglang_sampled(
    agent: Any, engine: SGLangEngine
) -> None:
    await check_trained_tokens(agent, engine, random_policy())
