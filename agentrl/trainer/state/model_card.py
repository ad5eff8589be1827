"""The model card of an exported policy: its base, how and on what it was trained, the results.

The card is made from the run's folder: the record of its last start, the metrics, and what the
export wrote next to the model. The license is that of the base model's own card. The card names
files without their folders, and no machine and no date: a run that was resumed has the card of one
that was never stopped.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import RepoCard
from omegaconf import OmegaConf

import agentrl
from agentrl.atomic_io import atomic_file
from agentrl.config.secrets import without_secrets
from agentrl.data.prepare.geometry3k import DATA_SOURCE as GEOMETRY3K
from agentrl.data.prepare.gsm8k import DATA_SOURCE as GSM8K
from agentrl.errors import DataError
from agentrl.trainer.metrics.sinks import METRICS_FILE, REWARD_KEYS, read_metrics
from agentrl.trainer.setup.huggingface import is_hub_name
from agentrl.trainer.state.run_folder import RESOLVED, STARTS, find_last_start
from agentrl.workers.export import ABOUT
from agentrl.workers.lora import ADAPTER_CONFIG

CARD = "README.md"
_MAX_NAMES = 20
"""Tools and data sources that are listed; further ones are counted."""
_MAX_TEXT = 200
"""Most characters of an argument of a scorer that are shown."""
_BONUSES = ("tool_call_bonus", "interaction_bonus", "length_penalty")
_PACKAGES = ("torch", "transformers", "sglang", "peft")

_LOAD = """from transformers import {name}, AutoTokenizer

path = "."  # this folder, or the name of its repository
tokenizer = AutoTokenizer.from_pretrained(path)
model = {name}.from_pretrained(path, dtype="auto")
"""
_LOAD_ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

path = "."  # this folder, or the name of its repository
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoPeftModelForCausalLM.from_pretrained(path, dtype="auto")
"""


class Training(NamedTuple):
    """What the run's folder records of the training of a model."""

    config: Any
    """Every key, as in `RunConfig`. Secrets are redacted, so it may be no valid configuration."""
    start: Mapping[str, Any]
    """`run.json` of the last start."""
    about: Mapping[str, Any]
    """What the export wrote next to the model."""
    rewards: Sequence[tuple[int, float]]
    """Step and mean training reward."""
    validations: Mapping[str, Sequence[tuple[int, float]]]
    """Step and success of each validation, by set."""
    num_validated: Mapping[str, int]
    """Requests of a validation, by set; sets whose metrics have no number are left out."""

    @classmethod
    def read(cls, run: Path, model: Path) -> "Training":
        """Read the records of a run, and of the model that it exported.

        Raises:
            DataError: If the folder has no record of a start.
        """
        start = find_last_start(run)
        if start is None:
            raise DataError(
                "no record of a start of a run",
                file=run / STARTS,
                expected="the folder of a run (trainer.default_local_dir)",
            )
        about = model / ABOUT
        metrics = run / METRICS_FILE
        lines = list(read_metrics(metrics)) if metrics.is_file() else []
        rewards: list[tuple[int, float]] = []
        validations: dict[str, list[tuple[int, float]]] = {}
        num_validated: dict[str, int] = {}
        for step, one in lines:
            rewards += [(step, one[key]) for key in REWARD_KEYS if key in one][:1]
            for name, value in one.items():
                if name.startswith("val/") and name.endswith("/success"):
                    validations.setdefault(name[4:-8], []).append((step, value))
                elif name.startswith("val/") and name.endswith("/num"):
                    num_validated[name[4:-4]] = int(value)
        return cls(
            OmegaConf.create(yaml.safe_load((start / RESOLVED).read_text("utf-8"))),
            json.loads((start / "run.json").read_text("utf-8")),
            json.loads(about.read_text("utf-8")) if about.is_file() else {},
            rewards,
            validations,
            num_validated,
        )


def write_card(run: Path, model: Path) -> None:
    """Write the card of an exported model into its folder; an earlier card is replaced.

    Raises:
        DataError: If the run's folder has no record of a start.
        OSError: If it cannot be written.
    """
    text = make_card(Training.read(run, model), model)
    with atomic_file(model / CARD) as draft:
        draft.write_text(text, encoding="utf-8")


def make_card(training: Training, model: Path) -> str:
    """Return the text of the card, with its metadata as YAML."""
    config, about = training.config, training.about
    is_adapter = (model / ADAPTER_CONFIG).is_file()
    vision = (model / "preprocessor_config.json").is_file()
    base = _base(config)
    data = ModelCardData(
        license=_license(base),
        base_model=base if _is_of_hub(base) else None,
        datasets=_datasets(config) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if vision else "text-generation",
        tags=["agentrl", "reinforcement-learning", config.algorithm.adv_estimator],
    )
    name = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
    what = "The adapter" if is_adapter else "The policy"
    step = about.get("step", "?")
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {_plain(config.trainer.experiment_name)}",
        f"{what} of a training run: {_code(_described(config, base))}, trained by reinforcement "
        f"learning with {_code(config.algorithm.adv_estimator)} for {step} "
        f"{'step' if step == 1 else 'steps'}.",
        "## Load",
        f"```python\n{_LOAD_ADAPTER if is_adapter else _LOAD.format(name=name)}```",
        "Render conversations with the tokenizer's chat template, as in training.",
        "## Training",
        _table("key", "value", _hyper_parameters(config, base)),
        "## Data, rewards and tools",
        "\n".join(f"- {line}" for line in _inputs(config, about)),
        "## Results",
        *_results(training),
        "## Provenance",
        "\n".join(f"- {line}" for line in _provenance(training.start)),
    ]
    return without_secrets("\n\n".join(part.rstrip() for part in parts)) + "\n"


def _base(config: Any) -> str:
    """Return the model from which the run started; before its warm-up, if it has one."""
    sft = config.prepare.sft
    return str(config.model.path if sft is None else sft.model_path)


def _described(config: Any, base: str) -> str:
    """Return the base's name, or how it was made: the name of a made folder says nothing."""
    made = config.prepare.tiny_policy
    is_made = made is not None and Path(made.out_dir).absolute() == Path(base).absolute()
    return "random weights, made by prepare.tiny_policy" if is_made else _name(base)


def _license(base: str) -> str | None:
    """Return the license that the base model's card names; None if there is no card with one."""
    card = try_to_load_from_cache(base, CARD) if _is_of_hub(base) else Path(base) / CARD
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return None
    try:
        named = RepoCard.load(card, ignore_metadata_errors=True).data.to_dict().get("license")
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return named if isinstance(named, str) else None


def _datasets(config: Any) -> list[str]:
    """Return the data sets of the hub from which the run's rows were made."""
    prepare = config.prepare
    made = ((prepare.gsm8k, GSM8K), (prepare.geometry3k, GEOMETRY3K))
    return [name for section, name in made if section is not None]


def _hyper_parameters(config: Any, base: str) -> Iterator[tuple[str, object]]:
    actor, algorithm, rollout = config.actor, config.algorithm, config.rollout
    yield "base model", _described(config, base)
    if config.prepare.sft is not None:
        yield "supervised warm-up", f"{config.prepare.sft.steps} steps"
    yield "algorithm.adv_estimator", algorithm.adv_estimator
    yield "actor.policy_loss.loss_mode", actor.policy_loss.loss_mode
    yield "actor.loss_agg_mode", actor.loss_agg_mode
    yield "actor.optim", f"{actor.optim.name}, lr {actor.optim.lr:g}"
    yield "actor.clip_ratio", actor.clip_ratio
    if actor.use_kl_loss:
        yield "actor.kl_loss_coef", f"{actor.kl_loss_coef:g} ({actor.kl_loss_type})"
    if algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.kl_coef", f"{algorithm.kl_ctrl.kl_coef:g}"
    if config.model.lora_rank:
        yield "model.lora_rank", f"{config.model.lora_rank} (alpha {config.model.lora_alpha})"
    yield "data.train_batch_size", f"{config.data.train_batch_size} prompts"
    yield "actor.ppo_mini_batch_size", actor.ppo_mini_batch_size
    yield "actor.ppo_epochs", actor.ppo_epochs
    yield "rollout.n", f"{rollout.n} samples of each prompt"
    yield "rollout.temperature", rollout.temperature
    yield "rollout.multi_turn.max_assistant_turns", rollout.multi_turn.max_assistant_turns
    yield "data.max_prompt_length", config.data.max_prompt_length
    yield "data.max_response_length", config.data.max_response_length
    yield "trainer.seed", config.trainer.seed


def _inputs(config: Any, about: Mapping[str, Any]) -> Iterator[str]:
    files = [Path(file).name for file in config.data.train_files]
    yield f"data files: {_names(files)}; validation: {_names(config.data.val_files)}"
    if sources := about.get("data_sources"):
        yield f"data sources: {_names(sources)}"
    if names := _datasets(config):
        yield f"made from: {_names(names)}"
    yield f"rewards: {_names(_scorers(config))} (manager {_code(config.reward.manager)})"
    yield f"reward.weights: {_code(_shown(_nonzero(config.reward.weights)))}"
    if more := _nonzero({name: config.reward[name] for name in _BONUSES}):
        yield f"bonuses and penalties: {_code(_shown(more))}"
    if config.reward.model is not None:
        yield f"reward model: {_code(_name(str(config.reward.model.path)))}"
    yield f"tools: {_names(about.get('tools', [])) or 'none'}"


def _scorers(config: Any) -> list[str]:
    reward = config.reward
    own = reward.custom_reward_function
    if own is not None:
        return [f"{_name(str(own.path))}:{own.name}{_arguments(own.reward_kwargs)}"]
    if not reward.functions:
        return ["the bundled scorer of each data source"]
    return [
        f"{one.weight:g} x "
        + (f"{_name(one.path)}:{one.function}" if one.path else one.name)
        + _arguments(one.reward_kwargs)
        for one in reward.functions
    ]


def _arguments(given: Any) -> str:
    return f" with {_shown(given)}" if given else ""


def _nonzero(numbers: Any) -> dict[str, float]:
    return {str(name): number for name, number in numbers.items() if number}


def _shown(values: Any) -> str:
    """Write arguments as JSON without braces; texts with addresses or folders are left out."""
    plain = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
    return json.dumps(_without_addresses(plain))[1:-1].replace('"', "")


def _without_addresses(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_addresses(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_addresses(one) for one in value]
    is_long = isinstance(value, str) and (len(value) > _MAX_TEXT or bool(set("/\\:@") & set(value)))
    return "..." if is_long else value


def _results(training: Training) -> Iterator[str]:
    rows: list[tuple[str, object]] = []
    if training.rewards:
        for step, value in dict.fromkeys((training.rewards[0], training.rewards[-1])):
            rows.append((f"mean training reward, step {step}", f"{value:.3f}"))
    for name, found in training.validations.items():
        best = max(found, key=lambda one: one[1])
        number = training.num_validated.get(name)
        of = f"{name} ({number} requests)" if number else name
        for step, value in dict.fromkeys((found[0], best, found[-1])):
            rows.append((f"success on {of}, step {step}", f"{value:.3f}"))
    yield _table("figure", "value", rows) if rows else "The run logged no metrics to a file."


def _provenance(start: Mapping[str, Any]) -> Iterator[str]:
    git, hardware = start.get("git", {}), start.get("hardware", {})
    yield f"agentrl {agentrl.__version__}, git revision {_code(git.get('agentrl') or 'unknown')}"
    if git.get("directory"):
        yield f"git revision of the working directory: {_code(git['directory'])}"
    packages = start.get("packages", {})
    named = [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    yield f"Python {start.get('python', '?')}, {', '.join(named)}"
    devices = hardware.get("accelerators") or ["CPU"]
    ranks = start.get("num_ranks", 1)
    named = f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
    yield f"{named}; devices: {_names(dict.fromkeys(devices))}"


# Text.


def _is_of_hub(name: str) -> bool:
    return is_hub_name(name) and not (name.startswith("~") or Path(name).exists())


def _name(name: str) -> str:
    """Return the name of a hub model or a module, or of a file without its folders."""
    return name if _is_of_hub(name) and not name.endswith(".py") else Path(name).name


def _plain(value: object) -> str:
    """Write a value so that it cannot be read as Markdown or HTML."""
    text = " ".join(str(value).split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in text)


def _code(value: object) -> str:
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "/")
    return f"`{text}`"


def _names(values: Iterable[object]) -> str:
    names = [_code(value) for value in values]
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _table(left: str, right: str, rows: Iterable[tuple[str, object]]) -> str:
    lines = [f"| {_plain(name)} | {_code(value)} |" for name, value in rows]
    return "\n".join([f"| {left} | {right} |", "| --- | --- |", *lines])
