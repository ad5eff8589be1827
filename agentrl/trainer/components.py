"""Build the objects that the training loop uses, cheap checks first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

from agentrl.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from agentrl.config import Purpose
from agentrl.config.conflicts import longest_sequence
from agentrl.config.dead_keys import find_dead_keys_here, find_placement_keys, set_keys
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.training import ActorConfig, UpdateConfig
from agentrl.data.order import DataOrder
from agentrl.engines import Engine
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.engines.vision import has_vision
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.rewards import get_reward_manager
from agentrl.rewards.managers import scores_alone
from agentrl.rewards.rendering import ConversationEncoder
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.trainer.credit import Credit, estimator_requires, needs_old_log_probs
from agentrl.trainer.interruption import NestableRunner
from agentrl.trainer.metrics.alerts import find_idle_rules
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.rollout_messages import WorkerSettings
from agentrl.trainer.rollout_pool import RolloutPool, WorkerScores
from agentrl.trainer.rollouts.files import RolloutFiles
from agentrl.trainer.sampled_order import SampledOrder
from agentrl.trainer.sampling import StepSampler
from agentrl.trainer.setup.datasets import RunData, load_run_data, prompt_encoder
from agentrl.trainer.setup.engine_factory import (
    EngineLimits,
    announce_start,
    build_engine,
    check_engine,
    check_model_config,
    check_offload,
    check_sampled,
    choose_engine,
    describe_engine,
)
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import NOTHING, Given, Plugins
from agentrl.trainer.setup.preflight import (
    check_disk_space,
    check_folder_is_shared,
    check_run,
    checkpoint_bytes,
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
from agentrl.trainer.state.resume import has_steps_to_resume, start_date
from agentrl.trainer.state.run_folder import removing_failed_start
from agentrl.trainer.tracing.profiler import find_idle_profiles
from agentrl.workers.actor import Actor
from agentrl.workers.critic import Critic
from agentrl.workers.distributed import World, start_world
from agentrl.workers.load import load_hf_config, load_policy
from agentrl.workers.lora import frozen_experts_share
from agentrl.workers.model import PolicyModel
from agentrl.workers.reward_model import RewardModel, make_classifier, make_encoder
from agentrl.workers.rng import choose_exact_kernels, seed_everything
from agentrl.workers.scoring import Reference, find_implausible, load_reference_policy
from agentrl.workers.snapshot import on_main
from agentrl.workers.tokenizer import check_tokenizer, find_disagreements
from agentrl.workers.update import Updater
from agentrl.workers.value_model import load_value_model

if TYPE_CHECKING:
    from agentrl.cluster.handles import ClusterHandles

_PROMPT_TOKENS = 512
"""Prompt tokens that are read to check that policy and tokenizer belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerComponents:
    """The objects that the training loop uses."""

    world: World
    run_logger: RunLogger
    setup: RolloutSetup
    data: RunData
    order: DataOrder
    actor: Actor
    critic: Critic | None
    """If the estimator reads values."""
    reference: Reference | None
    reward_model: RewardModel | None
    credit: Credit
    engine: Engine
    manager: RolloutManager
    rollout_pool: RolloutPool | None
    """The rollout workers that run the requests; None: this process does."""
    sampler: StepSampler
    files: RolloutFiles
    record: DataRecord
    """Record of the rows, for checkpoints."""
    total_steps: int
    """Training steps of the whole run."""
    seconds_prepare: float
    """Seconds that preparing data, policy and warm-up took."""
    cluster: "ClusterHandles | None" = None
    """The other processes of a run on Ray."""

    @property
    def updaters(self) -> list[Updater]:
        """The trained models and their optimizers."""
        return [role.updater for role in (self.actor, self.critic) if role is not None]


def start_components(config: RunConfig, given: Given = NOTHING) -> TrainerComponents:
    """Check a run, prepare what is missing and build everything.

    Args:
        config: The configuration, marked with the objects that are given (`Given.mark`).
        given: Python objects that replace names of the run file.

    Raises:
        AgentRLError: if the configuration, a file or an object cannot be used.
    """
    quiet_libraries()
    config = with_absolute_paths(config)
    world = start_world(config.trainer.device, timeout_s=config.trainer.collective_timeout_s)
    run_logger = RunLogger(config.trainer, is_main=world.is_main)
    run_logger.show_stages(world.status)
    try:
        checked = check_run(config, world_size=world.size, build=given.build_plugins)
        ignored = find_placement_keys(config, "only `agentrl train` places a run on Ray")
        run_logger.notes([*checked.notes, *map(str, ignored), *check_names_and_engine(config)])
        return prepare_components(config, world, run_logger, checked.plugins, given)
    except BaseException:
        run_logger.close()
        raise


def prepare_components(
    config: RunConfig,
    world: World,
    run_logger: RunLogger,
    plugins: Plugins,
    given: Given = NOTHING,
    *,
    cluster: "ClusterHandles | None" = None,
) -> TrainerComponents:
    """Prepare what a checked run's `prepare` names and is missing, then build everything.

    The run's folder is locked until the run logger is closed.

    Args:
        config: The run's configuration.
        world: The ranks.
        run_logger: Prints notes; only its main rank does.
        plugins: The run's plug-ins.
        given: Python objects that replace names of the run file.
        cluster: The processes of a run on Ray that this rank may call; None: a run without Ray.

    Raises:
        AgentRLError: if the configuration, a file or an object cannot be used.
    """
    run_logger.notes(
        map(
            str, find_dead_keys_here(config, device=world.device.type, engine=choose_engine(config))
        )
    )
    with removing_failed_start(config, is_main=world.is_main):
        claim_folders(config)
        check_folder_is_shared(config, world)
        with world.raise_on_all_ranks():
            run_logger.lock_folder()
        now = start_date(config, world)
        seconds = prepare_run(config, world, run_logger, plugins.tools, now=now)
        setup = make_rollout_setup(config, plugins, probe_model(config, plugins, now=now))
        seed_everything(config.trainer.seed + world.rank)
        if config.rollout.deterministic:
            choose_exact_kernels(world.device)
        return build_components(
            config,
            world,
            run_logger,
            setup,
            given,
            now=now,
            seconds_prepare=seconds,
            cluster=cluster,
        )


def build_components(
    config: RunConfig,
    world: World,
    run_logger: RunLogger,
    setup: RolloutSetup,
    given: Given,
    *,
    now: datetime | None,
    seconds_prepare: float,
    cluster: "ClusterHandles | None" = None,
) -> TrainerComponents:
    """Build everything. User errors are found before the model is loaded.

    Raises:
        AgentRLError: if the configuration, a file or an object cannot be used.
    """
    data = load_run_data(config, setup, given)
    run_logger.notes(data.notes)
    order = make_order(config, data, world)
    num_batches = order.num_batches(config.prompts_per_rollout)
    total_steps = count_steps(config, num_batches)
    record = DataRecord.of(config, data, setup)
    run_logger.notes([*check_rows(record, config), *check_model(config, setup, given)])
    profiler = config.trainer.profiler
    run_logger.notes(
        [
            *find_idle_rules(config.trainer.alerts),
            *find_idle_profiles(profiler, total_steps=total_steps, world_size=world.size),
        ]
    )
    encoder = make_reward_encoder(config, setup, data)
    groups = world.with_sequence_groups(config.actor.ulysses_sequence_parallel_size)
    policy = load_policy(
        config.model,
        groups,
        config.actor.fsdp_config,
        seed=config.trainer.seed,
        processor=setup.processor,
    )
    run_logger.notes(check_policy(config, policy, setup, data))
    actor = make_actor(config, policy, total_steps)
    critic = make_critic(config, world, total_steps, policy.text_config.vocab_size)
    check_checkpoint(config, [role.updater for role in (actor, critic) if role], total_steps)
    reward_model = make_reward_model(config, encoder, world)
    engine = start_engine(config, policy, setup, run_logger, given)
    engine_name = type(engine).__name__ if given.engine else describe_engine(config)
    work = f"{len(data.train)} training rows, {total_steps} steps"
    run_logger.info(f"{describe_policy(policy)}; engine: {engine_name}; {work}")
    pool = start_pool(config, world, setup, engine, cluster, given.servers, now=now)
    manager = make_manager(config, setup, engine, None if pool is None else pool.run)
    if pool is not None and scores_alone(setup.plugins.rewards):
        scores = WorkerScores(pool, setup.plugins.rewards)
        setup = replace(setup, plugins=replace(setup.plugins, rewards=scores))
    is_before_update = needs_old_log_probs(config) or bool(policy.noise)
    return TrainerComponents(
        world=world,
        run_logger=run_logger,
        setup=setup,
        data=data,
        order=order,
        actor=actor,
        critic=critic,
        reference=make_reference(config, policy),
        reward_model=reward_model,
        credit=Credit(config.algorithm, world, is_before_update=is_before_update),
        engine=engine,
        manager=manager,
        rollout_pool=pool,
        sampler=StepSampler(config, manager, world, run_logger, num_batches=num_batches),
        files=RolloutFiles(config, world, run_logger, setup.template.decode),
        record=record,
        total_steps=total_steps,
        seconds_prepare=seconds_prepare,
        cluster=cluster,
    )


def start_pool(
    config: RunConfig,
    world: World,
    setup: RolloutSetup,
    engine: Engine,
    cluster: "ClusterHandles | None",
    servers: ServerDirectory | None,
    *,
    now: datetime | None,
) -> RolloutPool | None:
    """Let the rollout workers build what they need; None without workers.

    Raises:
        AgentRLError: if a worker cannot be built on its machine.
    """
    if cluster is None or not cluster.workers:
        return None
    from agentrl.cluster.plugin_actors import connect_plugins
    from agentrl.cluster.rollout_workers import connect_workers

    limit_s = config.cluster.start_timeout_s
    workers = connect_workers(
        cluster.workers,
        call_timeout_s=config.rollout.worker_timeout_s,
        start_timeout_s=limit_s,
    )
    # Rounds of calls are a rank's: it collects those of all workers.
    asks_servers = choose_engine(config) == "sglang_server" and not config.rollout.deterministic
    settings = WorkerSettings(
        config=config,
        now=now,
        max_model_len=engine.max_model_len,
        asks_servers=asks_servers,
        directory=servers,
        version=0,
        silence_s=config.rollout.worker_timeout_s,
        remotes=connect_plugins(cluster.plugins, start_timeout_s=limit_s),
    )
    pool = RolloutPool(workers, settings, tools=setup.plugins.tools, rank=world.rank)
    with world.raise_on_all_ranks(), NestableRunner() as runner:
        runner.run(pool.open())
    return pool


def check_checkpoint(config: RunConfig, updaters: Iterable[Updater], total_steps: int) -> None:
    """Check that a checkpoint of the trained models fits on the disk, if it is written there.

    Raises:
        ConfigError: if the disk has too little space.
    """
    if total_steps and config.trainer.default_remote_dir is None:
        sizes = (
            checkpoint_bytes(count_weights(one.model.trained_weights()), one.config.optim)
            for one in updaters
        )
        check_disk_space(config.trainer.default_local_dir, sum(sizes))


def check_policy(
    config: RunConfig, policy: PolicyModel, setup: RolloutSetup, data: RunData
) -> Iterator[str]:
    """Check that the policy fits the tokenizer.

    Yields:
        Notes for the user.
    """
    yield from find_unshared(config, policy)
    if policy.adapters is not None and (share := frozen_experts_share(policy.lm)):
        yield (
            f"the experts ({share:.0%} of the weights) are frozen: they are stacked matrices, and "
            "LoRA is for linear modules; without LoRA they are trained"
        )
    if policy.noise:
        yield (
            f"model.override_config.{policy.noise[0]} asks for noise: the update computes in "
            "training mode, with all dropout of the model, so the ratio of the policy to itself is "
            "not 1 and actor/ppo_kl is not 0 in the first mini-batch"
        )
    key = "model.freeze_vision_tower"
    # false is the default of verl's run files, for every model.
    is_asked = key in set_keys(config) and config.model.freeze_vision_tower
    if is_asked and not has_vision(policy.config):
        yield f"{key} has no effect: the model has no vision tower"
    if on_main(policy.world, lambda: has_steps_to_resume(config)):
        return  # the run's first start has checked it
    if doubt := find_doubt(config, policy, setup, data):
        yield doubt


def find_unshared(config: RunConfig, policy: PolicyModel) -> Iterator[str]:
    """Report rows that share no prefix, if the run file asks for shared prefixes."""
    key = "actor.share_prefixes"
    limit = policy.max_sharing_length(share_prefixes=config.actor.share_prefixes)
    if not config.actor.share_prefixes or key not in set_keys(config):
        return
    if not limit:
        is_slow = f"attention is {policy.kernel.name}, which computes each row alone"
        reason = "the update has dropout" if policy.noise else is_slow
        yield f"{key} has no effect: {reason}"
    elif limit < longest_sequence(config):
        yield f"{key}: rows of more than {limit} tokens share no prefix (sliding window)"


def find_doubt(
    config: RunConfig, policy: PolicyModel, setup: RolloutSetup, data: RunData
) -> str | None:
    """Return a warning if the policy finds a prompt so unlikely that the tokenizer may be wrong."""
    if config.prepares_its_policy:  # a policy that was not trained on prompts finds them unlikely
        return None
    prompt = prompt_encoder(setup)(next(chain(data.train, *data.val.values())))
    budget = config.actor.ppo_max_token_len_per_gpu
    return find_implausible(policy, prompt[:_PROMPT_TOKENS], budget)


def start_engine(
    config: RunConfig,
    policy: PolicyModel,
    setup: RolloutSetup,
    run_logger: RunLogger,
    given: Given = NOTHING,
) -> Engine:
    """Start the engine with the policy's weights; announce a start that takes long."""
    if given.engine is not None:
        if isinstance(given.engine, Engine):
            return given.engine
        return given.engine(policy.lm, setup.tokenizer)
    run_logger.info(*announce_start(config))
    check_offload(config, policy)
    device, dtype = policy.world.device, policy.compute_dtype
    limits = EngineLimits.of(config, policy)
    with policy.on_device():
        engine = build_engine(
            config,
            policy.lm,
            setup.tokenizer,
            device=device,
            dtype=dtype,
            limits=limits,
            servers=given.servers,
        )
    if choose_engine(config) == "scripted":
        run_logger.notes(
            ["the scripted engine has no log-probabilities; do not use this run to train a policy"]
        )
    return engine


def check_model(config: RunConfig, setup: RolloutSetup, given: Given = NOTHING) -> list[str]:
    """Check a model's configuration against the tokenizer and the budgets; read no weights.

    Returns:
        Possible disagreements, a sentence each.

    Raises:
        ConfigError: if they cannot work together.
    """
    found = load_hf_config(config.model)
    check_tokenizer(setup.tokenizer, found)
    check_model_config(config, found)
    if given.engine is None:
        check_sampled(config, found)
    notes = list(find_disagreements(setup.tokenizer, found, config.model.path))
    return [*notes, *setup.report.notes, *find_endless_turn(config, setup)]


def find_endless_turn(config: RunConfig, setup: RolloutSetup) -> Iterator[str]:
    """Report if no token ends a turn of the chat template: turns would use their whole budget."""
    if not setup.template.structure.end_of_turn.text and not config.rollout.stop:
        stops = ", ".join(map(repr, setup.template.stop_texts.values()))
        yield (
            "the chat template ends a turn with no token of the tokenizer: a turn continues to "
            f"{stops} or to the end of its budget, unless rollout.stop names what ends it"
        )


def make_order(config: RunConfig, data: RunData, world: World) -> DataOrder:
    """Make the order of the training rows.

    Raises:
        DataError: if the data has fewer rows than a batch.
        PluginError: if `data.sampler` cannot be built.
    """
    if config.data.sampler is not None:
        order = SampledOrder(data.train, config.data, world)
    else:
        order = DataOrder(
            len(data.train),
            seed=config.data.seed,
            shuffle=config.data.shuffle,
            fingerprint=data.train.fingerprint,
        )
    if not config.trainer.val_only:
        order.check_batch(config.prompts_per_rollout)
    return order


def count_steps(config: RunConfig, num_batches: int) -> int:
    """Count the training steps: as configured, or from the epochs."""
    trainer = config.trainer
    if trainer.val_only:
        return 0
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return trainer.total_epochs * num_batches


def describe_policy(policy: PolicyModel) -> str:
    """Describe a policy's architecture, size, dtype and devices."""
    name, devices = type(policy.lm).__name__, f"{policy.world.device.type} x {policy.world.size}"
    weights = describe_weights(policy)
    return f"{name}, {weights}, {policy.compute_dtype} on {devices}"


def describe_weights(policy: PolicyModel) -> str:
    """Describe how many weights a policy has and trains."""
    text = f"{count_weights(policy.named_weights()):,} weights"
    if policy.adapters is None:
        return text
    return f"{text}, of which LoRA trains {count_weights(policy.trained_weights()):,}"


def count_weights(named_weights: Iterator[tuple[str, nn.Parameter]]) -> int:
    """Count weights, tied ones once."""
    return sum(weight.numel() for _, weight in named_weights)


def make_actor(config: RunConfig, policy: PolicyModel, total_steps: int) -> Actor:
    """Make the actor: the policy and its optimizer."""
    warmup = config.trainer.critic_warmup if needs_critic(config) else 0
    return Actor(
        policy,
        choose_actor_config(config),
        total_steps=max(0, total_steps - warmup) * count_optimizer_steps(config, config.actor),
        response_budget=config.data.max_response_length,
        seed=config.trainer.seed,
    )


def needs_critic(config: RunConfig) -> bool:
    """Return whether the run trains with an estimator that reads values."""
    return not config.trainer.val_only and estimator_requires(config.algorithm, "values")


def make_critic(
    config: RunConfig, world: World, total_steps: int, vocab_size: int
) -> Critic | None:
    """Load the critic and make its optimizer, if the estimator reads values.

    Raises:
        ConfigError: if it cannot be loaded, or has another vocabulary than the policy.
    """
    critic = config.critic
    if not needs_critic(config):
        return None
    groups = world.with_sequence_groups(critic.ulysses_sequence_parallel_size)
    model = load_value_model(critic.model, config.model, groups, critic.fsdp_config)
    if model.text_config.vocab_size < vocab_size:
        raise ConfigError(
            f"the critic has {model.text_config.vocab_size} tokens and the policy {vocab_size}",
            key="critic.model.path",
            expected="a model with the policy's tokenizer",
        )
    return Critic(
        model,
        critic,
        total_steps=total_steps * count_optimizer_steps(config, critic),
        response_budget=config.data.max_response_length,
        seed=config.trainer.seed,
    )


def count_optimizer_steps(config: RunConfig, update: UpdateConfig) -> int:
    """Count the optimizer steps of the update of one batch."""
    prompts = config.data.train_batch_size
    return prompts // (update.ppo_mini_batch_size or prompts) * update.ppo_epochs


def choose_actor_config(config: RunConfig) -> ActorConfig:
    """Return the actor's section; with `bypass_mode`, its loss also does the correction."""
    correction = config.algorithm.rollout_correction.effective
    if not correction.bypass_mode:
        return config.actor
    chosen = {"loss_mode": "bypass_mode", "rollout_correction": correction}
    policy_loss = config.actor.policy_loss.model_copy(update=chosen)
    return config.actor.model_copy(update={"policy_loss": policy_loss})


def make_reference(config: RunConfig, policy: PolicyModel) -> Reference | None:
    """Make the frozen reference if a KL in the loss or in the reward requires it.

    With LoRA it is the actor's own policy as it was at the start, unless `ref.path` is set.
    """
    if not (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        return None
    if policy.adapters is None or config.ref.path is not None:
        fsdp = config.actor.fsdp_config
        policy = load_reference_policy(config.ref, config.model, policy.world, fsdp)
    return Reference(
        policy,
        budget=config.actor.ppo_max_token_len_per_gpu,
        logits_block_bytes=config.actor.logits_block_bytes,
        share_prefixes=config.actor.share_prefixes,
    )


def make_reward_encoder(
    config: RunConfig, setup: RolloutSetup, data: RunData
) -> ConversationEncoder | None:
    """Make the encoder of the reward model, and check that its template can write the run.

    Raises:
        ConfigError: if the reward model or its tokenizer cannot be used.
        TemplateError: if its template cannot render the run's conversations.
    """
    if config.reward.model is None:
        return None
    encoder = make_encoder(config.reward.model)
    first = (next(iter(rows)).messages for rows in (data.train, *data.val.values()) if rows)
    encoder.check(
        [tool.tool_schema for tool in setup.plugins.tools],
        has_user_turns=bool(setup.plugins.interactions),
        prompts=first,
    )
    return encoder


def make_reward_model(
    config: RunConfig, encoder: ConversationEncoder | None, world: World
) -> RewardModel | None:
    """Load the reward model's weights, or connect to its servers.

    Raises:
        ConfigError: if it cannot be loaded, or a server does not answer.
    """
    if encoder is None or config.reward.model is None:
        return None
    reward_model = RewardModel(encoder, make_classifier(config.reward.model, world), world)
    with NestableRunner() as runner:
        reward_model.check(runner.run)
    return reward_model


def check_names_and_engine(
    config: RunConfig, *, purpose: Purpose = Purpose.TRAIN, starts_here: bool = True
) -> list[str]:
    """Refuse a run with an unknown method, or with an engine that cannot start.

    Args:
        config: The run's configuration.
        purpose: The purpose of the run.
        starts_here: Whether the run starts on this machine. If not, an engine that is not installed
            is only reported.

    Returns:
        Notes for the user.

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
    """Look up all methods that the run file names, so that a typo is not found at the first step.

    Raises:
        ConfigError: with the nearest known name.
    """
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor.policy_loss.loss_mode)
    get_reward_manager(config.reward.manager)
    if config.rollout.multi_turn.format is not None:
        get_tool_parser(config.rollout.multi_turn.format)
