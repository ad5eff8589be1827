"""Ask a language model at an OpenAI-compatible address, as judges and simulated users do."""

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
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
_MAX_MESSAGE = 300
"""Characters of an error message of the server."""
_MAY_SHOW_KEY = (401, 403)
"""Statuses with error texts that may contain the key."""


class ChatError(AgentRLError, RuntimeError):
    """A model gave no reply (details: `address`, `status`, `expected`). Contains no secret."""


class ChatBudgetError(ChatError):
    """A budget of calls or tokens was used up before this call."""


class ChatConfig(Section):
    """A model at an address, its sampling, and limits of its use.

    The key of the service is never shown: not in a repr, an error, a log or a saved configuration.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    base_url: str
    """Address of the API, such as `http://localhost:30000/v1`; it is shown in errors."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    api_key: SecretStr | None = None
    """Key of the service; null: it needs none."""
    api_key_env: str | None = None
    """Environment variable that holds the key, instead of `api_key`."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one attempt. A call ends within `max_retries + 1` times as many, with the pauses
    between its attempts; the wait for `max_concurrency` and `rate_limit` is not counted."""
    max_retries: int = Field(default=2, ge=0)
    """Further attempts after a lost connection, a time-out, or a status 408, 409, 429 or 5xx."""
    max_concurrency: int = Field(default=16, ge=1)
    """Calls that run at once; further ones wait."""
    rate_limit: float | None = Field(default=None, gt=0)
    """Calls started per second, evenly spaced; null: no limit."""
    max_calls: int | None = Field(default=None, ge=1)
    """Calls of the client, which lives as long as a run on one rank; a resumed run counts from 0;
    null: no limit."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Tokens of prompts and replies of the client, counted likewise; null: no limit. The call that
    exceeds it, and other calls that run then, are finished."""
    temperature: float | None = Field(default=None, ge=0)
    """null: the server's."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """null: the server's."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one reply; null: the server's limit."""
    seed: int | None = None
    """Seed of the sampling, if the server supports it."""
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
        """Return the service's key.

        Raises:
            ConfigError: if `api_key_env` names a variable that is not set.
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
        """Return the sampling keys that are set, as fields of a request."""
        names = ("temperature", "top_p", "max_tokens", "seed", "stop", "extra_body")
        given = self.model_dump(include=set(names), exclude_none=True)
        return {name: value for name, value in given.items() if value not in ([], {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """The reply of a model."""

    text: str
    prompt_tokens: int
    """As the server counts them; if it does not, one for every four characters."""
    completion_tokens: int
    """Counted likewise."""
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        """The tokens that the call takes from a budget."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True, kw_only=True)
class ChatBudget:
    """Calls and tokens that a client, or one conversation, may use."""

    max_calls: int | None = None
    max_tokens: int | None = None
    """Tokens of prompts and replies."""
    num_calls: int = 0
    num_tokens: int = 0

    @property
    def spent(self) -> str | None:
        """The limit that is reached, as text; None if another call is allowed."""
        if self.max_calls is not None and self.num_calls >= self.max_calls:
            return f"{self.num_calls} of {self.max_calls} calls"
        if self.max_tokens is not None and self.num_tokens >= self.max_tokens:
            return f"{self.num_tokens} of {self.max_tokens} tokens"
        return None


@dataclass(frozen=True, slots=True)
class _Connection:
    """The API client and the limits of one event loop."""

    api: Any
    slots: asyncio.Semaphore
    rate_limit: AsyncLimiter | None


class ChatClient:
    """Ask a model at an OpenAI-compatible address, for every request of a run.

    It may be used from several event loops. Each loop has its own connections, concurrency and rate
    limit. Call `close` on each loop, after its last call.

    Args:
        config: The model, its sampling and its limits.

    Raises:
        MissingExtraError: if the extra `openai` is not installed.
        ConfigError: if the environment variable of the key is not set.

    Example:
        >>> client = ChatClient(ChatConfig(base_url="http://localhost:30000/v1", model="judge"))
        >>> reply = await client.complete([{"role": "user", "content": "2 + 3?"}], max_tokens=8)
    """

    def __init__(self, config: ChatConfig) -> None:
        self.config = config
        self.budget = ChatBudget(max_calls=config.max_calls, max_tokens=config.max_total_tokens)
        self._key = config.find_key()
        self._openai = _import_openai()
        # The HTTP library of openai: httpx, and httpx2 from its third release on.
        (base,) = self._openai.DefaultAsyncHttpxClient.__bases__
        self._http = importlib.import_module(base.__module__.partition(".")[0])
        self._connections = PerLoop(self._connect)

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
            budget: The conversation's budget, used in addition to the client's own.
            **overrides: Fields of this request instead of the configuration's (`temperature`,
                `max_tokens`, `seed`, `response_format`, ...).

        Raises:
            ChatBudgetError: if a budget was used up before.
            ChatError: if there is no reply, for any reason; with address and status.
        """
        budgets = [self.budget] if budget is None else [self.budget, budget]
        connection = self._connections.get()
        async with connection.slots:
            if connection.rate_limit is not None:
                await connection.rate_limit.acquire()
            for each in budgets:
                if each.spent is not None:
                    raise ChatBudgetError(
                        f"the budget is spent: {each.spent}", address=self.config.base_url
                    )
            for each in budgets:
                each.num_calls += 1
            reply = await self._ask(connection, messages, overrides)
        for each in budgets:
            each.num_tokens += reply.num_tokens
        return reply

    async def close(self) -> None:
        """Close the connections of this event loop. May be called twice, and before any call."""
        if (connection := self._connections.pop()) is not None:
            await connection.api.close()

    def _connect(self) -> _Connection:
        config = self.config
        api = self._openai.AsyncOpenAI(
            base_url=config.base_url,
            # Always given: else the library sends OPENAI_API_KEY to this address.
            api_key=self._key or "none",
            timeout=config.timeout_s,
            max_retries=config.max_retries,
            # A redirect would send the key and the conversation to another address.
            http_client=self._openai.DefaultAsyncHttpxClient(
                event_hooks=bounding_hooks(self._http), follow_redirects=False
            ),
        )
        rate_limit = AsyncLimiter(1, 1 / config.rate_limit) if config.rate_limit else None
        return _Connection(api, asyncio.Semaphore(config.max_concurrency), rate_limit)

    async def _ask(
        self,
        connection: _Connection,
        messages: Sequence[Mapping[str, Any]],
        overrides: Mapping[str, Any],
    ) -> ChatReply:
        fields = {"model": self.config.model, **self.config.sampling(), **overrides}
        whole_s = self.config.timeout_s * (self.config.max_retries + 1)
        try:
            # The library's time-out limits one read: a server that sends slowly never exceeds it.
            async with asyncio.timeout(whole_s):
                completions = connection.api.chat.completions
                answer = await completions.create(messages=list(messages), **fields)
        except TimeoutError:
            raise self._failure(f"no reply within {whole_s:g} s") from None
        except self._openai.APIStatusError as error:
            status = cast("int", error.status_code)
            why = "" if status in _MAY_SHOW_KEY else f": {error.message}"
            raise self._failure(f"status {status}{why}", status=status) from None
        except self._openai.APITimeoutError:
            raise self._failure(f"no reply within {self.config.timeout_s:g} s") from None
        except self._openai.OpenAIError as error:
            cause = error.__cause__ or error
            raise self._failure(f"{type(cause).__name__}: {cause}") from None
        except ValueError as error:  # the answer is not JSON
            raise self._failure(f"no valid reply: {error}") from None
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

    def _failure(self, message: str, **details: object) -> ChatError:
        message = message.replace(self._key, "***") if self._key else message
        return ChatError(
            f"the model {self.config.model!r} did not reply: {message[:_MAX_MESSAGE]}",
            address=self.config.base_url,
            **details,
        )


def _count(usage: Any, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[int, int]:
    """Return the tokens of prompt and reply; the server's counts are checked."""
    if usage is not None:
        counted = int(usage.prompt_tokens or 0), int(usage.completion_tokens or 0)
        if min(counted) >= 0:  # a negative count would refill a budget
            return counted
    asked = sum(len(str(message.get("content") or "")) for message in messages)
    return -(-asked // _CHARACTERS_PER_TOKEN), -(-len(text) // _CHARACTERS_PER_TOKEN)


def _import_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingExtraError(
            "a model at an OpenAI-compatible address needs the package openai",
            install=install_command("openai"),
        ) from error
    return openai
