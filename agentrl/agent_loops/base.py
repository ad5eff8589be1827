"""The base class of agent loops, with the interface of verl 0.6.1 to 0.9.1.

A loop is built for each request, drives it with calls of `self.server_manager.generate`, and
returns token sequences. What it returns is checked: see `agentrl.agent_loops.reconcile`.
"""

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from agentrl.agent_loops.output import AgentLoopOutput
from agentrl.agent_loops.placeholders import show_media
from agentrl.agent_loops.server_manager import AsyncLLMServerManager
from agentrl.errors import AgentError
from agentrl.interactions.base import BaseInteraction
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.fitting import fit_prompt
from agentrl.rollout.media import by_kind

_INIT_LOCK = threading.Lock()


class DictConfigWrap:
    """Holds a configuration as `config`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Holds the tools of the run as `tools`."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


@dataclass(slots=True)
class MergeResult:
    """Tokens after new ones were appended."""

    token_ids: list[int]
    appended_token_count: int
    kind: str = "context"
    inserted_token_ids: list[int] = field(default_factory=list[int])
    """Always empty: the end of a turn is part of the appended tokens."""
    removed_prefix_token_count: int = 0
    """Always 0: no token is removed."""


class AgentLoopBase(ABC):
    """An agent that drives one request.

    Args:
        trainer_config: The run's configuration as `.config`, under verl's names and agentrl's.
        server_manager: Generates.
        tokenizer: The policy's tokenizer. `apply_chat_template` returns a list of ids.
        processor: The model's processor of transformers; None if it reads text only.
        dataset_cls: None, or the class of `data.custom_cls`.
        data_config: The section `data` as `.config`.
        hf_model_type: Not used.
        **kwargs: Further arguments of the loop's entry in `agent_loop_config_path`.

    Attributes:
        config: The configuration.
        interactions: The run's interactions by name. A constructor that needs them has a parameter
            `interactions`.
        loop: The running event loop.

    Example:
        >>> @register("echo")
        ... class EchoLoop(AgentLoopBase):
        ...     async def run(self, sampling_params, **row):
        ...         prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        ...         output = await self.server_manager.generate(
        ...             "1", prompt_ids=prompt_ids, sampling_params=sampling_params
        ...         )
        ...         return AgentLoopOutput(
        ...             prompt_ids=prompt_ids,
        ...             response_ids=output.token_ids,
        ...             response_mask=[1] * len(output.token_ids),
        ...         )
    """

    interactions: Mapping[str, BaseInteraction]
    _class_initialized: ClassVar[bool] = False
    """Set by loops of verl 0.6.1 in their `init_class`. Each class has its own."""
    _has_called_init: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # An inherited flag would skip the initialization of a subclass.
        cls._class_initialized = False
        cls._has_called_init = False

    def __init__(
        self,
        trainer_config: Any,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        config = trainer_config.config
        kwargs.pop("tools", None)
        if "interactions" in kwargs:
            self.interactions = kwargs.pop("interactions")
        self._init_class_once(config, tokenizer, processor, kwargs)
        self.config = config
        self.rollout_config = config.actor_rollout_ref.rollout
        self.data_config = config.data if data_config is None else data_config.config
        self.dataset_config = self.data_config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs") or {}
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    @classmethod
    def _init_class_once(
        cls, config: Any, tokenizer: Any, processor: Any, kwargs: dict[str, Any]
    ) -> None:
        with _INIT_LOCK:
            if not cls._has_called_init:
                cls.init_class(config=config, tokenizer=tokenizer, processor=processor, **kwargs)
                cls._has_called_init = True

    @classmethod  # noqa: B027 - loops may leave it out
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Prepare what all requests share, such as tools. Called once per process and class.

        If it raises, the request fails, and the next request calls it again.

        Args:
            config: As `self.config`.
            tokenizer: As `self.tokenizer`.
            processor: As `self.processor`.
            **kwargs: As those of the constructor.
        """

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Drive the request to its end.

        Called once per request, as a task. An error fails only this request.

        Args:
            sampling_params: Temperature and the like; to be passed to `generate`.
            **kwargs: The row: its columns, and `raw_prompt` (the messages; parts of images and
                videos have them decoded), `multi_modal_data` (the same by kind), `data_source`,
                `reward_model`, `extra_info`, `tools_kwargs`, `interaction_kwargs`, `index`, `uid`.

        Returns:
            The sequence; or a list, if the trajectory has several. The last one is the sequence in
            which the trajectory ended.
        """

    # Tokens of messages. The texts of messages never become control tokens.

    async def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        remove_system_prompt: bool = False,
        **_: Any,
    ) -> list[int]:
        """Return the tokens of messages and the generation prompt.

        Args:
            messages: Messages as dicts.
            tools: Schemas as dicts.
            images: The images of the messages, in order; None: each part has its own.
            videos: As `images`.
            remove_system_prompt: The messages continue a conversation: return what follows the turn
                that was sampled last, from the end of that turn on.

        Raises:
            TemplateError: If the template cannot render the messages.
            DataError: If a prompt is too long, and `data.truncation` is `error` or it has images.
            AgentError: If there is not one image for each part, or one cannot be loaded.
        """
        template, schemas = self.server_manager.template, _read_tools(tools)
        media = self.server_manager.media
        read = await show_media(read_messages(messages), media, images, videos)
        if remove_system_prompt:
            calls = self.server_manager.calls
            return self._follow(read, schemas, calls[-1].token_ids if calls else [])
        encoded = await template.encode_planned(template.plan_prompt(read, schemas))
        limit, has_media = self.rollout_config.prompt_length, bool(encoded.runs)
        truncation = "error" if has_media else self.data_config.get("truncation") or "error"
        return fit_prompt(encoded.ids, limit, truncation, has_media=has_media)

    async def ct_build_initial_tokens(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **media: Any
    ) -> list[int]:
        """Return the tokens of a prompt, as `apply_chat_template`."""
        media.pop("mm_inputs_out", None)
        return await self.apply_chat_template(messages, tools, **media)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append sampled tokens; returns tokens, mask and log-probabilities."""
        new = list(assistant_token_ids)
        merged = MergeResult([*runtime_token_ids, *new], len(new), "assistant")
        log_probs = None
        if response_logprobs is not None and assistant_logprobs is not None:
            log_probs = [*response_logprobs, *assistant_logprobs]
        return merged, [*response_mask, *[1] * len(new)], log_probs

    async def ct_merge_context_msg(
        self,
        previous_messages: Sequence[Any],
        updated_messages: Sequence[Any],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append messages after a sampled turn; returns tokens, mask and log-probabilities.

        Raises:
            TemplateError: If the template cannot render the messages after a turn.
        """
        added = read_messages(updated_messages[len(previous_messages) :])
        read = await show_media(added, self.server_manager.media)
        new = self._follow(read, _read_tools(tools), runtime_token_ids)
        merged = MergeResult([*runtime_token_ids, *new], len(new))
        log_probs = None
        if response_logprobs is not None:
            log_probs = [*response_logprobs, *[0.0] * len(new)]
        return merged, [*response_mask, *[0] * len(new)], log_probs

    def _follow(
        self,
        messages: list[Message],
        tools: Sequence[OpenAIFunctionToolSchema],
        last: Sequence[int],
    ) -> list[int]:
        template = self.server_manager.template
        return template.encode_delta(messages, last_ids=last, tools=tools).ids

    # Images and videos

    async def process_multi_modal_info(self, messages: Sequence[Any]) -> dict[str, Any]:
        """Return the decoded images and videos of messages, under `images` and `videos`.

        A kind that the messages do not have is not in the result.

        Raises:
            AgentError: If a part has no image or video, or it cannot be loaded.
        """
        shown = await show_media(read_messages(messages), self.server_manager.media)
        items = [part.item for message in shown for part in message.parts if part.item is not None]
        return {f"{kind}s": of for kind, of in by_kind(items).items()}

    async def process_vision_info(self, messages: Sequence[Any]) -> dict[str, Any]:
        """Return the same, under the earlier name of the method."""
        return await self.process_multi_modal_info(messages)

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal and self.processor is None:
            raise AgentError(
                "images, videos or audio were given, and the model reads text only",
                expected="a vision-language model in model.path",
            )

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: Mapping[str, Any]) -> list[Any] | None:
        """Return None: `generate` takes the videos as they are."""
        return None


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Read messages that are dicts or `Message` objects."""
    return [
        one if isinstance(one, Message) else Message.model_validate(dict(one)) for one in messages
    ]


def _read_tools(tools: Sequence[Any] | None) -> tuple[OpenAIFunctionToolSchema, ...]:
    """Read schemas that are dicts or objects. Equal schemas become the same objects."""
    plain = [
        one.to_template() if isinstance(one, OpenAIFunctionToolSchema) else one
        for one in tools or ()
    ]
    return _read_schemas(json.dumps(plain)) if plain else ()


@lru_cache(maxsize=256)
def _read_schemas(text: str) -> tuple[OpenAIFunctionToolSchema, ...]:
    """Read schemas from JSON once: a template prepares each new object again."""
    return tuple(OpenAIFunctionToolSchema.model_validate(one) for one in json.loads(text))
