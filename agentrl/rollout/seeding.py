"""Seeds and random decisions of a request: functions of its seed, so a run can be repeated."""

from hashlib import blake2b

from agentrl.rollout.request import AsyncRolloutRequest

SEED_BITS = 63
"""Number of bits in a seed."""


def draw_seed(name: str) -> int:
    """Hash a name to a seed. The seeds of different names are independent.

    A hash is ten times faster than a generator of `random` that is seeded with a string.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> (64 - SEED_BITS)


def turn_seed(request: AsyncRolloutRequest) -> int:
    """Return the seed of the next completion: a function of request seed, attempt and turn.

    So the samples depend neither on the other requests in the engine nor on its earlier calls. A
    resumed run continues exactly as a run that was not stopped (resume is exact). Turns that were
    set aside count.
    """
    return draw_seed(f"{request.seed}:{request.attempt}:{len(request.trajectory_turns)}")


def should_interact(request: AsyncRolloutRequest, probability: float) -> bool:
    """Draw whether the interaction replies to the last answer (`interaction_prob`)."""
    return _draw_bool(f"{request.seed}:{request.num_assistant_turns}", probability)


def should_check(request: AsyncRolloutRequest, share: float) -> bool:
    """Draw whether a finished request is checked (`tokenization_sanity_check_frac`)."""
    return _draw_bool(f"{request.seed}:check", share)


def _draw_bool(name: str, probability: float) -> bool:
    return draw_seed(name) < probability * 2**SEED_BITS
