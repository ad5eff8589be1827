# pyright: reportIncompatibleMethodOverride=false
"""A whole rollout in memory: a tiny tokenizer with a chat template, a scripted policy, plug-ins.

One token is one byte, or one control token, so that lengths in tests can be counted by eye.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from agentrl.config.schema.run import DataConfig, MultiTurnConfig, RolloutConfig
from agentrl.data.rows import Prompt
from agentrl.engines.protocol import Engine, FinishReason, SamplingParams
from agentrl.engines.scripted import Answer, Script, ScriptedEngine
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.messages import Message, ToolResponse
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.fitting import PromptEncoder, TextFitter
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.media import RequestMedia
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.rollout.templates import ChatTemplate, check_request
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.tools import BaseTool
from tests.fakes.tools import behave, schema

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added but not special, as in production vocabularies."""
CONTROL = SPECIAL + ADDED

CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges, with a ChatML-like template that carries tools."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.add_tokens(list(ADDED))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@lru_cache(maxsize=1)
def tiny_template() -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer())


def encode(text: str) -> list[int]:
    """Encode with control tokens live, as a policy samples them."""
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def decode(ids: Sequence[int]) -> str:
    return tiny_template().decode(ids)


def control_ids(ids: Sequence[int]) -> list[str]:
    """The control tokens among `ids`, in order."""
    by_id = {id: text for text, id in tiny_tokenizer().get_added_vocab().items()}
    return [by_id[id] for id in ids if id in by_id]


def calling(name: str, **arguments: Any) -> str:
    """What a policy writes to call a tool."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"


class FakeTool(BaseTool):
    """Answers by a function of its arguments, or misbehaves where told to; notes each life.

    Args:
        name: Its name.
        reply: From the call's arguments to what `execute` returns.
        opening: What `create` says to the conversation.
        value: What `calc_reward` returns.
        behaviours: By method, a key of `tests.fakes.tools.behave`.
    """

    def __init__(
        self,
        name: str = "lookup",
        *,
        reply: Callable[[dict[str, Any]], Any] = lambda arguments: f"found {arguments['q']}",
        opening: str | None = None,
        value: Any = 0.0,
        properties: Mapping[str, dict[str, Any]] | None = None,
        **behaviours: str,
    ) -> None:
        given = {"q": {"type": "string"}} if properties is None else properties
        super().__init__({}, schema(name, **given))
        self.reply = reply
        self.opening = opening
        self.value = value
        self.behaviours = behaviours
        self.lives: defaultdict[str, list[str]] = defaultdict(list)
        self.kwargs: list[tuple[str, dict[str, Any]]] = []

    async def _enter(self, method: str, instance_id: str, kwargs: dict[str, Any]) -> None:
        self.lives[instance_id].append(method)
        self.kwargs.append((method, kwargs))
        await behave(self.behaviours.get(method, "fine"))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        await self._enter("create", str(instance_id), kwargs)
        return instance_id, ToolResponse(text=self.opening)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await self._enter("execute", instance_id, kwargs)
        return self.reply(parameters)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        await self._enter("calc_reward", instance_id, kwargs)
        return self.value

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._enter("release", instance_id, kwargs)


class FakeUser(BaseInteraction):
    """Says its lines, one for each answer, then ends the conversation; notes each life.

    A line is a text, or a whole `InteractionResult`.
    """

    def __init__(
        self, *lines: str | InteractionResult, name: str = "fake", **behaviours: str
    ) -> None:
        super().__init__({"name": name})
        self.lines = lines
        self.behaviours = behaviours
        self.lives: defaultdict[str, list[str]] = defaultdict(list)
        self.heard: list[list[dict[str, Any]]] = []

    async def _enter(self, method: str, instance_id: str) -> None:
        self.lives[instance_id].append(method)
        await behave(self.behaviours.get(method, "fine"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        await self._enter("start", str(instance_id))
        return str(instance_id)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        turn = self.lives[instance_id].count("respond")
        await self._enter("respond", instance_id)
        self.heard.append(messages)
        if turn >= len(self.lines):
            return InteractionResult(True, "", 1.0, {"turn": turn})
        line = self.lines[turn]
        return line if isinstance(line, InteractionResult) else InteractionResult(False, line, 0.25)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self._enter("finalize", instance_id)


def check_life(lives: Mapping[str, list[str]], first: str, last: str) -> None:
    """Plug-in life cycle: what was begun was ended, once."""
    for life in lives.values():
        assert life[0] == first
        assert life[-1] == last
        assert life.count(first) == life.count(last) == 1
        assert life.count("calc_reward") <= 1


def assert_invariants(request: AsyncRolloutRequest, engine: ScriptedEngine) -> None:
    """Check what is true of every ended request."""
    length = request.num_response_tokens
    assert len(request.response_ids) == len(request.loss_mask) == length
    assert len(request.rollout_log_probs) == length
    sampled = [turn for turn in request.turns if turn.role == "assistant"]
    trained = {i for turn in sampled if turn.excluded is None for i in range(turn.start, turn.end)}
    assert request.loss_mask == [int(i in trained) for i in range(length)]
    edges = [0, *(turn.end for turn in request.turns)]
    assert [turn.start for turn in request.turns] == edges[:-1]
    assert edges[-1] == length
    sent = [record for record in engine.records if record.request_id == request.request_id]
    for turn, record in zip(sampled, sent, strict=False):
        assert record.input_ids == request.prompt_ids + request.response_ids[: turn.start]
    assert len(sent) - len(sampled) in (0, 1)
    _assert_ended(request)
    _assert_within_budgets(request)


def _assert_ended(request: AsyncRolloutRequest) -> None:
    assert request.end is not None
    assert request.state is request.end.state
    failed = request.state is RequestState.FAILED
    assert (request.error is not None) == failed
    assert request.is_trained == request.in_baseline == (not failed)
    assert all(message.role != "assistant" for message in request.messages[:1])


def _assert_within_budgets(request: AsyncRolloutRequest) -> None:
    budgets = request.budgets

    def within(number: int, limit: int | None) -> bool:
        return limit is None or number <= limit

    assert within(request.num_response_tokens, budgets.max_response_tokens)
    assert within(len(request.input_ids), budgets.max_model_len) or not request.turns
    assert within(request.num_assistant_turns, budgets.max_assistant_turns)
    assert within(request.num_user_turns, budgets.max_user_turns)
    calls = [call for turn in request.turns for call in turn.calls]
    executed = [call for call in calls if call.outcome not in ("skipped", "malformed")]
    assert within(len(executed), budgets.max_tool_calls)
    for turn in request.turns:
        if turn.role == "assistant":
            assert within(turn.num_tokens, budgets.max_turn_tokens)
            assert (turn.cut is not None) == (turn.finish_reason is FinishReason.LENGTH)
        for call in turn.calls:
            assert within(call.num_tokens, budgets.max_observation_tokens)


def make_engine(*answers: Answer, max_model_len: int = 32_768) -> ScriptedEngine:
    return ScriptedEngine(answers, tokenizer=tiny_tokenizer(), max_model_len=max_model_len)


def make_scripted(script: Script) -> ScriptedEngine:
    return ScriptedEngine(script, tokenizer=tiny_tokenizer())


def make_context(
    engine: Engine,
    *,
    tools: Sequence[BaseTool] = (),
    interactions: Sequence[BaseInteraction] = (),
    max_prompt_tokens: int = 4096,
    truncation: Any = "error",
    parser: str = "hermes",
    template: ChatTemplate | None = None,
    **multi_turn: Any,
) -> RolloutContext:
    """Everything that requests share, round an engine; `multi_turn` are keys of the section."""
    settings = MultiTurnConfig(**{"tokenization_sanity_check_mode": "strict"} | multi_turn)
    template = template or tiny_template()
    fitter = TextFitter(
        template,
        max_tokens=settings.max_tool_response_length,
        side=settings.tool_response_truncate_side,
    )

    def check(request: AsyncRolloutRequest, wording: Callable[[], Sequence[str]]) -> None:
        mode = settings.tokenization_sanity_check_mode
        request.differences = check_request(template, request, mode, wording=wording())

    format_ = get_tool_parser(parser)
    return RolloutContext(
        engine=engine,
        template=template,
        parser=format_,
        caller=ToolCaller(format_, fitter.fit),
        fitter=fitter,
        media=RequestMedia(template.media),
        tools=tools,
        interactions={interaction.name: interaction for interaction in interactions},
        settings=settings,
        encode_prompt=PromptEncoder(
            template, max_tokens=max_prompt_tokens, truncation=truncation
        ).encode,
        check_tokens=check,
    )


def make_manager(
    context: RolloutContext, *, response: int = 4096, **rollout: Any
) -> RolloutManager:
    config = RolloutConfig(multi_turn=context.settings, **rollout)
    return RolloutManager(context, config, DataConfig(max_response_length=response))


def make_prompts(number: int, text: str = "Hi", **fields: Any) -> list[Prompt]:
    return [
        Prompt(index=i, messages=[Message(role="user", content=f"{text} {i}")], **fields)
        for i in range(number)
    ]


_numbers = count()


def make_request(
    text: str = "Hi", *, kind: type[AsyncRolloutRequest] = AsyncRolloutRequest, **fields: Any
) -> AsyncRolloutRequest:
    """A pending request that stops at the template's stop tokens."""
    stops = tiny_template().stop_token_ids
    sampling = SamplingParams(max_new_tokens=1 << 30, stop_token_ids=stops)
    given = {"request_id": f"r{next(_numbers)}", "sampling": sampling}
    return kind(messages=[Message(role="user", content=text)], **given | fields)
