"""The status of each rank, in the store that all ranks share, for errors in collectives.

The error of a failed collective names no rank ("connection closed by peer"). So each rank writes
its stage to the store when it starts it, and its error when it ends. The rank that waits reads
these to report which rank is missing, what it did and why it ended.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from agentrl.errors import RankError
from agentrl.progress import NO_PROGRESS, Advance, Progress

MAX_REPORTED_RANKS = 8
"""An error describes at most this many ranks, and counts the others."""
_STORE_TIMEOUT = timedelta(seconds=10)
"""Limit of an answer of the store: the rank that holds it may have ended."""
_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank wrote to the store."""

    rank: int
    stage: str = ""
    """Its last stage; empty if it wrote none, or the store is gone."""
    since: float = 0.0
    """When the stage started, in seconds of the rank's own clock."""
    end: str = ""
    """The error that ended the rank; empty if it wrote none."""

    def __str__(self) -> str:
        if self.end:
            return f"rank {self.rank} ended with {self.end}"
        if not self.stage:
            return f"rank {self.rank} reported nothing"
        ago = max(0.0, time.time() - self.since)
        return f"rank {self.rank} started {self.stage} {ago:.0f} s ago and reported nothing since"


@dataclass(slots=True)
class RankStatus:
    """This rank's access to the status of all ranks.

    Example:
        >>> status = RankStatus(None, rank=0, size=1, timeout_s=60.0)
        >>> status.enter("gen of step 3")
        >>> status.stage
        'gen of step 3'
    """

    store: Any
    """The ranks' `torch.distributed.Store`; None: nothing is written or read."""
    rank: int
    size: int
    timeout_s: float
    """Seconds that one collective may take."""
    stage: str = "the start"
    """What this rank does."""
    shared_error: Exception | None = None
    """The last error that all ranks raised together, each with its own text."""
    progress: Progress = NO_PROGRESS
    """Displays what this rank does; only the main rank has a display."""

    def enter(self, stage: str) -> None:
        """Record what this rank does from now on."""
        self.stage = stage
        self._write(RankReport(self.rank, stage, time.time()))

    def count(self, total: int) -> AbstractContextManager[Advance]:
        """Display how much of the current stage is done, during a `with` block."""
        return self.progress.bar(self.stage, total)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Record an error of the block, and explain one of a collective by other ranks' status.

        Raises:
            RankError: for a collective that timed out or lost a rank.
        """
        try:
            yield
        except BaseException as error:
            if self.size > 1 and is_failed_collective(error):
                explained = self._explain(error)
                self._record_end(explained)
                raise explained from error
            self._record_end(error)
            raise

    def _record_end(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        end = " ".join(text.split())[:_MAX_ERROR_CHARS]
        self._write(RankReport(self.rank, self.stage, time.time(), end))

    def _explain(self, error: BaseException) -> RankError:
        is_late = "imed out" in str(error)
        waited = f"waited longer than {self.timeout_s:g} s for the other ranks"
        return RankError(
            f"rank {self.rank} {waited if is_late else 'lost the other ranks'} in {self.stage}",
            others="; ".join(self._describe_others()) or None,
            key="trainer.collective_timeout_s" if is_late else None,
            expected="longer than the ranks' work can differ" if is_late else None,
        )

    def _describe_others(self) -> list[str]:
        if self.store is None:
            return []
        reports = [self._read(rank) for rank in range(self.size) if rank != self.rank]
        # A rank that waits in the same stage did not cause the error.
        reports = [one for one in reports if one.end or one.stage != self.stage] or reports
        more = len(reports) - MAX_REPORTED_RANKS
        described = [str(one) for one in reports[:MAX_REPORTED_RANKS]]
        return described + ([f"and {more} more"] if more > 0 else [])

    def _write(self, report: RankReport) -> None:
        # The report is optional: if the store is gone, the collective itself fails.
        with suppress(RuntimeError):
            if self.store is not None:
                fields = {"stage": report.stage, "since": report.since, "end": report.end}
                self.store.set(str(self.rank), json.dumps(fields))

    def _read(self, rank: int) -> RankReport:
        with suppress(RuntimeError, ValueError):
            if self.store.check([str(rank)]):
                return RankReport(rank, **json.loads(self.store.get(str(rank))))
        return RankReport(rank)


def open_rank_status(store: Any, *, rank: int, size: int, timeout_s: float) -> RankStatus:
    """Open the status of all ranks; with one rank, or without a store, nothing is written."""
    own = None
    if store is not None and size > 1:
        # A connection of its own, because its timeout differs from that of the collectives.
        own = PrefixStore("agentrl", store.clone())
        own.set_timeout(_STORE_TIMEOUT)
    return RankStatus(own, rank=rank, size=size, timeout_s=timeout_s)


def is_failed_collective(error: BaseException) -> bool:
    """Return whether an error is that of a collective, or of the ranks' store.

    gloo raises a plain `RuntimeError`, which only its text identifies.
    """
    if isinstance(error, DistError):
        return True
    return type(error) is RuntimeError and "gloo/transport" in str(error)
