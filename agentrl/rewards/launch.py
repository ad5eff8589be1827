"""Roll out and score: each request as soon as it has ended, or all behind the last one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from agentrl.rewards.manager import LaunchingManager, RewardManager
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest


def _untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


async def drive_and_score(
    manager: RolloutManager,
    rewards: RewardManager,
    requests: Sequence[AsyncRolloutRequest],
    *,
    on_finished: Callable[[AsyncRolloutRequest], None],
    timer: Callable[[str], AbstractContextManager[None]] = _untimed,
) -> list[AsyncRolloutRequest]:
    """Drive requests to their ends and score them; the result has their order.

    What a failure of either costs, `RolloutManager.drive` and `RewardManager.score` say. Cancelling
    ends the requests and cancels the scores under way.

    Args:
        manager: Rolls out.
        rewards: Scores; a `LaunchingManager` what has ended, while others still roll out: a slow
            scorer then costs what it is slower than the rest of the rollout.
        requests: Pending requests.
        on_finished: Told of each request when it has ended, before it is scored.
        timer: Entered as `gen` for the rollout, and as `reward` for what is waited for behind it.

    Raises:
        Exception: see `RolloutManager.drive`.
    """
    if not isinstance(rewards, LaunchingManager):
        with timer("gen"):
            finished = await manager.drive(requests, on_finished=on_finished)
        with timer("reward"):
            await rewards.score(finished)
        return finished

    async with rewards.scoring(requests) as scores:

        def tell(request: AsyncRolloutRequest) -> None:
            on_finished(request)
            scores.begin(request)

        with timer("gen"):
            finished = await manager.drive(requests, on_finished=tell)
        with timer("reward"):
            await scores.done()
    return finished
