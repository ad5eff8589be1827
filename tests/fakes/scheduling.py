# pyright: reportIncompatibleMethodOverride=false
"""A rollout by a small model of random weights, whose turns call tools and are heard by a user.

What a turn calls is a function of its text, so that tools are called though the model knows none.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.collate import collate
from agentrl.config.schema.run import FailureConfig
from agentrl.engines import TransformersEngine, TransformersEngineSettings
from agentrl.interactions import BaseInteraction
from agentrl.protocol import DataProto
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers.base import ParsedCall, ParsedTurn, Piece, ToolParser
from agentrl.tools import BaseTool
from tests.fakes.plugins import (
    FakeTool,
    FakeUser,
    make_context,
    make_manager,
    make_prompts,
    tiny_tokenizer,
)

MULTI_TURN = {
    "max_assistant_turns": 5,
    "max_tokens_per_turn": 8,
    "max_tool_response_length": 16,
    "tokenization_sanity_check_mode": "disable",
}
DEFAULT_SETTINGS = TransformersEngineSettings(max_model_len=512)

Latency = Callable[[], float]
"""Seconds of one call."""


class ByLength(ToolParser):
    """Reads two calls in a turn of a length that 3 divides, one where 1 is left, else none."""

    opener = "(?!)"

    def read(self, text: str, start: int, body: int, tools: Any) -> Piece:
        raise AssertionError("nothing opens a call")

    def parse(self, text: str, *, starts_in_thought: bool = False, tools: Any = ()) -> ParsedTurn:
        number = (2, 1, 0)[len(text) % 3]
        calls = [ParsedCall("lookup", {"q": text[:6]}, index) for index in range(number)]
        return ParsedTurn(text, calls)


@lru_cache(maxsize=1)
def random_model() -> Qwen2ForCausalLM:
    """Random weights over the tiny tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def no_time() -> float:
    """Answer at once."""
    return 0.0


def random_time(seed: int, *, longest_s: float = 0.01) -> Latency:
    """Answer after a while that is another one for each call."""
    generator = random.Random(seed)
    return lambda: generator.random() * longest_s


class SlowTool(FakeTool):
    """Takes its time in each method."""

    hasty: str | None = None
    """The request that does not wait."""

    def __init__(self, latency: Latency, **fields: Any) -> None:
        super().__init__(**fields)
        self.latency = latency

    async def _enter(self, method: str, instance_id: str, kwargs: dict[str, Any]) -> None:
        if instance_id != self.hasty:
            await asyncio.sleep(self.latency())
        await super()._enter(method, instance_id, kwargs)


class SlowUser(FakeUser):
    """Takes its time in each method."""

    hasty: str | None = None
    """The request that does not wait."""

    def __init__(self, latency: Latency, *lines: str, **behaviours: str) -> None:
        super().__init__(*lines, **behaviours)
        self.latency = latency

    async def _enter(self, method: str, instance_id: str) -> None:
        if instance_id != self.hasty:
            await asyncio.sleep(self.latency())
        await super()._enter(method, instance_id)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A rollout to be run again and again."""

    latency: Latency = no_time
    num_prompts: int = 4
    num_samples: int = 4
    rollout: dict[str, Any] = field(default_factory=dict)
    """Keys of the section `rollout`, beside those of every scenario."""
    multi_turn: dict[str, Any] = field(default_factory=dict)
    """Keys of the section `rollout.multi_turn`, beside those of every scenario."""
    settings: TransformersEngineSettings = DEFAULT_SETTINGS
    tool: BaseTool | None = None
    user: BaseInteraction | None = None

    def make_engine(
        self, kind: type[TransformersEngine] = TransformersEngine
    ) -> TransformersEngine:
        return kind.from_model(random_model(), settings=self.settings)

    def make_manager(self, engine: Any) -> RolloutManager:
        context = make_context(
            engine,
            tools=[self.tool or SlowTool(self.latency)],
            interactions=[self.user or SlowUser(self.latency, "Sure?", "Really?")],
            **MULTI_TURN | self.multi_turn,
        )
        parser = ByLength()
        context = replace(context, parser=parser, caller=ToolCaller(parser, context.fitter.fit))
        given = {"deterministic": True, "failure": FailureConfig(max_failed_frac=1.0)}
        return make_manager(context, response=240, **given | {"n": self.num_samples} | self.rollout)

    async def run(self, engine: Any, *, step: int = 0) -> list[AsyncRolloutRequest]:
        manager = self.make_manager(engine)
        # Prompts of other lengths, with a beginning that all share.
        prompts = [
            make_prompts(1, "A question. " * 6 + "Hi" * (1 + 3 * place),
                         interaction_kwargs={"name": "fake"})[0]
            for place in range(self.num_prompts)
        ]  # fmt: skip
        return await manager.rollout(
            manager.make_requests(prompts, manager.train_plan(), step=step)
        )

    def run_fresh(
        self, kind: type[TransformersEngine] = TransformersEngine
    ) -> list[AsyncRolloutRequest]:
        """Run once on an engine of its own."""
        engine = self.make_engine(kind)

        async def main() -> list[AsyncRolloutRequest]:
            try:
                return await self.run(engine)
            finally:
                await engine.close()

        return asyncio.run(main())


def collated(requests: Sequence[AsyncRolloutRequest]) -> DataProto:
    """The batch of a rollout."""
    return collate(requests, pad_token_id=0)


def differences(one: DataProto, other: DataProto) -> list[str]:
    """Name the columns in which two batches differ by a bit."""
    assert one.batch is not None
    assert other.batch is not None
    tensors = {*one.batch.keys(), *other.batch.keys()}
    columns = {*one.non_tensor_batch, *other.non_tensor_batch}
    differ = [key for key in tensors if not torch.equal(one.batch[key], other.batch[key])]
    differ += [
        key
        for key in columns
        if list(one.non_tensor_batch[key]) != list(other.non_tensor_batch[key])
    ]
    return sorted(differ)


def tokens(request: AsyncRolloutRequest) -> tuple[list[int], ...]:
    """What a request consists of: input, output, what is trained."""
    return request.prompt_ids, request.response_ids, request.loss_mask
