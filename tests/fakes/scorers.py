"""Scorers that other processes can load by this file's path, and requests to score."""

import asyncio
import ctypes
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.config.schema.reward import CustomRewardConfig, RewardConfig
from agentrl.rewards import RewardManager, make_reward_manager
from agentrl.rollout.request import AsyncRolloutRequest
from tests.fakes.raising_values import ExitsWhenRead, RaisingAttributesError, UnprintableError
from tests.fakes.requests import build_request, said


class TwoWordsError(Exception):
    """Cannot be unpickled: it is built from two arguments and remembers one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _raise(error: BaseException) -> None:
    raise error


MISBEHAVIORS = {
    "raises": lambda: _raise(KeyError("x")),
    "raises what no process can tell": lambda: _raise(TwoWordsError("no", "way")),
    "exits": lambda: sys.exit(3),
    "memory": lambda: _raise(MemoryError()),
    "none": lambda: None,
    "nan": lambda: math.nan,
    "exits when read": lambda: ExitsWhenRead(),
    "exits when its score is read": lambda: {"score": ExitsWhenRead()},
    "raises what cannot be told": lambda: _raise(UnprintableError()),
    "raises what has no notes": lambda: _raise(RaisingAttributesError()),
    "returns what no process can tell": lambda: {"score": 1.0, "why": lambda: 1},
    "hangs": lambda: time.sleep(30),
}
"""What a scorer does wrong that any manager survives."""
PROCESS_ENDS = {
    "dies": lambda: os._exit(3),
    "breaks": lambda: ctypes.string_at(0),
}
"""What only one in a process may do."""


def misbehave(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> Any:
    """Do what the ground truth says."""
    deed = {**MISBEHAVIORS, **PROCESS_ENDS}.get(ground_truth)
    return 1.0 if deed is None else deed()


def misbehave_in_lists(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[Any],
) -> list[Any]:
    """Do so for each of a batch."""
    return [misbehave("", "", truth) for truth in ground_truths]


async def misbehave_later(**arguments: Any) -> Any:
    """Do so on the event loop."""
    await asyncio.sleep(0)
    return misbehave(**arguments)


def write_pid_and_hang(*, ground_truth: str, **_: Any) -> float:
    """Write a file with the name of this process into a folder, then hang."""
    Path(ground_truth, str(os.getpid())).touch()
    time.sleep(30)
    return 1.0


def report_process(**_: Any) -> dict[str, Any]:
    """Say where it runs."""
    return {"score": 1.0, "pid": os.getpid(), "has_torch": "torch" in sys.modules}


class Counter:
    """A scorer that is built once, and counts its calls."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.is_closed = False

    def __call__(self, **_: Any) -> float:
        self.count += 1
        return float(self.count)

    async def close(self) -> None:
        self.is_closed = True


def by_path(name: str, manager: str = "naive", **config: Any) -> RewardManager:
    """Make a manager with a scorer of this file."""
    custom = CustomRewardConfig(path=__file__, name=name)
    return make_reward_manager(
        RewardConfig(manager=manager, custom_reward_function=custom, **config)
    )


def answers(*truths: Any, **fields: Any) -> list[AsyncRolloutRequest]:
    """Make answered requests with these ground truths."""
    fields = {"data_source": "agentrl/arithmetic"} | fields
    return [build_request(said(2, text="#### 5"), ground_truth=truth, **fields) for truth in truths]


def score(manager: RewardManager, requests: list[AsyncRolloutRequest]) -> None:
    """Score, and close the manager."""

    async def main() -> None:
        try:
            await manager.score(requests)
        finally:
            await manager.close()

    asyncio.run(main())


def no_number(**_: Any) -> Any:
    return "no number"


async def _one() -> float:
    return 1.0


def runs_a_loop(**_: Any) -> float:
    """Score as code of the main thread does that has something to await."""
    return asyncio.get_event_loop().run_until_complete(_one())
