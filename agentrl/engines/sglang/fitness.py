"""Whether what a server says of itself allows it calls of a run."""

from collections.abc import Sequence

from agentrl.engines.sglang.member import Member
from agentrl.engines.sglang.server import ServerState

HALF_UPDATED = "an update of its weights has not gone through whole: the next one mends it"


def unfitness(
    state: ServerState,
    member: Member,
    members: Sequence[Member],
    *,
    max_model_len: int,
    run: int | None,
) -> str | None:
    """Say why a server that answers is to get no calls; None: it may.

    Args:
        state: What it said.
        member: The server.
        members: All of the pool, whose weights are to be the same.
        max_model_len: Most tokens of a sequence of the run.
        run: Version of the weights that the run sent last; None: it has sent none.
    """
    if state.max_input_tokens < max_model_len - 1:
        return (
            f"it takes inputs of at most {state.max_input_tokens} tokens, the run needs "
            f"{max_model_len - 1} (its --context-length and --max-total-tokens)"
        )
    if member.broken_weights is not None:
        return member.broken_weights
    if state.is_half_updated:
        return HALF_UPDATED
    if run is None:
        newest = max((m.version for m in members if m.version is not None), default=None)
        if member.version == newest:
            return None
        return f"it has weights of version {state.weight_version}, another has {newest}"
    if (member.synced_birth, f"{run}") != (state.birth, state.weight_version):
        return (
            f"it has weights of its own (version {state.weight_version}), the others those of "
            f"the run (version {run}): the next update mends it"
        )
    return None
