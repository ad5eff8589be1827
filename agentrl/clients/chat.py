"""A language model behind an OpenAI-compatible address: judges and simulated users ask it."""

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import urlsplit

from aiolimiter import AsyncLimiter
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from agentrl.clients.http import bounding_hooks
from agentrl.config.schema.section import Section
from agentrl.errors import AgentRLError, ConfigError, MissingExtraError
from agentrl.plugins.call import PerLoop
from agentrl.plugins.environment import install_command

_CHARACTERS_PER_TOKEN = 4
"""An estimate, for servers that do not count."""
_MAX_TOLD = 300
_SECRETIVE = (401, 403)
"""Statuses whose texts tend to repeat the key."""


class ChatError(AgentRLError, RuntimeError):
    """A model that gave no reply (details: `address`, `status`, `expected`); holds no secret."""


class ChatBudgetError(ChatError):
    """A budget of calls or tokens that was spent before this call."""


class ChatConfig(Section):
    """A model behind an address, how it is sampled, and how much it may be used.

    No key of a service is ever shown: not in a repr, an error, a log or a saved configuration.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    base_url: str
    """Address of the API, such as `http://localhost:30000/v1`; it is shown in errors."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    api_key: SecretStr | None = None
    """Key of the service; null: it asks for none."""
    api_key_env: str | None = None
    """Environment variable that holds the key, instead of `api_key`."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one attempt. A call ends within `max_retries + 1` times as many, the waits between
    its attempts included; what it waits for its place is not counted."""
    max_retries: int = Field(default=2, ge=0)
    """Further attempts after a lost connection, a time-out, or a status 408, 409, 429 or 5xx."""
    max_concurrency: int = Field(default=16, ge=1)
    """Calls under way at once; further ones wait."""
    rate_limit: float | None = Field(default=None, gt=0)
    """Calls begun in a second, evenly spaced; null: no limit."""
    max_calls: int | None = Field(default=None, ge=1)
    """Calls in the life of the client: of a run on one rank, anew where it is resumed; null: no
    limit."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Tokens, of prompts and replies, in the life of the client, likewise; null: no limit. The call
    that crosses it, and those under way beside it, are finished."""
    temperature: float | None = Field(default=None, ge=0)
    """null: the server's."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """null: the server's."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one reply; null: the server's limit."""
    seed: int | None = None
    """Of the sampling, where the server honours one."""
    stop: list[str] = Field(default_factory=list[str])
    """Texts that end a reply."""
    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of the request, as the server names them."""

    @field_validator("base_url")
    @classmethod
    def _without_secrets(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no address; expected one such as http://localhost:30000/v1")
        if "@" in parts.netloc or parts.query:
            raise ValueError("a user, password or query in the address; expected api_key instead")
        return value

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("api_key and api_key_env are both set; expected one of them")
        return self

    def find_key(self) -> str | None:
        """Read the service's key.

        Raises:
            ConfigError: where `api_key_env` names a variable that is not set.
        """
        if self.api_key_env is None:
            return self.api_key.get_secret_value() if self.api_key else None
        if not (key := os.environ.get(self.api_key_env)):
            raise ConfigError(
                f"the environment variable {self.api_key_env} is not set",
                key="api_key_env",
                expected="the name of a variable that holds the key of the service",
            )
        return key

    def sampling(self) -> dict[str, Any]:
        """The sampling keys that are set, as fields of a request."""
        names = ("temperature", "top_p", "max_tokens", "seed", "stop", "extra_body")
        given = self.model_dump(include=set(names), exclude_none=True)
        return {name: value for name, value in given.items() if value not in ([], {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What a model said."""

    text: str
    prompt_tokens: int
    """As the server counts them; where it does not, one for every four characters."""
    completion_tokens: int
    """Likewise."""
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        """What the call took from a budget."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True, kw_only=True)
class ChatBudget:
    """Calls and tokens that may be spent: by a client, or in one conversation."""

    max_calls: int | None = None
    max_tokens: int | None = None
    """Of prompts and replies."""
    num_calls: int = 0
    num_tokens: int = 0

    @property
    def spent(self) -> str | None:
        """Which limit is reached, in words; None where there is room for another call."""
        if self.max_calls is not None and self.num_calls >= self.max_calls:
            return f"{self.num_calls} of {self.max_calls} calls"
        if self.max_tokens is not None and self.num_tokens >= self.max_tokens:
            return f"{self.num_tokens} of {self.max_tokens} tokens"
        return None


@dataclass(frozen=True, slots=True)
class _Lane:
    """What belongs to one event loop."""

    api: Any
    room: asyncio.Semaphore
    pace: AsyncLimiter | None


class ChatClient:
    """Ask a model behind an OpenAI-compatible address; for every request of a run.

    It may be used from several event loops, each of which has connections, concurrency and pace of
    its own. Call `close` on each, behind its last call.

    Args:
        config: The model, its sampling and its limits.

    Raises:
        MissingExtraError: without the extra `openai`.
        ConfigError: for a key of the service that is not there.

    Example:
        >>> client = ChatClient(ChatConfig(base_url="http://localhost:30000/v1", model="judge"))
        >>> reply = await client.complete([{"role": "user", "content": "2 + 3?"}], max_tokens=8)
    """

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.budget = ChatBudget(max_calls=config.max_calls, max_tokens=config.max_total_tokens)
        self._key = config.find_key()
        self._openai = _import_openai()
        self._http = _http_library(self._openai)
        self._lanes = PerLoop(self._open_lane)

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        budget: ChatBudget | None = None,
        **overrides: Any,
    ) -> ChatReply:
        """Ask for the next message of a conversation. Cancelling cancels the call.

        Args:
            messages: OpenAI-format messages.
            budget: Of this conversation, beside the client's own; what is used is added to it.
            **overrides: Fields of this request instead of the configuration's (`temperature`,
                `max_tokens`, `seed`, `response_format`, ...).

        Raises:
            ChatBudgetError: where a budget was spent before.
            ChatError: where no reply came, whatever the reason; with address and status.
        """
        budgets = [self.budget] if budget is None else [self.budget, budget]
        lane = self._lanes.get()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(lane.room)
            if lane.pace is not None:
                await lane.pace.acquire()
            self._enter(budgets)
            reply = await self._ask(lane, messages, overrides)
        for each in budgets:
            each.num_tokens += reply.num_tokens
        return reply

    async def close(self) -> None:
        """Close the connections of this event loop. May be called twice, and before any call."""
        if (lane := self._lanes.pop()) is not None:
            await lane.api.close()

    def _open_lane(self) -> _Lane:
        config = self.config
        api = self._openai.AsyncOpenAI(
            base_url=config.base_url,
            # Given always: without one it would send OPENAI_API_KEY to whatever address this is.
            api_key=self._key or "none",
            timeout=config.timeout_s,
            max_retries=config.max_retries,
            # Redirects would take the key and the conversation to an address that nobody wrote.
            http_client=self._openai.DefaultAsyncHttpxClient(
                event_hooks=bounding_hooks(self._http), follow_redirects=False
            ),
        )
        pace = AsyncLimiter(1, 1 / config.rate_limit) if config.rate_limit else None
        return _Lane(api, asyncio.Semaphore(config.max_concurrency), pace)

    def _enter(self, budgets: Sequence[ChatBudget]) -> None:
        for budget in budgets:
            if budget.spent is not None:
                raise ChatBudgetError(
                    f"the budget is spent: {budget.spent}", address=self.config.base_url
                )
        for budget in budgets:
            budget.num_calls += 1

    async def _ask(
        self, lane: _Lane, messages: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]
    ) -> ChatReply:
        fields = {"model": self.config.model, **self.config.sampling(), **overrides}
        whole_s = self.config.timeout_s * (self.config.max_retries + 1)
        try:
            # The client's own time-out is that of one read: a server that drips never meets it.
            async with asyncio.timeout(whole_s):
                answer = await lane.api.chat.completions.create(messages=list(messages), **fields)
        except TimeoutError:
            raise self._failure(f"no reply within {whole_s:g} s") from None
        except self._openai.APIStatusError as error:
            raise self._refusal(error) from None
        except self._openai.APITimeoutError:
            raise self._failure(f"no reply within {self.config.timeout_s:g} s") from None
        except self._openai.OpenAIError as error:
            cause = error.__cause__ or error
            raise self._failure(f"{type(cause).__name__}: {cause}") from None
        except ValueError as error:  # what came is no JSON
            raise self._failure(f"no reply that can be read: {error}") from None
        return self._read(answer, messages)

    def _read(self, answer: Any, messages: Sequence[Mapping[str, Any]]) -> ChatReply:
        try:
            choice = answer.choices[0]
            text = choice.message.content or ""
            prompt, completion = _count(answer.usage, messages, text)
        except (AttributeError, IndexError, TypeError, ValueError):
            raise self._failure(f"no reply in what it sent: {answer!r:.80}") from None
        return ChatReply(
            text=text,
            prompt_tokens=prompt,
            completion_tokens=completion,
            finish_reason=str(choice.finish_reason or ""),
        )

    def _refusal(self, error: Any) -> ChatError:
        """Word an answer that is no reply."""
        status = cast("int", error.status_code)
        why = "" if status in _SECRETIVE else f": {error.message}"
        return self._failure(f"status {status}{why}", status=status)

    def _failure(self, told: str, **details: object) -> ChatError:
        told = told.replace(self._key, "***") if self._key else told
        return ChatError(
            f"the model {self.config.model!r} did not reply: {told[:_MAX_TOLD]}",
            address=self.config.base_url,
            **details,
        )


def _count(usage: Any, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[int, int]:
    """Count the tokens of prompt and reply; what the server says of them is checked."""
    if usage is not None:
        counted = int(usage.prompt_tokens or 0), int(usage.completion_tokens or 0)
        if min(counted) >= 0:  # a negative count would refill a budget
            return counted
    asked = sum(len(str(message.get("content") or "")) for message in messages)
    return -(-asked // _CHARACTERS_PER_TOKEN), -(-len(text) // _CHARACTERS_PER_TOKEN)


def _http_library(openai: Any) -> Any:
    """Find the library of openai's connections: httpx, and httpx2 from its third release on."""
    (base,) = openai.DefaultAsyncHttpxClient.__bases__
    return importlib.import_module(base.__module__.partition(".")[0])


def _import_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingExtraError(
            "a model behind an OpenAI-compatible address needs the package openai",
            install=install_command("openai"),
        ) from error
    return openai
