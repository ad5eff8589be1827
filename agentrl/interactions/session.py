"""The interaction of one request, from its first turn to its end (plug-in life cycle)."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from agentrl.errors import InteractionError
from agentrl.interactions.base import BaseInteraction, InteractionResult
from agentrl.messages import Message
from agentrl.plugins.call import accepted_keywords, call_bounded, call_method, describe_error

T = TypeVar("T")

logger = logging.getLogger(__name__)


class InteractionSession:
    """Start, ask and finalize the interaction of one request.

    Call `start` once, `respond` for each answer, and `finalize` in a `finally`, however the request
    ended.

    Args:
        interaction: The run's interaction.
        instance_id: The request's id, with which it is started.
        kwargs: The row's `interaction_kwargs`. Each method gets those that it takes.
        offered: Other values of the row (`ground_truth`, `uid`), for methods that have a parameter
            of that name, if `kwargs` have none.
        timeout_s: Seconds of one call, if the interaction's config has no `timeout_s`.

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
        # Copies: the samples of a group share the row.
        self._kwargs = copy.deepcopy(dict(kwargs or {}))
        given = {name: value for name, value in (offered or {}).items() if value is not None}
        self._offered = copy.deepcopy(given)
        self._timeout_s = float(interaction.config.get("timeout_s") or timeout_s)
        self._must_finalize = False
        self._finalizing: asyncio.Task[InteractionError | None] | None = None

    async def start(self) -> str:
        """Start the interaction, once.

        Returns:
            The user's first message; empty if there is none.

        Raises:
            InteractionError: for every error.
        """
        self._must_finalize = True
        method, own_id = self.interaction.start_interaction, self._instance_id
        started = await self._run(self._read_started, method, own_id, **self._kwargs)
        self._instance_id, opening = started
        return opening

    async def respond(self, messages: Sequence[Message]) -> InteractionResult:
        """Return the reply to the last answer. Cancelling cancels the interaction.

        Raises:
            InteractionError: if it raises, times out, or returns no valid reply.
        """
        plain = [message.to_template() for message in messages]
        method = self.interaction.generate_response
        read = partial(InteractionResult.of, interaction=self.interaction.name)
        try:
            waiting_room = self.interaction.waiting_room()
        except Exception as error:
            raise self._failure("waiting_room", error) from error
        async with waiting_room:
            return await self._run(read, method, self._instance_id, plain, **self._kwargs)

    async def finalize(self) -> InteractionError | None:
        """Finalize the interaction, if its start was begun.

        Cancelling the caller does not stop it: it ends in the background, within its time-out. A
        second call waits for the first.

        Returns:
            The error, for the record; None if there was none.
        """
        if self._finalizing is None:
            self._finalizing = asyncio.create_task(self._finalize(), name="finalize interaction")
        return await asyncio.shield(self._finalizing)

    async def _finalize(self) -> InteractionError | None:
        try:
            if self._must_finalize:
                method = self.interaction.finalize_interaction
                await self._run(lambda _: None, method, self._instance_id)
        except InteractionError as error:
            logger.info("%s", error)
            return error
        return None

    async def _run(
        self, read: Callable[[Any], T], method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> T:
        """Call a method and read its result, both inside the boundary."""

        async def work() -> T:
            positional, named = _fit(method, args, kwargs, self._offered)
            return read(await call_method(method, *positional, **named))

        name = f"interaction:{self.interaction.name}"
        try:
            return await call_bounded(work, timeout_s=self._timeout_s, name=name)
        except Exception as error:
            raise self._failure(method.__name__, error) from error

    def _read_started(self, value: Any) -> tuple[Any, str]:
        """Read an id, or an id and a first message; an empty id keeps the request's own."""
        if not isinstance(value, tuple):
            return value or self._instance_id, ""
        fields = cast("tuple[Any, ...]", value)
        if len(fields) != 2 or not isinstance(fields[1], str | None):
            raise TypeError(
                f"interaction {self.interaction.name!r} returned {value!r:.80}; expected an id, or "
                "an id and a text"
            )
        return fields[0] or self._instance_id, fields[1] or ""

    def _failure(self, method: str, error: Exception) -> InteractionError:
        name = self.interaction.name
        message = f"interaction {name!r}, {method}: {describe_error(error)}"
        return InteractionError(message, interaction=name, method=method)


def _fit(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offered: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Select the arguments that a method of users takes; some write `finalize_interaction(self)`.

    The row's entries are for all methods of the interaction, so each gets what it takes.
    """
    parameters = inspect.signature(method).parameters
    if not parameters:
        return (), {}
    wanted = {name: value for name, value in offered.items() if name in parameters}
    return args, wanted | accepted_keywords(method, kwargs)


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the policy's last message; empty if there is none yet."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return Message.model_validate(message).text
    return ""
