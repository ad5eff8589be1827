"""What an interaction is: a simulated user, or an environment that answers the policy."""

import math
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

SHARED_KEYS = ("name", "timeout_s")
"""Keys of every interaction's `config`, which agentrl itself reads."""


class InteractionResult(NamedTuple):
    """What an interaction says to one answer of the policy."""

    should_terminate: bool
    """End the request: the conversation is over."""
    content: str = ""
    """What the user says; appended as a user message unless the conversation is over."""
    score: float | None = None
    """Score of the answer that it replies to; None where it does not judge."""
    metadata: dict[str, Any] | None = None
    """What else there is to record."""

    @classmethod
    def of(cls, value: Any, *, interaction: str) -> "InteractionResult":
        """Accept the result, or the plain tuple of four, that users return, and check it.

        Raises:
            TypeError: for anything else, naming the interaction.
            ValueError: for a score that is not finite.
        """
        fields = cast("tuple[Any, ...]", value)
        if not isinstance(value, tuple) or len(fields) != len(cls._fields):
            raise TypeError(
                f"interaction {interaction!r} returned {value!r:.80}; expected "
                "(should_terminate, content, score, metadata) or an InteractionResult"
            )
        result = cls(*fields)
        return cls(
            bool(result.should_terminate),
            _content(result.content, interaction),
            _score(result.score, interaction),
            dict(cast("Mapping[str, Any] | None", result.metadata) or {}),
        )


class BaseInteraction:
    """A partner of the policy. Subclass it and name the subclass in an interaction YAML.

    One object is built per run and serves every request; what belongs to one request is kept under
    its `instance_id`. The life of an instance, for each request that selects the interaction:

    1. `start_interaction` once, before the first turn;
    2. `generate_response` after each answer of the policy that calls no tool (and that
       `interaction_interval` and `interaction_prob` let through);
    3. `finalize_interaction` once, always: after a failure, a time-out or a cancellation too.

    Methods may be `async def`, or plain `def`, which then runs on a thread. Each call has a
    time-out (`rollout.multi_turn.interaction_timeout_s`, or `timeout_s` in the interaction's
    `config`). A call that is late, or whose request is cancelled, is cancelled: that raises
    `asyncio.CancelledError` inside it; clean up and let it through.

    A method that has a parameter `ground_truth` or `uid` is given the row's right answer, or the
    id of the group, where the row's `interaction_kwargs` have none of that name. Others are not.

    Args:
        config: The YAML's `config` with the `name` of its entry.
    """

    data_sources: tuple[str, ...] = ()
    """Rows of these sources select it where they name none; the entry's `data_sources`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> str | tuple[str, str]:
        """Make what one request needs. Called once per request, before its first turn.

        Args:
            instance_id: The request's id.
            **kwargs: The row's `interaction_kwargs`, whole.

        Returns:
            The id under which the instance is kept; or that id and what the user says first, which
            is appended to the prompt as a user message, cut to the budget of one observation.

        Raises:
            Exception: Any fails this request, and no other, with `Fault.INTERACTION`.
        """
        return instance_id or uuid.uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult | tuple[bool, str, float, dict[str, Any]]:
        """Reply to the policy's last answer.

        Args:
            instance_id: From `start_interaction`.
            messages: The conversation so far, as OpenAI-format dicts; a copy.
            **kwargs: The row's `interaction_kwargs`, whole.

        Raises:
            Exception: Any fails this request, and no other, with `Fault.INTERACTION`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score the conversation. Called by your own `generate_response`, never by agentrl."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Give back what `start_interaction` took. Called once per start that was begun, always.

        Raises:
            Exception: Recorded, and nothing more.
        """

    async def shutdown(self) -> None:
        """Give back what the whole run shares: connections, pools. Called once, when a run ends.

        Raises:
            Exception: Logged, and nothing more.
        """


def _content(value: Any, interaction: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise TypeError(f"interaction {interaction!r} said {value!r:.80}; expected a str")


def _score(value: Any, interaction: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"interaction {interaction!r} scored {value!r:.80}, no number") from None
    if not math.isfinite(number):
        raise ValueError(f"interaction {interaction!r} scored {number}, no finite number")
    return number
