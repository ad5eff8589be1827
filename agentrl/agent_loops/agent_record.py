"""What an external agent gets for a request, and how a call of it ended."""

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from agentrl.agent_loops.gateway import GatewaySession
from agentrl.agent_loops.gateway.sessions import MAX_REWARD
from agentrl.errors import AgentError, AgentRLError
from agentrl.messages import Message, dump_json
from agentrl.rollout.records import AgentRun
from agentrl.rollout.request import AsyncRolloutRequest

ROW_FILE = "row.json"
"""Name of the file with the row, in the working folder of a program."""
_MAX_KEPT_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """What one call of an agent gets.

    Example:
        >>> async def solve(record):
        ...     client = AsyncOpenAI(**record.openai)
        ...     await client.chat.completions.create(
        ...         model=record.model, messages=record.row["prompt"])
    """

    base_url: str
    """Root of the OpenAI dialects, with `/v1`."""
    key: str
    """API key. It names the request."""
    row: dict[str, Any]
    """`prompt` (messages), `data_source`, `extra_info`, and the other columns of the row, without
    the ground truth."""
    model: str
    """Name of the policy. The gateway accepts every name."""
    request_id: str
    environment: dict[str, str]
    """Variables by which clients find the gateway; programs get them."""

    @property
    def anthropic_base_url(self) -> str:
        """Root of the Anthropic dialect, without `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""
        return {"base_url": self.base_url, "api_key": self.key}

    @property
    def anthropic(self) -> dict[str, str]:
        """Arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""
        return {"base_url": self.anthropic_base_url, "api_key": self.key}

    def fill(self, argument: str) -> str:
        """Replace the placeholders of an argument. Other braces stay."""
        values = {
            "base_url": self.base_url,
            "anthropic_base_url": self.anthropic_base_url,
            "key": self.key,
            "model": self.model,
            "row": ROW_FILE,
            "request_id": self.request_id,
        }
        for name, value in values.items():
            argument = argument.replace(f"{{{name}}}", value)
        return argument


@dataclass(slots=True)
class Outcome:
    """How a call of the agent ended."""

    run: AgentRun
    reward: float | None = None
    error: AgentRLError | None = None
    """None if the agent ended by itself, without an error."""
    is_late: bool = False


RunAgent = Callable[[AgentRecord, float], Awaitable[Outcome]]
"""Runs an agent for at most so many seconds. Raises nothing but cancellations."""


def make_record(session: GatewaySession, request_id: str, row: dict[str, Any]) -> AgentRecord:
    """Make the record of a request, for calls of its session."""
    environment = {
        **session.environment,
        "AGENTRL_REQUEST_ID": request_id,
        **exempt_loopback(os.environ),
    }
    return AgentRecord(
        base_url=session.base_url,
        key=session.key,
        row=row,
        model=environment["AGENTRL_MODEL"],
        request_id=request_id,
        environment=environment,
    )


def exempt_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls of the gateway from a proxy, which cannot reach it."""
    given = ",".join(environment.get(name, "") for name in ("NO_PROXY", "no_proxy")).split(",")
    hosts = dict.fromkeys([*filter(None, map(str.strip, given)), "127.0.0.1", "localhost"])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def visible_row(request: AsyncRolloutRequest, hidden_keys: Sequence[str]) -> dict[str, Any]:
    """Return the row as an external agent sees it, as plain JSON values.

    Left out are the keys to hide, and texts and lists that are the ground truth. Numbers and the
    items of longer lists are not compared: an index or a choice may be equal by chance.

    Args:
        request: A pending request.
        hidden_keys: Keys to remove, at any depth.
    """
    hidden = {*hidden_keys, "tools_kwargs", "interaction_kwargs", "reward_model"}
    truth = request.ground_truth

    def is_secret(key: str, value: Any) -> bool:
        is_compared = isinstance(value, str | list) and bool(value)
        return key in hidden or (is_compared and value in (truth, [truth]))

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {str(k): cleaned(v) for k, v in items if not is_secret(str(k), v)}
        if isinstance(value, list | tuple):
            return [cleaned(one) for one in cast("list[Any]", value)]
        return value

    row = {
        **cleaned(request.columns),
        "prompt": [_plain_message(message) for message in request.messages],
        "data_source": request.data_source,
        "extra_info": cleaned(request.extra_info),
    }
    return cast("dict[str, Any]", json.loads(dump_json(row, default=str)))


def _plain_message(message: Message) -> dict[str, Any]:
    return message.model_dump(mode="json", exclude_none=True)


def shorten(text: str, max_chars: int = _MAX_KEPT_CHARS) -> str:
    """Keep the start and the end of a text."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 4
    return (
        f"{text[:head]}\n[... {len(text) - max_chars} characters ...]\n{text[head - max_chars :]}"
    )


def check_reward(value: Any) -> float | None:
    """Return a reward as a number.

    Raises:
        AgentError: If it is neither None nor a finite number.
    """
    if value is None:
        return None
    # A JSON integer can have more digits than a float can hold.
    with suppress(OverflowError):
        is_number = hasattr(value, "__float__") and not isinstance(value, bool)
        if is_number and abs(number := float(value)) < MAX_REWARD:
            return number
    raise AgentError(
        f"the agent reports the reward {shorten(repr(value), 80)}", expected="a finite number"
    )
