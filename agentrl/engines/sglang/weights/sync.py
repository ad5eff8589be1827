"""New weights -> running SGLangs, whole or not at all.

One call takes one pass over the weights to any number of SGLangs at once (gathering a sharded
weight is a collective, so there is one pass only):

    report = await update_weights(
        [Target(server, tp_size=2), ...], named_tensors,
        version=7, transport=transport, on_failure=take_out,
    )

    1. generation is paused, running calls are retracted: they keep their tokens, and go on later;
       the weights are called unfit, so that nobody else takes a mixture for what was there before
    2. the transport brings the weights, bucket by bucket, each when all have taken the one before;
       each drops the cached prefixes (asked for alone, SGLang also collects its garbage)
    3. the version is set, generation goes on

A target that fails takes no further part; the others go on without it. It may hold a mixture of old
and new weights: `on_failure` is awaited for it, and must end its running calls and keep new ones
from it until a later update, which it is part of, has gone through. Then its generation is let go
on, so that nothing inside it waits for ever. Where none is left, where the weights themselves fail
(their iterator raises), or where the call is cancelled, this happens to every target, and the error
is raised. Nothing is repeated here: whoever has the weights calls again, with a new iterator.

The transports (`agentrl.engines.sglang.weights`), each made once and closed at the end:

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
"""What weights are called from the beginning of an update until it has gone through whole: whoever
else asks the target, or comes after this process, knows by it that they may be a mixture."""
RELEASE_TIMEOUT_S = 20.0
"""Seconds that a target which failed may take over each request that lets its generation go on."""


@dataclass(frozen=True, slots=True)
class Target:
    """One SGLang that takes the weights."""

    backend: Backend
    tp_size: int = 1
    """Its tensor-parallel ranks."""


FailureHook = Callable[[Target, EngineError], Awaitable[None]]
"""Ends a target's running calls and keeps new ones from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What came of an update that at least one target took whole."""

    figures: SyncFigures
    failures: Mapping[Target, EngineError] = field(default_factory=dict[Target, EngineError])
    """Who did not, and why."""


class Roster:
    """The targets that still take part in an update."""

    def __init__(self, targets: Sequence[Target], on_failure: FailureHook) -> None:
        self.targets = list(targets)
        self.failures: dict[Target, EngineError] = {}
        self._on_failure = on_failure

    async def ask(
        self, request: str, fields: Callable[[Target], JsonFields] | JsonFields | None = None
    ) -> None:
        """Ask all of them at once, and leave out who fails.

        A cancellation waits for the answers: a target may still be reading what it was handed.

        Args:
            request: As in `Backend.control`.
            fields: The same for all, or made for each.

        Raises:
            EngineError: where none is left.
        """
        asked = [
            asyncio.ensure_future(
                target.backend.control(request, fields(target) if callable(fields) else fields)
            )
            for target in self.targets
        ]
        await wait_despite_cancellation(asked)
        errors = [answer.exception() for answer in asked]
        for target, error in zip(list(self.targets), errors, strict=True):
            if isinstance(error, EngineError):
                await self.drop(target, error)
            elif error is not None:
                raise error

    async def drop(self, target: Target, error: EngineError) -> None:
        """Leave a target out from here on.

        Raises:
            EngineError: the same, where it was the last.
        """
        self.targets.remove(target)
        self.failures[target] = error
        await self._let_go(target, error)
        if not self.targets:
            raise error

    async def drop_all(self, reason: BaseException) -> None:
        """End the update for every target: it failed as a whole."""
        told = str(reason) or type(reason).__name__
        for target in self.targets:
            error = EngineError(f"the update of its weights was broken off: {told}")
            self.failures[target] = error
            await self._let_go(target, error)
        self.targets.clear()

    async def _let_go(self, target: Target, error: EngineError) -> None:
        await self._on_failure(target, error)
        for request, fields in _RELEASE:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await target.backend.control(request, fields)


class Transport(Protocol):
    """A way by which weights come to SGLang."""

    async def send(self, roster: Roster, named_tensors: Iterable[NamedTensor]) -> SyncFigures:
        """Bring the weights to everyone on the roster; its cached prefixes go with the old ones.

        Args:
            roster: Paused; who fails is dropped from it.
            named_tensors: Whole weights under the names of the model's files.

        Raises:
            EngineError: where none is left, or the way itself does not work.
        """
        ...

    async def close(self) -> None:
        """Give back what is held between two updates. May be called twice."""
        ...


async def update_weights(
    targets: Sequence[Target],
    named_tensors: Iterable[NamedTensor],
    *,
    version: int,
    transport: Transport,
    on_failure: FailureHook,
) -> SyncReport:
    """Bring new weights to all targets (see the module).

    Args:
        targets: At least one.
        named_tensors: Whole weights under the names of the model's files; read once.
        version: What the weights are from here on, as each sampled token tells it.
        transport: The way that they take.
        on_failure: Takes out a target that may hold a mixture of weights.

    Raises:
        EngineError: where no target has taken the weights whole.
    """
    roster = Roster(targets, on_failure)
    try:
        await roster.ask("pause_generation", {"mode": "retract"})
        await roster.ask("update_weight_version", _version_fields(UNFIT_VERSION))
        figures = await transport.send(roster, named_tensors)
        await roster.ask("update_weight_version", _version_fields(f"{version}"))
        await roster.ask("continue_generation")
    except BaseException as error:
        await wait_despite_cancellation([asyncio.ensure_future(roster.drop_all(error))])
        raise
    return SyncReport(figures=figures, failures=roster.failures)


def _version_fields(version: str) -> dict[str, Any]:
    return {"new_version": version, "abort_all_requests": False}


_RELEASE: Sequence[tuple[str, JsonFields]] = (
    ("update_weight_version", _version_fields(UNFIT_VERSION)),
    ("end_weight_update", {}),
    ("abort_request", {"rid": "", "abort_all": True}),
    ("continue_generation", {}),
)
"""What puts a SGLang whose update failed back into a state from which a new one can begin."""
