"""Whole conversations at random: a moody engine, moody tools, a moody user, a watched request.

Everything is drawn from one seed, so its seed reproduces a conversation.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import PrivateAttr

from agentrl.engines.protocol import Completion, FinishReason, SamplingParams, VersionSpan
from agentrl.engines.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.errors import EngineError, ToolError
from agentrl.interactions import InteractionResult
from agentrl.media.positions import Run
from agentrl.media.records import MediaSpan
from agentrl.messages import ToolResponse
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.records import Budgets, Failure, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import RequestState, StopReason
from agentrl.tools import ToolResult
from tests.fakes.plugins import (
    CONTROL,
    FakeTool,
    FakeUser,
    encode,
    make_context,
    make_request,
    tiny_tokenizer,
)
from tests.fakes.request_model import EDGES, UNKNOWN, RequestModel, assert_same, snapshot

WORDS = (*CONTROL, "<|im_", "end|>", "assistant\n", "\n", '"', "{", "é😀", "found ", "42", "", " ")


class WatchedRequest(AsyncRolloutRequest):
    """Held against a plain model behind every step that the runner takes with it."""

    _model: RequestModel = PrivateAttr()
    _num_steps: int = PrivateAttr(default=0)

    def watch(self) -> "WatchedRequest":
        budgets = self.budgets
        self._model = RequestModel(budgets.max_response_tokens, budgets.max_model_len)
        return self

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def model(self) -> RequestModel:
        """The model, with the rewards that the runner wrote into the turns."""
        for turn, expected in zip(self.turns, self._model.turns, strict=True):
            expected.reward = turn.reward
        self._model.reward = self.reward
        return self._model

    def begin(self, prompt_ids: Sequence[int], runs: Sequence[Run] = ()) -> None:
        super().begin(prompt_ids, runs)
        self._model.prompt = list(prompt_ids)
        self._stepped()

    def append_sampled(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        weight_versions: tuple[VersionSpan, ...] = (),
        **fields: Any,
    ) -> Turn:
        before = snapshot(self)
        try:
            turn = super().append_sampled(ids, log_probs, weight_versions=weight_versions, **fields)
        except Exception:
            assert snapshot(self) == before
            raise
        versions = [s.version for s in weight_versions for _ in range(s.start, s.end)]
        versions = versions or [UNKNOWN] * len(ids)
        self._model.append("assistant", list(ids), list(log_probs), versions)
        self._stepped()
        return turn

    def append_observed(self, ids: Sequence[int], *, role: Any, **fields: Any) -> Turn:
        turn = super().append_observed(ids, role=role, **fields)
        self._model.append(role, list(ids), [0.0] * len(ids), [UNKNOWN] * len(ids))
        self._stepped()
        return turn

    def exclude_turn(self, index: int, reason: str) -> None:
        super().exclude_turn(index, reason)
        self._model.turns[index].excluded = reason
        self._stepped()

    def take_edge(self, target: RequestState) -> None:
        assert str(target) in EDGES[self._model.state]
        super().take_edge(target)
        self._model.state = str(target)
        self._stepped()

    def finish(self, reason: StopReason, error: Failure | None = None) -> None:
        assert self._model.can_end(str(reason), has_error=error is not None)
        super().finish(reason, error)
        self._model.end(str(reason))
        self._stepped()

    def fail_scoring(self, error: Failure, reason: StopReason = StopReason.FAILED) -> None:
        assert self._model.can_fail_scoring(str(reason), has_error=True)
        super().fail_scoring(error, reason)
        self._model.end(str(reason))
        self._stepped()

    def _stepped(self) -> None:
        self._num_steps += 1
        assert_same(self, self.model)


class RandomEngine(ScriptedEngine):
    """Answers, fails, aborts, stops early, returns nonsense; its weights change at any time."""

    def __init__(self, draws: random.Random, request: WatchedRequest) -> None:
        super().__init__(self._say, tokenizer=tiny_tokenizer())
        self._draws = draws
        self._request = request
        self.returned: list[Completion] = []
        """What it returned, whether the ledger took it or not."""
        self.broke = False

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        self._assert_sent_whole(list(input_ids), sampling)
        self.version += self._draws.random() < 0.3
        await asyncio.sleep(0)
        completion = await super().generate(input_ids, sampling, request_id=request_id, media=media)
        mood = self._draws.random()
        if mood < 0.01:
            raise self._draws.choice([EngineError("gone"), RuntimeError("boom"), TimeoutError()])
        completion = self._broken(completion) if mood < 0.03 else self._sound(completion)
        self.returned.append(completion)
        return completion

    def _assert_sent_whole(self, input_ids: list[int], sampling: SamplingParams) -> None:
        """The engine is sent all tokens of the request, unchanged."""
        request = self._request
        assert input_ids == request.prompt_ids + request.response_ids
        if self.records:
            last = self.records[-1].input_ids + self.returned[-1].token_ids
            assert input_ids[: len(last)] == last
        left = request.num_tokens_left
        assert 0 < sampling.max_new_tokens == min(left, request.budgets.max_turn_tokens or left)

    def _sound(self, completion: Completion) -> Completion:
        ids, draws = completion.token_ids, self._draws
        if draws.random() < 0.06:
            kept = draws.randrange(len(ids) + 1)
            reason = draws.choice([FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP])
            ids = ids[:kept]
            completion = replace(
                completion, token_ids=ids, log_probs=completion.log_probs[:kept],
                finish_reason=reason,
            )  # fmt: skip
        cut = draws.randrange(len(ids) + 1)
        spans = (VersionSpan(self.version, 0, cut), VersionSpan(self.version + 1, cut, len(ids)))
        return replace(completion, weight_versions=spans if ids else ())

    def _broken(self, completion: Completion) -> Completion:
        self.broke = True
        ids, log_probs = completion.token_ids, completion.log_probs
        spans = (VersionSpan(0, 0, len(ids)),)
        return self._draws.choice(
            [
                replace(completion, log_probs=[*log_probs, -1.0]),
                replace(completion, log_probs=[*log_probs[1:], float("nan")]),
                replace(completion, log_probs=[*log_probs[1:], 0.5]),
                replace(completion, token_ids=[*ids[1:], -3], weight_versions=spans),
                replace(completion, weight_versions=(VersionSpan(0, 0, len(ids) + 2),)),
                replace(completion, token_ids=ids + [1] * 5000, log_probs=[-1.0] * 5000),
            ]
        )

    def _say(self, _ids: Any, _sampling: Any, _id: str, _turn: int) -> ScriptedAnswer:
        draws = self._draws
        if draws.random() < 0.15:
            ids = [draws.randrange(len(tiny_tokenizer())) for _ in range(draws.randrange(12))]
            return ScriptedAnswer(ids)
        said = words(draws)
        for _ in range(draws.choice([0, 1, 1, 1, 2, 3])):
            said += self._call() + words(draws)
        end = draws.choice(["<|im_end|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>", ""])
        return ScriptedAnswer(encode(said + end))

    def _call(self) -> str:
        draws = self._draws
        if draws.random() < 0.2:
            return draws.choice(["<tool_call>{oops</tool_call>", "<tool_call>", "</tool_call>"])
        name = draws.choice(["lookup", "lookup", "other", "nobody"])
        arguments = draws.choice([{"q": words(draws)}, {"q": words(draws)}, {}, {"q": 3}])
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>{body}</tool_call>"


def words(draws: random.Random) -> str:
    """What anybody says."""
    return "".join(draws.choice(WORDS) for _ in range(draws.randrange(5)))


class RandomUser(FakeUser):
    """Asks on, ends the conversation, or breaks."""

    def __init__(self, draws: random.Random, **behaviours: str) -> None:
        super().__init__(**behaviours)
        self._draws = draws

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        await self._enter("respond", instance_id)
        mood = self._draws.random()
        if mood < 0.02:
            raise RuntimeError(words(self._draws))
        if mood < 0.03:
            await asyncio.Event().wait()
        return InteractionResult(mood > 0.92, words(self._draws), self._draws.random())


def random_reply(draws: random.Random) -> Any:
    """What a tool returns, or raises."""
    mood = draws.random()
    if mood < 0.05:
        raise ToolError(words(draws))
    if mood < 0.1:
        raise draws.choice([RuntimeError(words(draws)), SystemExit(1), asyncio.CancelledError()])
    if mood < 0.15:
        return draws.choice([None, 3, object()])
    if mood < 0.5:
        return words(draws) * draws.choice([1, 1, 9])
    response = ToolResponse(text=words(draws))
    return ToolResult(response, draws.choice([None, 0.5, -1.0]), {}, mood > 0.97)


@dataclass(frozen=True)
class SeededConversation:
    """What came of a seed."""

    request: WatchedRequest
    engine: RandomEngine
    tools: Sequence[FakeTool]
    user: RandomUser
    was_cancelled: bool
    complaints: list[str]
    """What the event loop was told of and nobody took: an exception that was never retrieved."""


def run_conversation(seed: int) -> SeededConversation:
    """Play the conversation of a seed to its end."""
    draws = random.Random(seed)
    budgets = _draw_budgets(draws)
    request = make_request(
        words(draws), kind=WatchedRequest, request_id=f"walk-{seed}", budgets=budgets, seed=seed,
        interaction_kwargs={"name": "fake"} if draws.random() < 0.85 else {},
    )  # fmt: skip
    assert isinstance(request, WatchedRequest)
    request.watch()
    behaviours = _draw_behaviours(draws)
    engine, user = RandomEngine(draws, request), RandomUser(draws, **behaviours)
    tools = [
        FakeTool(name, reply=lambda _: random_reply(draws), **behaviours)
        for name in ("lookup", "other")
    ]
    context = make_context(
        engine,
        tools=tools[: draws.choice([0, 2, 2, 2])],
        interactions=[user],
        tool_timeout_s=0.005,
        interaction_timeout_s=0.005,
        on_malformed_call=draws.choice(["observe", "observe", "observe", "stop", "mask"]),
        max_tool_response_length=24,
        max_parallel_calls=draws.choice([1, 3]),
        interaction_interval=draws.choice([1, 1, 1, 1, 2]),
        interaction_prob=draws.choice([1.0, 1.0, 1.0, 0.5]),
        tokenization_sanity_check_mode=draws.choice(["disable", "ignore_strippable"]),
    )
    cancel_after = draws.randrange(60) if draws.random() < 0.1 else None
    complaints = asyncio.run(_play(request, context, cancel_after))
    return SeededConversation(request, engine, tools, user, cancel_after is not None, complaints)


def _draw_budgets(draws: random.Random) -> Budgets:
    return Budgets(
        max_response_tokens=draws.choice([40, 600, 2000, 4000]),
        max_model_len=draws.choice([500, 2000, 8000, 8000]),
        max_turn_tokens=draws.choice([None, None, None, 5, 80]),
        max_observation_tokens=24,
        max_assistant_turns=draws.choice([None, None, None, 1, 6]),
        max_user_turns=draws.choice([None, None, None, 0, 2]),
        max_tool_calls=draws.choice([None, None, None, 0, 5]),
        timeout_s=draws.choice([None] * 29 + [1e-6]),
    )


def _draw_behaviours(draws: random.Random) -> dict[str, Any]:
    if draws.random() < 0.85:
        return {}
    method = draws.choice(["create", "execute", "calc_reward", "release", "start", "finalize"])
    return {method: draws.choice(["raise", "exit", "cancel_self", "hang"])}


async def _play(
    request: AsyncRolloutRequest, context: RolloutContext, cancel_after: int | None
) -> list[str]:
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    task = asyncio.create_task(run_request(request, context))
    if cancel_after is not None:
        for _ in range(1 + cancel_after):
            await asyncio.sleep(0)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, BaseException) and cancel_after is None:
        raise outcome
    return complaints
