"""How values of the rollout's correction are read: 0.6.1's names, and those of later versions."""

from typing import Any

from agentrl.config.verl.keys import Reading, Tree, Unused
from agentrl.errors import ConfigError

CORRECTION = "algorithm.rollout_correction"
_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""0.6.1's tests of rejection, and the names that later versions and agentrl have for them."""
_KEPT = (
    "advantages are those of all samples; those of what is left, as there, by "
    f"{CORRECTION}.advantages=kept"
)


def importance_sampling(value: Any, tree: Tree) -> Reading:
    """Take what a weight is of."""
    if value is None:
        return Reading()
    return Reading({f"{CORRECTION}.rollout_is": value}, _unless_recorded(tree))


def rejection(value: Any, tree: Tree) -> Reading:
    """Take the tests that tokens must pass, with their thresholds; a veto is one of them.

    0.6.1's bounds are of the trainer's probability over the engine's; ours, as those of later
    versions, of the engine's over the trainer's.
    """
    names, thresholds = list[str](), list[Any]()
    if value is not None:
        names.append(_LEVELS.get(str(value), str(value)))
        thresholds.append(_bounds(value, tree))
    if (veto := tree.value(f"{CORRECTION}.rollout_token_veto_threshold")) is not None:
        names.append("seq_max_k1")
        thresholds.append(1 / _positive(veto))
    if not names:
        return Reading()
    joined = thresholds[0] if len(thresholds) == 1 else ",".join(map(str, thresholds))
    found = {"rollout_rs": ",".join(names), "rollout_rs_threshold": joined}
    note = "; ".join(filter(None, (_KEPT, _unless_recorded(tree))))
    return Reading({f"{CORRECTION}.{name}": part for name, part in found.items()}, note)


def veto(value: Any, tree: Tree) -> Reading:
    """Read the least ratio of one token, below which its sequence is rejected."""
    return Reading(part_of=f"{CORRECTION}.rollout_rs")


def policy_gradient(value: Any, tree: Tree) -> Reading | Unused:
    """Take the loss without a clip, which is read under `bypass_mode` alone."""
    if not tree.value(f"{CORRECTION}.bypass_mode"):
        return Unused("rollout_correction.bypass_mode is false")
    if tree.is_given(f"{CORRECTION}.loss_type"):
        return Reading(part_of=f"{CORRECTION}.loss_type")
    return Reading({f"{CORRECTION}.loss_type": "reinforce" if value else "ppo_clip"})


def _bounds(test: Any, tree: Tree) -> Any:
    upper = tree.value(f"{CORRECTION}.rollout_rs_threshold")
    lower = tree.value(f"{CORRECTION}.rollout_rs_threshold_lower")
    if upper is None:
        raise ConfigError("has no threshold", expected=f"{CORRECTION}.rollout_rs_threshold")
    if lower is None:
        return upper
    if test not in _LEVELS:
        raise ConfigError(
            f"{test} has a lower threshold of its own",
            expected=f"lower_upper in rollout_rs_threshold, or one of {', '.join(_LEVELS)}",
        )
    return f"{1 / _positive(upper)!r}_{1 / _positive(lower)!r}"


def _positive(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if number <= 0:
        raise ConfigError(f"{value!r} is no threshold", expected="a number above 0")
    return number


def _unless_recorded(tree: Tree) -> str:
    if tree.value("actor_rollout_ref.rollout.calculate_log_probs"):
        return ""
    return "verl corrects nothing unless rollout.calculate_log_probs is true"
