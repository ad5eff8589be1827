"""Environments with text actions, one of which misbehaves where it is told to."""

import threading
import time
from collections import Counter
from typing import Any

OPEN: Counter[str] = Counter()
"""Environments that were made and not closed, by mark."""


class Corridor:
    """Walk right to the exit; knows nothing of gymnasium.

    Args:
        length: Steps to the exit.
        mark: Under which it is counted.
        block_s: What each method takes of its thread.
        fails: The method that raises.
    """

    def __init__(
        self, length: int = 2, mark: str = "", block_s: float = 0.0, fails: str = ""
    ) -> None:
        self.length = length
        self.mark = mark
        self.block_s = block_s
        self.fails = fails
        self.place = 0
        self.thread = threading.get_ident()
        OPEN[mark] += 1
        self._enter("make")

    def _enter(self, method: str) -> None:
        assert threading.get_ident() == self.thread, "an environment stays on its thread"
        time.sleep(self.block_s)
        if self.fails == method:
            if method == "make":
                OPEN[self.mark] -= 1  # there is nothing to close
            raise OSError(f"{method} is broken")

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._enter("reset")
        return f"You stand {self.length} steps before the exit (seed {seed}).", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._enter("step")
        self.place += {"left": -1, "right": 1}[action]
        is_out = self.place >= self.length
        return f"You are at {self.place}.", float(is_out), is_out, self.place < -1, {}

    def close(self) -> None:
        OPEN[self.mark] -= 1
        self._enter("close")


class OldCorridor(Corridor):
    """In the manner of before gymnasium: `reset` without a seed, `step` with four values."""

    def reset(self) -> str:  # type: ignore[override]
        return "Go."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:  # type: ignore[override]
        return super().step(action)[0], 1, self.place >= self.length, {}


class Boxed(Corridor):
    """Wants a vector for an action."""

    def __init__(self, **kwargs: Any) -> None:
        import gymnasium

        super().__init__(**kwargs)
        self.action_space = gymnasium.spaces.Box(0, 1)
