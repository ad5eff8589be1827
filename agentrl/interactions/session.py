"""The interaction of one request, from its first turn to its end (plug-in life cycle)."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from agentrl.errors import InteractionError
from agentrl.interactions.base import BaseInteraction, InteractionResult
from agentrl.messages import Message
from agentrl.plugins.call import call_bounded, call_method, describe_error

T = TypeVar("T")

logger = logging.getLogger(__name__)


class InteractionSession:
    """Start, ask and finalise the interaction of one request.

    Call `start` once, `respond` for each answer, and `finalize` in a `finally`, however the request
    ended.

    Args:
        interaction: The run's interaction.
        instance_id: What it is started with: the request's id.
        kwargs: The row's `interaction_kwargs`. Its `name` is handed on like the rest, but only to
            methods that take it.
        offered: What else is there of the row (`ground_truth`, `uid`): given to a method that has a
            parameter of that name, where `kwargs` have none.
        timeout_s: Seconds of one call, where the interaction's config has no `timeout_s`.

    Example:
        >>> async def ask(interaction, messages):
        ...     session = InteractionSession(interaction, instance_id="1")
        ...     try:
        ...         await session.start()
        ...         return await session.respond(messages)
        ...     finally:
        ...         await session.finalize()
    """

    def __init__(
        self,
        interaction: BaseInteraction,
        *,
        instance_id: str,
        kwargs: Mapping[str, Any] | None = None,
        offered: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.interaction = interaction
        self._instance_id = instance_id
        # Copies: samples of a group share the row's.
        self._kwargs = copy.deepcopy(dict(kwargs or {}))
        there = {name: value for name, value in (offered or {}).items() if value is not None}
        self._offered = copy.deepcopy(there)
        self._timeout_s = float(interaction.config.get("timeout_s") or timeout_s)
        self._must_finalize = False
        self._finalizing: asyncio.Task[InteractionError | None] | None = None

    async def start(self) -> str:
        """Start the interaction, once.

        Returns:
            What the user says first; an empty string where that is nothing.

        Raises:
            InteractionError: whatever went wrong.
        """
        self._must_finalize = True
        method, own_id = self.interaction.start_interaction, self._instance_id

        def read(value: Any) -> _Started:
            return _Started.of(value, own_id=own_id, interaction=self.interaction.name)

        started = await self._guarded(read, method, own_id, **self._kwargs)
        self._instance_id = started.instance_id
        return started.opening

    async def respond(self, messages: Sequence[Message]) -> InteractionResult:
        """Ask for the reply to the conversation's last answer. Cancelling cancels the interaction.

        Raises:
            InteractionError: where it raises, hangs, or returns what is no reply.
        """
        plain = [message.to_template() for message in messages]
        method = self.interaction.generate_response
        read = partial(InteractionResult.of, interaction=self.interaction.name)
        async with self._waiting_room():
            return await self._guarded(read, method, self._instance_id, plain, **self._kwargs)

    async def finalize(self) -> InteractionError | None:
        """Finalise what was started, or whose start was begun.

        Cancelling the caller does not stop it: it ends in the background, within its time-out. A
        second call waits for the first.

        Returns:
            What went wrong, for the record; None where nothing did.
        """
        if self._finalizing is None:
            self._finalizing = asyncio.create_task(self._finalize(), name="finalize interaction")
        return await asyncio.shield(self._finalizing)

    async def _finalize(self) -> InteractionError | None:
        try:
            if self._must_finalize:
                method = self.interaction.finalize_interaction
                await self._guarded(_forget, method, self._instance_id)
        except InteractionError as error:
            logger.info("%s", error)
            return error
        return None

    def _waiting_room(self) -> AbstractAsyncContextManager[Any]:
        try:
            return self.interaction.waiting_room()
        except Exception as error:
            raise self._failure("waiting_room", error) from error

    async def _guarded(
        self, read: Callable[[Any], T], method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> T:
        """Call a method, and read what it gave back, both inside the boundary."""

        async def work() -> T:
            positional, named = _fitted(method, args, kwargs, self._offered)
            return read(await call_method(method, *positional, **named))

        try:
            return await call_bounded(
                work,
                timeout_s=self._timeout_s,
                name=f"interaction:{self.interaction.name}",
            )
        except Exception as error:
            raise self._failure(method.__name__, error) from error

    def _failure(self, method: str, error: Exception) -> InteractionError:
        name = self.interaction.name
        why = f"interaction {name!r}, {method}: {describe_error(error)}"
        return InteractionError(why, interaction=name, method=method)


class _Started(NamedTuple):
    """What `start_interaction` gave back."""

    instance_id: Any
    opening: str

    @classmethod
    def of(cls, value: Any, *, own_id: Any, interaction: str) -> "_Started":
        """Read an id, or an id and what is said first; no id leaves the request's own."""
        if not isinstance(value, tuple):
            return cls(value or own_id, "")
        fields = cast("tuple[Any, ...]", value)
        if len(fields) != 2 or not isinstance(fields[1], str | None):
            raise TypeError(
                f"interaction {interaction!r} returned {value!r:.80}; expected an id, or an id "
                "and a text"
            )
        return cls(fields[0] or own_id, fields[1] or "")


def _forget(_: Any) -> None:
    """Take what `finalize_interaction` returned for nothing."""


def _fitted(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offered: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fit arguments to methods of users.

    Some write `finalize_interaction(self)`, and few take the `name` that selected them.
    """
    parameters = inspect.signature(method).parameters
    if not parameters:
        return (), {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    asked = {name: value for name, value in offered.items() if name in parameters}
    named = {k: v for k, v in kwargs.items() if takes_any or k != "name" or k in parameters}
    return args, asked | named


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the policy's last message; empty where it said nothing yet."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return Message.model_validate(message).text
    return ""
