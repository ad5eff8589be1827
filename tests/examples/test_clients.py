"""Clients of `examples/agents`, each with its real package: the sampled tokens are trained.

`.[agents]` brings the packages. Without one the test fails.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2ForCausalLM

from agentrl.engines import TransformersEngine
from agentrl.rollout.states import StopReason
from agentrl.sandbox.factory import unavailable_reason
from tests.fakes.client_agents import (
    FIRST_CALLS,
    check_client_trains_what_was_sampled,
    random_policy_for_clients,
    run_client,
)
from tests.fakes.plugins import (
    calling,
    encode,
    make_context,
    make_engine,
    make_request,
    tiny_tokenizer,
)

pytestmark = pytest.mark.slow

MULTIPLIES = (
    "<think>Six times seven.</think>" + calling("multiply", b=7, a=6),
    calling("multiply", a=2, b=3) + calling("multiply", a=4, b=5),
    "So it is\n#### 42 \n",
)
EDITS = (
    "I fix it. " + calling("bash", command="printf 'x = 42\\n' > solution.py"),
    calling("bash", command="cat solution.py && pwd"),
    calling("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat solution.py"),
)


async def run_agent(name: str, context: Any, source: Any, request: Any, **keys: Any) -> None:
    await run_client(name, context, source, request, **keys)
    assert request.stop_reason is StopReason.ANSWERED, (request.error, request.agent_run)


def sampled_ids(request: Any) -> list[int]:
    pairs = zip(request.response_ids, request.loss_mask, strict=True)
    return [token for token, mask in pairs if mask]


def differences(request: Any) -> dict[str, float]:
    """The recognized differences; `sequences` and `completions` are always counted."""
    found = {k.removeprefix("gateway/"): v for k, v in request.metrics.items() if "gateway/" in k}
    return {name: number for name, number in found.items() if number}


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("anthropic_client", {}),
        ("openai_agents", {}),
        ("langgraph_agent", {"dropped_thinking": 2}),  # in each of the two calls that follow
        ("litellm_agent", {}),
    ],
)
async def test_client_trains_exactly_the_sampled_tokens(name: str, counted: dict[str, int]) -> None:
    context = make_context(make_engine(*MULTIPLIES))
    request = make_request("What is 6 * 7?")
    await run_agent(name, context, context.engine, request)
    assert not request.branches
    assert differences(request) == {"completions": 3, "sequences": 1, **counted}
    assert sampled_ids(request) == encode("".join(f"{text}<|im_end|>" for text in MULTIPLIES))
    results = [message.text for message in request.messages if message.role == "tool"]
    assert results == ["42", "6", "20"]


async def test_mini_swe_agent_edits_a_file_of_its_folder() -> None:
    context = make_context(make_engine(*EDITS), max_prompt_tokens=16_384)
    request = make_request("Write solution.py: x is 42.")
    limits = {"provider": "bubblewrap", "memory_bytes": 4 << 30}
    if unavailable_reason("bubblewrap") is not None:
        limits |= {"provider": "subprocess", "trusted": True}
    await run_agent("mini_swe_agent", context, context.engine, request, sandbox=limits)
    assert not request.branches
    assert differences(request) == {"completions": 3, "sequences": 1}
    assert sampled_ids(request) == encode("".join(f"{text}<|im_end|>" for text in EDITS))
    results = [message.text for message in request.messages if message.role == "tool"]
    assert "x = 42" in results[1]
    assert not (Path.cwd() / "solution.py").exists()


@pytest.fixture(scope="module")
def policy() -> Qwen2ForCausalLM:
    return random_policy_for_clients()


@pytest.mark.parametrize("name", FIRST_CALLS)
async def test_client_trains_what_the_embedded_engine_sampled(
    name: str, policy: Qwen2ForCausalLM
) -> None:
    engine = TransformersEngine.from_model(policy, tokenizer=tiny_tokenizer())
    try:
        await check_client_trains_what_was_sampled(name, engine, policy)
    finally:
        await engine.close()
