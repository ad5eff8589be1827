"""Write agentrl/config/methods.yaml from the registrations: `python docs/make_methods.py`."""

from pathlib import Path
from typing import Any

import yaml

import agentrl.algorithms
from agentrl.algorithms import adv_estimator_names, get_adv_estimator_fn, get_policy_loss_fn
from agentrl.algorithms.advantages.registry import estimator_facts
from agentrl.algorithms.losses.registry import policy_loss_facts, policy_loss_names

FILE = Path(agentrl.__file__).parent / "config/methods.yaml"
REWARDS = {"row": "sum", "turn": "turns"}


def bundled(names: list[str], find: Any) -> list[str]:
    """Return the names of the methods of the package itself; users register others."""
    root = agentrl.algorithms.__name__
    return [name for name in names if find(name).__module__.startswith(root)]


def estimator(name: str) -> dict[str, Any]:
    """Return the facts about an estimator that are not the default."""
    facts = estimator_facts(name)
    reads = sorted(key.removeprefix("algorithm.") for key in facts.reads or ())
    found = {
        "reads": reads,
        "compares_groups": "index" in facts.parameters and not name.endswith("_verl"),
        "rewards": REWARDS.get(facts.reward_unit),
        "needs_critic": "values" in facts.parameters,
        "needs_squares": "sum_pi_squared" in facts.parameters,
    }
    return {key: value for key, value in found.items() if value}


def loss(name: str) -> dict[str, Any]:
    """Return the facts about a policy loss that are not the default."""
    facts = policy_loss_facts(name)
    reads = sorted(key.removeprefix("actor.") for key in facts.reads or ())
    found = {"reads": reads, "aggregation": facts.loss_agg_mode}
    return {key: value for key, value in found.items() if value}


def methods() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the facts about all bundled methods."""
    estimators = bundled(adv_estimator_names(), get_adv_estimator_fn)
    losses = bundled(policy_loss_names(), get_policy_loss_fn)
    return {
        "estimators": {name: estimator(name) for name in estimators},
        "losses": {name: loss(name) for name in losses},
    }


def main() -> None:
    """Write the file below its comment."""
    comment = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    lines = [*comment]
    for section, facts in methods().items():
        lines.append(f"{section}:")
        for name, fact in facts.items():
            written = yaml.safe_dump(fact, default_flow_style=True, sort_keys=False, width=1000)
            lines.append(f"  {name}: {written.strip()}")
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
