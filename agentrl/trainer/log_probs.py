"""Log-probabilities of a batch before its update: the policy's, and the reference's."""

from torch import Tensor

from agentrl.protocol import DataProto
from agentrl.trainer.components import Parts
from agentrl.trainer.credit import tensors_of
from agentrl.trainer.metrics.step import Timer
from agentrl.trainer.sampling import SUM_PI_SQUARED, estimator_names


def add_log_probs(batch: DataProto, parts: Parts, timer: Timer, *, temperature: float) -> None:
    """Add `old_log_probs`, their entropies and, where a KL asks for them, the reference's.

    Where the estimator names `sum_pi_squared`, the same pass adds it. Under `bypass_mode` the
    engine's log-probabilities are taken for old ones, and nothing is computed. A collective.
    """
    found: dict[str, Tensor] = {}
    if parts.credit.correction.bypass_mode:
        found["old_log_probs"] = tensors_of(batch)["rollout_log_probs"]
    else:
        with timer("old_log_prob"):
            scores = parts.actor.compute_log_probs(
                batch,
                temperature=temperature,
                with_sum_pi_squared=estimator_names(parts.credit.config, SUM_PI_SQUARED),
            )
        found |= {"old_log_probs": scores.log_probs, "entropies": scores.entropy}
        if scores.sum_pi_squared is not None:
            found[SUM_PI_SQUARED] = scores.sum_pi_squared
    if parts.reference is not None:
        with timer("ref"):
            found["ref_log_prob"] = parts.reference.compute_ref_log_prob(
                batch, temperature=temperature
            )
    batch.union(DataProto.from_dict(found))
