"""Correction for the difference between the engine and the trainer: weights and rejection."""

from agentrl.algorithms.correction.methods import reject_rollout, weigh_rollout
from agentrl.algorithms.correction.metrics import compute_offpolicy_metrics
from agentrl.algorithms.correction.rollout import (
    RolloutCorrection,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

__all__ = [
    "RolloutCorrection",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "reject_rollout",
    "weigh_rollout",
]
