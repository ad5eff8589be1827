"""Soft punishment of answers that come near the limit of their length."""

from agentrl.config.schema.run import OverlongBufferConfig
from agentrl.rollout.request import AsyncRolloutRequest


def compute_overlong_reward(
    num_tokens: int, max_response_length: int, config: OverlongBufferConfig
) -> float:
    """Compute what an answer of this length is given beside its score.

    0 up to `max_response_length - len` tokens, from there down on a straight line, and
    `-penalty_factor` from `max_response_length` on.

    Source: Yu et al. 2025 (arXiv 2503.14476), section 3.4, equation 13.

    Args:
        num_tokens: Sampled tokens of the answer.
        max_response_length: Of the data section.
        config: `len`, the buffer's tokens, and `penalty_factor`.

    Example:
        >>> buffer = OverlongBufferConfig(enable=True, len=40, penalty_factor=2.0)
        >>> [compute_overlong_reward(n, 100, buffer) for n in (60, 70, 100)]
        [0.0, -0.5, -2.0]
    """
    over = num_tokens - (max_response_length - config.len)
    share = min(max(over, 0) / config.len, 1.0)
    return -share * config.penalty_factor if share else 0.0


def count_sampled_tokens(request: AsyncRolloutRequest) -> int:
    """Count the tokens of a request that the policy sampled, those of excluded turns among them.

    What it was shown does not count: a tool's long result is not the policy's doing, and no
    observed token may change a return (observations are invisible).
    """
    return sum(turn.num_tokens for turn in request.turns if turn.role == "assistant")
