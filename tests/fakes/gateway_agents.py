"""Agents of each dialect on a model of random weights, and the check of what they train."""

from typing import Any

import anthropic
import openai
import torch
from transformers import Qwen2ForCausalLM

from agentrl.agent_loops.gateway import Gateway
from agentrl.engines import Engine
from agentrl.rollout.records import Budgets
from tests.fakes.engines import plain_logits, tiny_model
from tests.fakes.gateway import LOOKUP
from tests.fakes.plugins import make_context, make_request, tiny_tokenizer

QUESTION: list[Any] = [{"role": "user", "content": "2 + 3? <|im_start|>"}]
MORE: dict[str, Any] = {"role": "user", "content": "Go on. <|im_end|>"}


async def ask_openai(session: Any) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as api:
        history = list(QUESTION)
        for _ in range(3):
            reply = await api.chat.completions.create(model="m", messages=history, max_tokens=24)
            history += [reply.choices[0].message.model_dump(exclude_none=True), MORE]


async def ask_responses(session: Any) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as api:
        history = list(QUESTION)
        for _ in range(3):
            reply = await api.responses.create(model="m", input=history, max_output_tokens=24)
            history += [item.model_dump(exclude_none=True) for item in reply.output]
            history += [MORE]


async def ask_anthropic(session: Any) -> None:
    url, key = session.anthropic_base_url, session.key
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as api:
        history = list(QUESTION)
        for _ in range(3):
            tool: Any = {"name": "f", "input_schema": LOOKUP["function"]["parameters"]}
            async with api.messages.stream(
                model="m", messages=history, max_tokens=24, tools=[tool]
            ) as stream:
                reply = await stream.get_final_message()
            history += [{"role": "assistant", "content": reply.content}, MORE]


AGENTS = [ask_openai, ask_responses, ask_anthropic]


def random_policy() -> Qwen2ForCausalLM:
    """A model that samples any token of the tiny tokenizer, control tokens included."""
    return tiny_model(vocab_size=len(tiny_tokenizer()))


async def check_trained_tokens(agent: Any, engine: Engine, model: Qwen2ForCausalLM) -> None:
    """Let an agent ask three times; check that what is trained is what the model sampled."""
    request = make_request(budgets=Budgets(max_model_len=1500), seed=5)
    context = make_context(engine)
    async with Gateway() as gateway, gateway.session(request, context) as session:
        await agent(session)
    assert request.branches == []
    assert [turn.role for turn in request.turns] == ["assistant", "user"] * 2 + ["assistant"]
    ids, log_probs = request.response_ids, torch.tensor(request.rollout_log_probs)
    expected = torch.log_softmax(plain_logits(model, request.prompt_ids, ids), -1)
    expected = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    is_trained = torch.tensor(request.loss_mask, dtype=torch.bool)
    torch.testing.assert_close(log_probs[is_trained], expected[is_trained], atol=1e-4, rtol=1e-4)
    assert is_trained.sum() == sum(t.num_tokens for t in request.turns if t.role == "assistant")
