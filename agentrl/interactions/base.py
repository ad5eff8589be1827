"""The base class of interactions: simulated users, and environments that answer the policy."""

import math
import uuid
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple, cast

from agentrl.messages import ToolResponse

SHARED_KEYS = ("name", "timeout_s")
"""Keys of every interaction's `config` that agentrl reads."""


class InteractionResult(NamedTuple):
    """The reply of an interaction to one answer of the policy."""

    should_terminate: bool
    """End the request: the conversation is over."""
    content: str | ToolResponse = ""
    """The user's message; appended unless the conversation is over. A `ToolResponse` may have
    images and videos, which are shown before its text."""
    score: float | None = None
    """Score of the answer that it replies to; None if it gives none."""
    metadata: dict[str, Any] | None = None
    """Other values to record."""

    @classmethod
    def of(cls, value: Any, *, interaction: str) -> "InteractionResult":
        """Check the result, or the plain tuple of four values, that users return.

        Raises:
            TypeError: for any other value; it names the interaction.
            ValueError: if the score is not finite.
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

    One object is built per run and serves every request; keep the state of a request under its
    `instance_id`. The life cycle of an instance, for each request that selects the interaction:

    1. `start_interaction` once, before the first turn;
    2. `generate_response` after each answer of the policy that calls no tool (and that
       `interaction_interval` and `interaction_prob` allow);
    3. `finalize_interaction` once, always, also after a failure, a time-out or a cancellation.

    Methods may be `async def`, or plain `def`, which then runs on a thread. Each call has a
    time-out (`rollout.multi_turn.interaction_timeout_s`, or `timeout_s` in the interaction's
    `config`). If the time is up or the request is cancelled, the call is cancelled: that raises
    `asyncio.CancelledError` inside it. Clean up, and do not catch the error.

    A method with a parameter `ground_truth` or `uid` gets the row's right answer, or the id of the
    group, if the row's `interaction_kwargs` have no such key.

    Args:
        config: The `config` of the YAML, with the `name` of its entry.

    Attributes:
        instances: For state of requests, by `instance_id`. It is the interaction's own.
    """

    data_sources: tuple[str, ...] = ()
    """Rows of these sources select it if they name none; the entry's `data_sources`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.instances: dict[str, Any] = {}
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(
        self, instance_id: str | None = None, *args: Any, **kwargs: Any
    ) -> str | tuple[str, str]:
        """Prepare one request. Called once per request, before its first turn.

        Args:
            instance_id: The request's id.
            *args: Not read; a subclass may pass the right answer on.
            **kwargs: All of the row's `interaction_kwargs`.

        Returns:
            The id of the instance; or that id and the user's first message, which is appended to
            the prompt, cut to the budget of one observation.

        Raises:
            Exception: Any error fails this request, and no other, with `Fault.INTERACTION`.
        """
        return instance_id or uuid.uuid4().hex

    def waiting_room(self) -> AbstractAsyncContextManager[Any]:
        """Return a context that each `generate_response` enters before its time-out starts.

        Return a semaphore if replies compute, or share a limited resource: the wait for it does not
        count as time of the reply. Called on the event loop for each reply. The default does not
        wait.
        """
        return nullcontext()

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult | tuple[bool, str, float, dict[str, Any]]:
        """Reply to the policy's last answer.

        Args:
            instance_id: From `start_interaction`.
            messages: The conversation until now, as OpenAI-format dicts; a copy.
            **kwargs: All of the row's `interaction_kwargs`.

        Raises:
            Exception: Any error fails this request, and no other, with `Fault.INTERACTION`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score the conversation. Called by your own `generate_response`, never by agentrl."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free the resources of a request. Always called, once per start that was begun.

        Raises:
            Exception: Only recorded.
        """

    async def shutdown(self) -> None:
        """Free the resources of the run: connections, pools. Called once, when a run ends.

        Raises:
            Exception: Only logged.
        """


def _content(value: Any, interaction: str) -> str | ToolResponse:
    if isinstance(value, str | ToolResponse | None):
        return value or ""
    raise TypeError(
        f"interaction {interaction!r} returned the content {value!r:.80}; expected a str, or a "
        "ToolResponse with images"
    )


def _score(value: Any, interaction: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"interaction {interaction!r} returned the score {value!r:.80}, which is no number"
        ) from None
    if not math.isfinite(number):
        raise ValueError(
            f"interaction {interaction!r} returned the score {number}, which is not finite"
        )
    return number
