"""Check that policy and tokenizer fit, and that the template keeps the invariants."""

from transformers import PreTrainedTokenizerBase

from agentrl.config.schema.run import RunConfig
from agentrl.doctor.machine import nearest_folder
from agentrl.doctor.memory import critic_size
from agentrl.doctor.report import Checked
from agentrl.engines.model_config import read_attribute
from agentrl.rollout.templates import ChatTemplate
from agentrl.trainer.components import (
    count_weights,
    describe_weights,
    find_doubt,
    find_endless_turn,
    needs_critic,
)
from agentrl.trainer.setup.datasets import RunData
from agentrl.trainer.setup.engine_factory import check_model_config, check_sampled
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.preflight import (
    check_disk_space,
    check_model_folders,
    checkpoint_bytes,
)
from agentrl.trainer.setup.rollout_setup import (
    ProbedModel,
    RolloutSetup,
    make_rollout_setup,
    probe_model,
    template_needs,
)
from agentrl.workers.distributed import World
from agentrl.workers.load import load_hf_config, load_policy
from agentrl.workers.model import PolicyModel
from agentrl.workers.rng import seed_everything
from agentrl.workers.sequence_parallel import check_heads
from agentrl.workers.tokenizer import (
    check_tokenizer,
    find_disagreements,
    load_processor,
    load_tokenizer,
)
from agentrl.workers.value_model import choose_model


def check_tokenizer_files(config: RunConfig) -> Checked[PreTrainedTokenizerBase]:
    """Check the tokenizer against the model's configuration, without reading weights.

    Raises:
        ConfigError: if they cannot work together.
    """
    check_model_folders(config)
    tokenizer, model = load_tokenizer(config.model), load_hf_config(config.model)
    check_tokenizer(tokenizer, model)
    check_model_config(config, model)
    check_sampled(config, model)
    positions = read_attribute(model, "max_position_embeddings", "any number of")
    found = f"{type(tokenizer).__name__}, {len(tokenizer)} tokens; {model.model_type}, "
    found += f"{positions} positions"
    doubts = find_disagreements(tokenizer, model, config.model.path)
    return Checked(tokenizer, found, tuple(doubts))


def check_control_tokens(config: RunConfig, plugins: Plugins) -> Checked[ProbedModel]:
    """Check that no outside text becomes a control token, with the run's template and tokenizer.

    Raises:
        TemplateError: if there is no template, or the template is invalid.
    """
    probed = probe_model(config, plugins)
    forged = tuple(find_forged(probed.template))
    found = f"{len(probed.template.structure.encoder.control)} control tokens stay text; "
    found += f"stops at {' '.join(probed.report.stop_tokens)}"
    report = probed.report
    doubts = [*report.notes]
    if lost := ", ".join(f"U+{ord(character):04X}" for character in report.lost_characters):
        doubts.append(f"the tokenizer loses these characters: {lost}")
    if not report.round_trip:
        doubts.append("the tokenizer does not decode texts to what they were")
    return Checked(probed, found, tuple(doubts), forged)


def find_forged(template: ChatTemplate) -> list[str]:
    """Find the control tokens that an outside text could write."""
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
    """Check that the template supports the run's conversations and rewrites no sampled turn.

    Raises:
        TemplateError: names what the template does not support, or rewrites, and the choices.
        ConfigError: if no known tool-call format fits the template.
    """
    setup = make_rollout_setup(config, plugins, probed)
    asked = template_needs(config, plugins).histories(probed.report)
    rewritten = [
        f"the template rewrites {found.history} ({found.difference}); the policy is shown the "
        "tokens as sampled"
        for found in asked
        if found.stable is False
    ]
    kept = f"keeps {len(asked) - len(rewritten)} of {len(asked)} kinds of history that the run has"
    found = f"{kept}; tool calls: "
    found += config.rollout.multi_turn.format or type(setup.parser).__name__
    return Checked(setup, found, (*rewritten, *find_endless_turn(config, setup)))


def check_policy(config: RunConfig, world: World) -> Checked[PolicyModel]:
    """Load the policy, and check that the disk has space for a checkpoint of it and the critic.

    Raises:
        ConfigError: if it cannot be loaded or trained, or if the disk is full.
    """
    seed_everything(config.trainer.seed)
    if (num_ranks := config.actor.ulysses_sequence_parallel_size) > 1:
        check_heads(load_hf_config(config.model), num_ranks)
    num_ranks = config.critic.ulysses_sequence_parallel_size
    if needs_critic(config) and num_ranks > 1:
        own = choose_model(config.critic.model, config.model)
        check_heads(load_hf_config(own), num_ranks, section="critic")
    # The checks use the weights as they are.
    fsdp = config.actor.fsdp_config.model_copy(update={"param_offload": False})
    tokenizer = load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, kwargs=config.data.mm_processor_kwargs)
    policy = load_policy(config.model, world, fsdp, seed=config.trainer.seed, processor=processor)
    if not config.trainer.val_only and config.trainer.default_remote_dir is None:
        needed = checkpoint_bytes(count_weights(policy.trained_weights()), config.actor.optim)
        if (critic := critic_size(config)) is not None:
            needed += checkpoint_bytes(critic.trained_weights, config.critic.optim)
        check_disk_space(nearest_folder(config.trainer.default_local_dir), needed)
    found = f"{type(policy.lm).__name__}, {describe_weights(policy)}, computes in "
    return Checked(policy, f"{found}{policy.compute_dtype} on {world.device}")


def check_plausibility(
    config: RunConfig, setup: RolloutSetup, data: RunData, policy: PolicyModel
) -> Checked[None]:
    """Score the first prompt with the policy, which reveals a tokenizer of another family."""
    doubt = find_doubt(config, policy, setup, data)
    found = "prepare makes both" if config.prepares_its_policy else "the first prompt was scored"
    return Checked(None, found, (doubt,) if doubt else ())
