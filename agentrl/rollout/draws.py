"""What is drawn for a request: functions of its seed, so that the same run draws the same."""

import random
from hashlib import blake2b

from agentrl.rollout.request import AsyncRolloutRequest


def turn_seed(request: AsyncRolloutRequest) -> int:
    """Seed the next completion: a function of the request's seed, the attempt and the turn.

    So what is sampled depends neither on which requests share the engine, nor on what it sampled
    before: a resumed run goes on as the run that was never stopped.
    """
    name = f"{request.seed}:{request.attempt}:{len(request.turns)}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1


def draws_interaction(request: AsyncRolloutRequest, probability: float) -> bool:
    """Whether the interaction hears the last answer (`interaction_prob`)."""
    name = f"{request.seed}:{request.num_assistant_turns}"
    return random.Random(name).random() < probability
