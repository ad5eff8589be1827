"""Where each rank stands, written where the others can read it when one of them does not come.

A collective that breaks says only that it broke: "connection closed by peer". Which rank is
missing, what it was doing and why it left stands on this board: a few short notes in the store by
which the ranks found each other. One is written as a rank comes to the next part of its work.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from agentrl.errors import RankError

START = "the start"
MAX_TOLD = 8
"""Of more ranks than these only a number is told."""
_PATIENCE = timedelta(seconds=10)
"""For an answer of the store, whose holder may be gone."""
_MAX_WORDS = 500


@dataclass(slots=True)
class Board:
    """The notes of all ranks, as one of them sees them.

    Example:
        >>> board = Board(None, rank=0, size=1, timeout_s=60.0)
        >>> board.note("gen of step 3")
        >>> board.place
        'gen of step 3'
    """

    store: Any
    """The ranks' `torch.distributed.Store`; None: nothing can be written, nor read of others."""
    rank: int
    size: int
    timeout_s: float
    """Seconds that one collective may take."""
    place: str = START
    """What this rank does."""
    shared: Exception | None = None
    """The last error that all ranks raised at the same place, each in words of its own."""

    def note(self, place: str) -> None:
        """Say what this rank does from now on."""
        self.place = place
        self._write("place", {"place": place, "since": time.time()})

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Leave a word where the block raises, and tell a broken exchange by what others left.

        Raises:
            RankError: for an exchange that timed out or broke, with who waited where for whom.
        """
        try:
            yield
        except BaseException as error:
            if self.size > 1 and is_broken_exchange(error):
                told = self.explain(error)
                self.leave(told)
                raise told from error
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Say why this rank goes."""
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        self._write("end", {"words": " ".join(words.split())[:_MAX_WORDS]})

    def explain(self, error: BaseException) -> RankError:
        """Say where this rank waited, and what is known of those that it waited for."""
        late = "imed out" in str(error)
        waited = f"waited longer than {self.timeout_s:g} s for the others"
        told = waited if late else "lost the others"
        return RankError(
            f"rank {self.rank} {told} in {self.place}",
            others="; ".join(self._tell_of_others()) or None,
            key="trainer.collective_timeout_s" if late else None,
            expected="longer than the ranks' work can differ" if late else None,
        )

    def _tell_of_others(self) -> list[str]:
        if self.store is None:
            return []
        notes = [self._read(rank) for rank in range(self.size) if rank != self.rank]
        # Who waits where this one does is not to blame.
        blamed = [note for note in notes if note.end or note.place != self.place] or notes
        more = len(blamed) - MAX_TOLD
        told = [str(note) for note in blamed[:MAX_TOLD]]
        return told + ([f"and {more} more"] if more > 0 else [])

    def _write(self, what: str, note: dict[str, Any]) -> None:
        # A note is a courtesy: where the store is gone, the exchange itself will say so.
        with suppress(RuntimeError):
            if self.store is not None:
                self.store.set(_key(self.rank, what), json.dumps(note))

    def _read(self, rank: int) -> "Note":
        place: dict[str, Any] = self._get("place", rank)
        return Note(rank, **place, end=self._get("end", rank).get("words", ""))

    def _get(self, what: str, rank: int) -> dict[str, Any]:
        with suppress(RuntimeError, ValueError):
            if self.store.check([_key(rank, what)]):
                return json.loads(self.store.get(_key(rank, what)))
        return {}


@dataclass(frozen=True, slots=True)
class Note:
    """What another rank left on the board."""

    rank: int
    place: str = ""
    """What it did last; empty where it never said, or the board is gone."""
    since: float = 0.0
    """When it began that, in seconds of its own clock."""
    end: str = ""
    """What it ended with; empty where it did not, or had no time to say so."""

    def __str__(self) -> str:
        if self.end:
            return f"rank {self.rank} ended with {self.end}"
        if not self.place:
            return f"rank {self.rank} left no word"
        ago = max(0.0, time.time() - self.since)
        return f"rank {self.rank} came to {self.place} {ago:.0f} s ago and said no more"


def open_board(store: Any, *, rank: int, size: int, timeout_s: float) -> Board:
    """Make a rank's view of the board; on one rank, and without a store, nothing is written."""
    notes = None
    if store is not None and size > 1:
        # A connection of its own, which has another patience than the collectives.
        notes = PrefixStore("agentrl", store.clone())
        notes.set_timeout(_PATIENCE)
    return Board(notes, rank=rank, size=size, timeout_s=timeout_s)


def is_broken_exchange(error: BaseException) -> bool:
    """Whether an error says that a collective, or the store of the ranks, broke.

    gloo says so by the text of a `RuntimeError` alone.
    """
    if isinstance(error, DistError):
        return True
    return type(error) is RuntimeError and "gloo/transport" in str(error)


def _key(rank: int, what: str) -> str:
    return f"{rank}/{what}"
