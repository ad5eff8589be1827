"""Write the tables of docs/roles.md: `python docs/make_roles.py`."""

from pathlib import Path

from make_memory import MODELS, gb, run_config
from transformers import AutoModelForSequenceClassification

from agentrl.config.tables import EstimatorFacts, method_facts
from agentrl.doctor.memory import FLOAT32, Machine, ModelSize, reward_model_parts
from agentrl.trainer.credit import estimator_requires
from agentrl.trainer.sampling import REWARD_BASELINES

PAGE = Path(__file__).resolve().parent / "roles.md"
DEVICES = (1, 8)
MARK = "<!-- {}: written by docs/make_roles.py -->"


def required_roles(name: str, facts: EstimatorFacts) -> str:
    """Name what an estimator needs besides the policy and the engine."""
    algorithm = run_config().algorithm.model_copy(update={"adv_estimator": name})
    needs = {
        "a critic": facts.needs_critic,
        "a greedy rollout of each prompt by the engine": estimator_requires(
            algorithm, REWARD_BASELINES
        ),
        "`sum_pi_squared` of the policy": facts.needs_squares,
        "groups (`rollout.n` of 2 or more)": facts.compares_groups,
    }
    return ", ".join(need for need, is_needed in needs.items() if is_needed) or "nothing"


def estimators() -> str:
    """Return the table of estimators, those with equal needs in one row."""
    rows: dict[str, list[str]] = {}
    for name, facts in method_facts().estimators.items():
        rows.setdefault(required_roles(name, facts), []).append(f"`{name}`")
    lines = ["| estimators | need, besides policy and engine |", "| --- | --- |"]
    lines += [f"| {', '.join(names)} | {needs} |" for needs, names in sorted(rows.items())]
    return "\n".join(lines)


def memory() -> str:
    """Return the table of bytes."""
    titles = "| model | devices | policy | reference | reward model | a batch of it |"
    lines = [titles, "| --- | --- | --- | --- | --- | --- |"]
    reward = run_config().reward.model_validate({"model": {"path": "model"}})
    config = run_config().model_copy(update={"reward": reward})
    for name, model in MODELS.items():
        size = ModelSize.of(model)
        scorer = ModelSize.of(model, kind=AutoModelForSequenceClassification)
        for count in DEVICES:
            machine = Machine(num_devices=count, device_bytes=80 * 10**9, host_bytes=10**12)
            kept, batch, _ = reward_model_parts(scorer, config, machine)
            cells = [
                4 * FLOAT32 * size.num_weights // count,
                FLOAT32 * size.num_weights // count,
                kept.num_bytes,
                batch.num_bytes,
            ]
            lines.append(f"| {name} | {count} | {' | '.join(map(gb, cells))} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with new tables."""
    for name, table in (("estimators", estimators()), ("memory", memory())):
        mark = MARK.format(name)
        before, _, rest = text.partition(f"{mark}\n\n")
        _, _, after = rest.partition("\n\n")
        text = f"{before}{mark}\n\n{table}\n\n{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
