"""Build what the loop works with from a configuration, cheap checks first."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from agentrl.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from agentrl.config import Purpose
from agentrl.config.checks import check_model_length
from agentrl.config.schema.run import ActorConfig, RunConfig
from agentrl.data.order import DataOrder
from agentrl.engines import Engine
from agentrl.errors import MissingExtraError
from agentrl.rewards import get_reward_manager
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.trainer.credit import Credit
from agentrl.trainer.metrics.run_logger import Journal
from agentrl.trainer.rollouts.files import RolloutFiles
from agentrl.trainer.sampling import StepSampler
from agentrl.trainer.setup.datasets import RunData, load_run_data, prompt_encoder
from agentrl.trainer.setup.engine_factory import (
    announce_start,
    build_engine,
    check_engine,
    choose_engine,
    describe_engine,
)
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import NOTHING, Given, Plugins
from agentrl.trainer.setup.preflight import (
    check_room,
    check_run,
    claim_folders,
    with_absolute_paths,
)
from agentrl.trainer.setup.prepare import prepare_run
from agentrl.trainer.setup.rollout_setup import (
    RolloutSetup,
    make_manager,
    make_rollout_setup,
    probe_model,
)
from agentrl.trainer.state.data_fingerprint import DataRecord, check_rows
from agentrl.trainer.state.resume import start_date
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World, start_world
from agentrl.workers.model import PolicyModel, load_hf_config, load_policy
from agentrl.workers.rng import choose_exact_kernels, seed_everything
from agentrl.workers.scoring import Reference, find_implausible, load_reference_policy
from agentrl.workers.tokenizer import check_tokenizer, find_disagreements

_PROMPT_TOKENS = 512
"""How much of a prompt is read to see whether policy and tokenizer belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with."""

    world: World
    journal: Journal
    setup: RolloutSetup
    data: RunData
    order: DataOrder
    actor: Actor
    reference: Reference | None
    credit: Credit
    engine: Engine
    manager: RolloutManager
    sampler: StepSampler
    files: RolloutFiles
    record: DataRecord
    """Of the rows, for checkpoints."""
    total_steps: int
    """Training steps of the whole run."""
    seconds_prepare: float
    """What making data, policy and warm-up took."""


def start_parts(config: RunConfig, given: Given = NOTHING) -> Parts:
    """Check a run, make what is missing and build everything, from a configuration and objects.

    Args:
        config: Marked with what is given (`Given.mark`).
        given: Python objects in the place of what a run file names.

    Raises:
        AgentRLError: with what, where and what was expected.
    """
    quiet_libraries()
    config = with_absolute_paths(config)
    world = start_world(config.trainer.device, timeout_s=config.trainer.collective_timeout_s)
    journal = Journal(config.trainer, is_main=world.is_main)
    try:
        checked = check_run(config, world_size=world.size, build=given.build_plugins)
        notes = [*checked.notes, *check_late(config)]
        journal.say(*(f"note: {note}" for note in notes))
        return prepare_parts(config, world, journal, checked.plugins, given)
    except BaseException:
        journal.close()
        raise


def prepare_parts(
    config: RunConfig,
    world: World,
    journal: Journal,
    plugins: Plugins,
    given: Given = NOTHING,
) -> Parts:
    """Make what a checked run's `prepare` names and is not there, then build everything.

    The run's folder is locked until the journal is closed.
    """
    claim_folders(config)
    with world.agreeing():
        journal.claim()
    now = start_date(config, world)
    seconds = prepare_run(config, world, journal, plugins.tools, now=now)
    setup = make_rollout_setup(config, plugins, probe_model(config, plugins, now=now))
    seed_everything(config.trainer.seed + world.rank)
    if config.rollout.deterministic:
        choose_exact_kernels(world.device)
    return build_parts(config, world, journal, setup, given, seconds_prepare=seconds)


def build_parts(
    config: RunConfig,
    world: World,
    journal: Journal,
    setup: RolloutSetup,
    given: Given = NOTHING,
    *,
    seconds_prepare: float = 0.0,
) -> Parts:
    """Build everything. What a user may have got wrong is found before the model loads.

    Raises:
        AgentRLError: with what, where and what was expected.
    """
    data = load_run_data(config, setup, given)
    journal.say(*data.notes)
    order = make_order(config, data)
    total_steps = count_steps(config, order)
    record = DataRecord.of(config, data, setup)
    notes = [*check_rows(record, config), *check_model(config, setup)]
    journal.say(*(f"note: {note}" for note in notes))
    policy = load_policy(config.model, world, config.actor.fsdp_config)
    journal.say(*check_loaded_policy(config, policy, setup, data, total_steps=total_steps))
    engine = start_engine(config, policy, setup, journal, given)
    engine_name = type(engine).__name__ if given.engine else describe_engine(config)
    journal.say(describe_start(policy, engine_name, len(data.train), total_steps))
    manager = make_manager(config, setup, engine)
    num_batches = order.num_batches(config.prompts_per_rollout)
    return Parts(
        world=world,
        journal=journal,
        setup=setup,
        data=data,
        order=order,
        actor=make_actor(config, policy, total_steps),
        reference=make_reference(config, world),
        credit=Credit(config.algorithm, world),
        engine=engine,
        manager=manager,
        sampler=StepSampler(config, manager, world, journal, num_batches=num_batches),
        files=RolloutFiles(config, world, journal),
        record=record,
        total_steps=total_steps,
        seconds_prepare=seconds_prepare,
    )


def check_loaded_policy(
    config: RunConfig, policy: PolicyModel, setup: RolloutSetup, data: RunData, *, total_steps: int
) -> Iterator[str]:
    """Check that the disk can hold what is saved of the policy, and that it reads a prompt well.

    Yields:
        What the user should know.

    Raises:
        ConfigError: if the disk has too little space.
    """
    if total_steps:
        check_room(config.trainer.default_local_dir, count_weights(policy), config)
    if doubt := find_doubt(config, policy, setup, data):
        yield f"note: {doubt}"


def find_doubt(
    config: RunConfig, policy: PolicyModel, setup: RolloutSetup, data: RunData
) -> str | None:
    """Say where policy and tokenizer may not belong together, by how the policy reads a prompt."""
    if config.prepares_its_policy:  # one that was not trained on prompts finds them unlikely
        return None
    prompt = prompt_encoder(setup)(next(chain(data.train, *data.val.values())))
    budget = config.actor.ppo_max_token_len_per_gpu
    return find_implausible(policy, prompt[:_PROMPT_TOKENS], budget)


def start_engine(
    config: RunConfig,
    policy: PolicyModel,
    setup: RolloutSetup,
    journal: Journal,
    given: Given = NOTHING,
) -> Engine:
    """Start the engine with the policy's weights; what takes long is announced."""
    if given.engine is not None:
        if isinstance(given.engine, Engine):
            return given.engine
        return given.engine(policy.lm, setup.tokenizer)
    journal.say(*announce_start(config))
    device, dtype = policy.world.device, policy.compute_dtype
    engine = build_engine(config, policy.lm, setup.tokenizer, device=device, dtype=dtype)
    if choose_engine(config) == "scripted":
        journal.say(
            "note: the scripted engine has no log-probabilities; do not use this run to train a "
            "policy"
        )
    return engine


def check_model(config: RunConfig, setup: RolloutSetup) -> list[str]:
    """Hold a model's configuration against the tokenizer and the budgets; no weights are read.

    Returns:
        Where they may disagree: a sentence each.

    Raises:
        ConfigError: where they cannot work together.
    """
    found = load_hf_config(config.model)
    check_tokenizer(setup.tokenizer, found)
    check_model_length(config, found.max_position_embeddings)
    notes = list(find_disagreements(setup.tokenizer, found, config.model.path))
    return [*notes, *setup.report.notes, *find_endless_turn(config, setup)]


def find_endless_turn(config: RunConfig, setup: RolloutSetup) -> Iterator[str]:
    """Say where no token ends a turn as the chat template does: it would go on to its budget."""
    if not setup.template.structure.end_of_turn.text and not config.rollout.stop:
        stops = ", ".join(map(repr, setup.template.stop_texts.values()))
        yield (
            "the chat template ends a turn with no token of the tokenizer: a turn goes on to "
            f"{stops} or to its budget, unless rollout.stop names what ends it"
        )


def make_order(config: RunConfig, data: RunData) -> DataOrder:
    """Say which rows come when.

    Raises:
        DataError: where the data has fewer rows than a batch.
    """
    order = DataOrder(
        len(data.train),
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        fingerprint=data.train.fingerprint,
    )
    if not config.trainer.val_only:
        order.check_batch(config.prompts_per_rollout)
    return order


def count_steps(config: RunConfig, order: DataOrder) -> int:
    """Count the training steps: as configured, or the epochs' worth."""
    trainer = config.trainer
    if trainer.val_only:
        return 0
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return trainer.total_epochs * order.num_batches(config.prompts_per_rollout)


def count_weights(policy: PolicyModel) -> int:
    """Count the policy's weights, tied ones once."""
    return sum(weight.numel() for _, weight in policy.named_weights())


def describe_start(policy: PolicyModel, engine: str, num_rows: int, total_steps: int) -> str:
    """Describe in one line what a run trains, with which engine, on how much."""
    world = policy.world
    return (
        f"{type(policy.lm).__name__}, {count_weights(policy):,} weights, {policy.compute_dtype} "
        f"on {world.device.type} x {world.size}; engine: {engine}; "
        f"{num_rows} training rows, {total_steps} steps"
    )


def make_actor(config: RunConfig, policy: PolicyModel, total_steps: int) -> Actor:
    """Put the policy and its optimizer together."""
    prompts = config.data.train_batch_size
    mini_batches = prompts // (config.actor.ppo_mini_batch_size or prompts)
    return Actor(
        policy,
        choose_actor_config(config),
        total_steps=total_steps * mini_batches * config.actor.ppo_epochs,
        response_budget=config.data.max_response_length,
        seed=config.trainer.seed,
    )


def choose_actor_config(config: RunConfig) -> ActorConfig:
    """Give the actor its section, and under `bypass_mode` the loss that corrects by itself."""
    correction = config.algorithm.rollout_correction.effective
    if not correction.bypass_mode:
        return config.actor
    chosen = {"loss_mode": "bypass_mode", "rollout_correction": correction}
    policy_loss = config.actor.policy_loss.model_copy(update=chosen)
    return config.actor.model_copy(update={"policy_loss": policy_loss})


def make_reference(config: RunConfig, world: World) -> Reference | None:
    """Load the frozen reference, where a KL asks for one: in the loss, or in the reward."""
    if not (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        return None
    policy = load_reference_policy(config.ref, config.model, world, config.actor.fsdp_config)
    return Reference(
        policy,
        budget=config.actor.ppo_max_token_len_per_gpu,
        logits_block_bytes=config.actor.logits_block_bytes,
    )


def check_late(
    config: RunConfig, *, purpose: Purpose = Purpose.TRAIN, starts_here: bool = True
) -> list[str]:
    """Refuse a run with an unknown method, or an engine that cannot start.

    Args:
        config: Of the run.
        purpose: What is to be done with the run.
        starts_here: Whether it runs on this machine; if not, what is not installed here is a note.

    Returns:
        What its user should know.

    Raises:
        ConfigError: for an unknown name, or an argument that the engine does not know.
        MissingExtraError: for an engine that is not installed.
    """
    check_names(config)
    if purpose is Purpose.SFT:
        return []
    try:
        check_engine(config)
    except MissingExtraError as missing:
        if starts_here:
            raise
        return [f"on this machine, {missing}"]
    return []


def check_names(config: RunConfig) -> None:
    """Look up what the run file chooses by name, so that a slip is not found at the first step.

    Raises:
        ConfigError: with the nearest name that there is.
    """
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor.policy_loss.loss_mode)
    get_reward_manager(config.reward.manager)
    if config.rollout.multi_turn.format is not None:
        get_tool_parser(config.rollout.multi_turn.format)
