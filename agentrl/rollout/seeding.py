"""What is drawn for a request: functions of its seed, so that the same run draws the same."""

from hashlib import blake2b

from agentrl.rollout.request import AsyncRolloutRequest

SEED_BITS = 63
"""Of a seed."""


def draw_seed(name: str) -> int:
    """Draw a seed for what is called so: any two names give seeds that know nothing of each other.

    A hash: to make a generator of `random` out of a string costs ten times as much.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> (64 - SEED_BITS)


def turn_seed(request: AsyncRolloutRequest) -> int:
    """Seed the next completion: a function of the request's seed, the attempt and the turn.

    So what is sampled depends neither on which requests share the engine, nor on what it sampled
    before: a resumed run goes on as the run that was never stopped.
    """
    return draw_seed(f"{request.seed}:{request.attempt}:{len(request.turns)}")


def should_interact(request: AsyncRolloutRequest, probability: float) -> bool:
    """Whether the interaction hears the last answer (`interaction_prob`)."""
    return _falls(f"{request.seed}:{request.num_assistant_turns}", probability)


def should_check(request: AsyncRolloutRequest, share: float) -> bool:
    """Whether a finished request is checked (`tokenization_sanity_check_frac`)."""
    return _falls(f"{request.seed}:check", share)


def _falls(name: str, probability: float) -> bool:
    return draw_seed(name) < probability * 2**SEED_BITS
