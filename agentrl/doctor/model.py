"""Check that policy and tokenizer fit, and that the template keeps the invariants."""

from transformers import PreTrainedTokenizerBase

from agentrl.config.checks import check_model_length
from agentrl.config.schema.run import RunConfig
from agentrl.doctor.machine import nearest_folder
from agentrl.doctor.report import Checked
from agentrl.rollout.templates import ChatTemplate, TemplateReport
from agentrl.trainer.components import count_weights, find_doubt, find_endless_turn
from agentrl.trainer.setup.datasets import RunData
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.preflight import check_disk_space, check_model_folders
from agentrl.trainer.setup.rollout_setup import (
    ProbedModel,
    RolloutSetup,
    make_rollout_setup,
    probe_model,
    template_needs,
)
from agentrl.workers.distributed import World
from agentrl.workers.model import PolicyModel, load_hf_config, load_policy
from agentrl.workers.rng import seed_everything
from agentrl.workers.tokenizer import check_tokenizer, find_disagreements, load_tokenizer


def check_tokenizer_files(config: RunConfig) -> Checked[PreTrainedTokenizerBase]:
    """Hold the tokenizer against the model's configuration; no weights are read.

    Raises:
        ConfigError: where they cannot work together.
    """
    check_model_folders(config)
    tokenizer, found = load_tokenizer(config.model), load_hf_config(config.model)
    check_tokenizer(tokenizer, found)
    check_model_length(config, found.max_position_embeddings)
    told = f"{type(tokenizer).__name__}, {len(tokenizer)} tokens; {found.model_type}, "
    told += f"{found.max_position_embeddings} positions"
    return Checked(tokenizer, told, tuple(find_disagreements(tokenizer, found, config.model.path)))


def check_control_tokens(config: RunConfig, plugins: Plugins) -> Checked[ProbedModel]:
    """See that text from outside stays text in the run's own template and tokenizer.

    Raises:
        TemplateError: where there is no template, or none that can be read.
    """
    probed = probe_model(config, plugins)
    forged = tuple(find_forged(probed.template))
    told = f"{len(probed.template.structure.encoder.control)} control tokens stay text; "
    told += f"stops at {' '.join(probed.report.stop_tokens)}"
    return Checked(probed, told, tuple(_text_doubts(probed.report)), forged)


def find_forged(template: ChatTemplate) -> list[str]:
    """Find the control tokens that a text from outside could write."""
    control = template.structure.encoder.control
    written = template.encode_texts([f"a{token}b" for token in control])
    return [
        f"the text {token!r} of a tool or user would become a control token: use another tokenizer"
        for token, ids in zip(control, written, strict=True)
        if not set(control.values()).isdisjoint(ids)
    ]


def check_sampled_tokens(
    config: RunConfig, plugins: Plugins, probed: ProbedModel
) -> Checked[RolloutSetup]:
    """See that the template carries what the run needs and rewrites nothing that was sampled.

    Raises:
        TemplateError: with what it cannot carry, or rewrites, and the choices.
        ConfigError: where no known tool-call format fits it.
    """
    setup = make_rollout_setup(config, plugins, probed)
    asked = template_needs(config, plugins).histories(probed.report)
    rewritten = [
        f"{found.history}: rewritten, and shown as sampled all the same ({found.difference})"
        for found in asked
        if found.stable is False
    ]
    told = f"keeps {len(asked) - len(rewritten)} of {len(asked)} kinds of history that the run has"
    told += f"; tool calls: {config.rollout.multi_turn.format or type(setup.parser).__name__}"
    return Checked(setup, told, (*rewritten, *find_endless_turn(config, setup)))


def check_policy(config: RunConfig, world: World) -> Checked[PolicyModel]:
    """Load the policy, and see that a checkpoint of it has room.

    Raises:
        ConfigError: where it cannot be loaded or trained, or the disk is full.
    """
    seed_everything(config.trainer.seed)
    policy = load_policy(config.model, world, config.actor.fsdp_config)
    num_weights = count_weights(policy)
    if not config.trainer.val_only:
        check_disk_space(nearest_folder(config.trainer.default_local_dir), num_weights, config)
    told = f"{type(policy.lm).__name__}, {num_weights:,} weights, computes in "
    return Checked(policy, f"{told}{policy.compute_dtype} on {world.device}")


def check_plausibility(
    config: RunConfig, setup: RolloutSetup, data: RunData, policy: PolicyModel
) -> Checked[None]:
    """Let the policy judge the first prompt: a tokenizer of another family shows here."""
    doubt = find_doubt(config, policy, setup, data)
    found = "prepare makes both" if config.prepares_its_policy else "judged by the first prompt"
    return Checked(None, found, (doubt,) if doubt else ())


def _text_doubts(report: TemplateReport) -> list[str]:
    lost = ", ".join(f"U+{ord(character):04X}" for character in report.lost_characters)
    found = [*report.notes]
    found += [f"characters that do not come back from the tokenizer: {lost}"] if lost else []
    if not report.round_trip:
        found.append("the tokenizer does not give texts back as they were")
    return found
