"""One update of weights: all of them reach a running SGLang, or it takes no calls.

One call sends the weights to any number of SGLangs at once, in one pass over the weights, because
gathering a sharded weight is a collective:

    report = await update_weights(
        [Target(server, tp_size=2), ...], named_tensors,
        version=7, transport=transport, on_failure=mark_unavailable,
    )

    1. Generation is paused. Running calls are retracted: they keep their tokens and continue later.
       The weights get the version "unfit", so that no other process uses a mixture.
    2. The transport sends the weights in buckets, each after all targets have taken the one before.
       Each target drops its cached prefixes. (A separate request would also collect garbage.)
    3. The version is set and generation continues.

A target that fails is excluded; the others continue without it. It may hold a mixture of old and
new weights: `on_failure` is awaited for it. It must end the target's running calls and send it no
new ones until a later update has succeeded on it. Then generation continues there, so that nothing
inside it waits forever. If no target is left, if the iterator of weights raises, or if the call is
cancelled, this happens to every target, and the error is raised. Nothing is retried here: the
caller tries again with a new iterator.

The transports are made once and closed at the end:

    TensorTransport       in memory, to processes of this machine: `to_children`, `to_servers`
    DistributedTransport  broadcast in a process group of this rank and all targets
    DiskTransport         safetensors in a folder that all can read
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.engines.protocol import SyncFigures
from agentrl.engines.sglang.backend import Backend, JsonFields
from agentrl.engines.sglang.weights.buckets import NamedTensor
from agentrl.errors import EngineError
from agentrl.plugins.cancellation import wait_despite_cancellation

DEFAULT_BUCKET_BYTES = 512 * 1024**2
UNFIT_VERSION = "-1"
"""The version of weights while an update runs. Another process that queries the target learns from
it that the weights may be a mixture."""
RELEASE_TIMEOUT_S = 20.0
"""Seconds that a failed target has for each request that lets its generation continue."""


@dataclass(frozen=True, slots=True)
class Target:
    """One SGLang that takes the weights."""

    backend: Backend
    tp_size: int = 1
    """Its tensor-parallel ranks."""


FailureHook = Callable[[Target, EngineError], Awaitable[None]]
"""Ends a target's running calls, and sends it no new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The result of an update that at least one target has taken."""

    figures: SyncFigures
    failures: Mapping[Target, EngineError] = field(default_factory=dict[Target, EngineError])
    """The other targets, with their errors."""


class UpdateParticipants:
    """The targets that still take part in an update."""

    def __init__(self, targets: Sequence[Target], on_failure: FailureHook) -> None:
        self.targets = list(targets)
        self.failures: dict[Target, EngineError] = {}
        self._on_failure = on_failure

    async def request(
        self, request: str, fields: Callable[[Target], JsonFields] | JsonFields | None = None
    ) -> None:
        """Send a request to all of them at once, and exclude those that fail.

        A cancellation waits for the answers: a target may still read the memory it was given.

        Args:
            request: As in `Backend.control`.
            fields: The same for all, or a function of the target.

        Raises:
            EngineError: No target is left.
        """
        answers = [
            asyncio.ensure_future(
                target.backend.control(request, fields(target) if callable(fields) else fields)
            )
            for target in self.targets
        ]
        await wait_despite_cancellation(answers)
        errors = [answer.exception() for answer in answers]
        for target, error in zip(list(self.targets), errors, strict=True):
            if isinstance(error, EngineError):
                await self.exclude(target, error)
            elif error is not None:
                raise error

    async def exclude(self, target: Target, error: EngineError) -> None:
        """Exclude a target from the rest of the update.

        Raises:
            EngineError: The given one, if no target is left.
        """
        self.targets.remove(target)
        self.failures[target] = error
        await self._release(target, error)
        if not self.targets:
            raise error

    async def exclude_all(self, reason: BaseException) -> None:
        """End the update for every target, because it failed as a whole."""
        message = str(reason) or type(reason).__name__
        for target in self.targets:
            error = EngineError(f"the update of its weights was stopped: {message}")
            self.failures[target] = error
            await self._release(target, error)
        self.targets.clear()

    async def _release(self, target: Target, error: EngineError) -> None:
        await self._on_failure(target, error)
        for request, fields in _RELEASE_REQUESTS:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await target.backend.control(request, fields)


class Transport(Protocol):
    """Sends weights to SGLang."""

    async def send(
        self, participants: UpdateParticipants, named_tensors: Iterable[NamedTensor]
    ) -> SyncFigures:
        """Send the weights to all participants, which drop their cached prefixes.

        Args:
            participants: Paused; targets that fail are excluded.
            named_tensors: Whole weights under the names of the model's files.

        Raises:
            EngineError: No target is left, or the transport itself fails.
        """
        ...

    async def close(self) -> None:
        """Release what is kept between two updates. Can be repeated."""
        ...


async def update_weights(
    targets: Sequence[Target],
    named_tensors: Iterable[NamedTensor],
    *,
    version: int,
    transport: Transport,
    on_failure: FailureHook,
) -> SyncReport:
    """Send new weights to all targets (see the module).

    Args:
        targets: At least one.
        named_tensors: Whole weights under the names of the model's files; read once.
        version: Of the new weights; each sampled token reports it.
        transport: Sends the weights.
        on_failure: Stops the calls of a target that may hold a mixture of weights.

    Raises:
        EngineError: No target has taken all weights.
    """
    participants = UpdateParticipants(targets, on_failure)
    try:
        await participants.request("pause_generation", {"mode": "retract"})
        await participants.request("update_weight_version", _version_fields(UNFIT_VERSION))
        figures = await transport.send(participants, named_tensors)
        await participants.request("update_weight_version", _version_fields(f"{version}"))
        await participants.request("continue_generation")
    except BaseException as error:
        await wait_despite_cancellation([asyncio.ensure_future(participants.exclude_all(error))])
        raise
    return SyncReport(figures=figures, failures=participants.failures)


def _version_fields(version: str) -> dict[str, Any]:
    return {"new_version": version, "abort_all_requests": False}


_RELEASE_REQUESTS: Sequence[tuple[str, JsonFields]] = (
    ("update_weight_version", _version_fields(UNFIT_VERSION)),
    ("end_weight_update", {}),
    ("abort_request", {"rid": "", "abort_all": True}),
    ("continue_generation", {}),
)
"""These requests bring a SGLang after a failed update into a state in which a new one can begin."""
