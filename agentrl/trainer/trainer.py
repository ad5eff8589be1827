"""The training loop. Its stages follow the data:

    data/         a row of a dataset        -> Prompt
    rollout/      Prompt x group size       -> AsyncRolloutRequest, PENDING ... COMPLETED | FAILED
    rewards/      a finished request        -> rewards per turn and per trajectory
    workers/      finished requests         -> scores of the reward model
    collate.py    finished requests         -> DataProto: the first tensors, [B, T]
    workers/      DataProto                 -> log-probabilities of the policy and its reference,
                                               values of the critic
    algorithms/   DataProto                 -> corrections, advantages, returns
    workers/      DataProto                 -> new weights
    weight_sync   new weights               -> the engine, policy version + 1
    checkpoint    the whole run             -> disk, and back

With several ranks (torchrun), every rank runs this loop on its own share of the samples. Everything
that compares samples (credit, failures, metrics) sees the samples of all ranks. Only the main rank
writes files.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from agentrl.collate import collate, widest
from agentrl.config.schema.run import RunConfig
from agentrl.data.rows import Prompt
from agentrl.engines import Engine
from agentrl.errors import CheckpointError, RolloutError
from agentrl.interactions import BaseInteraction
from agentrl.protocol import DataProto
from agentrl.rewards import drive_and_score
from agentrl.rewards.scoring import ScoreFn
from agentrl.rollout.failures import FailureSummary
from agentrl.rollout.manager import SamplingPlan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.scheduling import rare_gc
from agentrl.trainer.checkpointer import Checkpointer
from agentrl.trainer.components import TrainerComponents, start_components
from agentrl.trainer.engine_sync import EngineSync
from agentrl.trainer.interruption import Interrupted, Interruption, NestableRunner
from agentrl.trainer.metrics.aggregators import compute_values, merge_metrics
from agentrl.trainer.metrics.efficiency import Efficiency
from agentrl.trainer.metrics.pools import Traffic, pool_metrics, traffic_metrics
from agentrl.trainer.metrics.rollout import reward_metrics
from agentrl.trainer.metrics.step import Timer, compute_throughput, step_metrics
from agentrl.trainer.sampling import StepSamples
from agentrl.trainer.setup.plugins import EngineFactory, Given, Row, Tool, given_rows
from agentrl.trainer.setup.preflight import with_absolute_paths
from agentrl.trainer.state.last_step import LastCompletedStep
from agentrl.trainer.state.summary import Summary
from agentrl.trainer.tracing.profiler import StepProfiler
from agentrl.trainer.tracing.tracer import Tracer
from agentrl.trainer.validation import describe_success, read_outcome, validation_metrics
from agentrl.workers.update import UpdateResult


class Trainer:
    """Train a policy as a configuration says.

    Tools, interactions, the scorer, rows and the engine can be passed as Python objects instead of
    being named in a run file (docs/library.md). The trainer also works under a running event loop.

    Args:
        config: The checked configuration.
        components: The objects that the loop uses; built from the configuration by default.
        tools: Tools, and functions with `@function_tool`, in addition to those of the
            configuration.
        interactions: Interactions, in addition to those of the configuration.
        reward: The scorer: `(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`.
        rows: Training rows: mappings with the columns of a data file, or prompts.
        val_rows: Validation rows, or a mapping of names to rows.
        engine: An engine, or a function `(model, tokenizer) -> engine`.

    Raises:
        AgentRLError: if the configuration, a file or an object cannot be used.

    Example:
        >>> from agentrl import Trainer, load_config
        >>> summary = Trainer(load_config("run.yaml")).fit()
    """

    def __init__(
        self,
        config: RunConfig,
        components: TrainerComponents | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        interactions: Sequence[BaseInteraction] | None = None,
        reward: ScoreFn | None = None,
        rows: Sequence[Row] | None = None,
        val_rows: Sequence[Row] | Mapping[str, Sequence[Row]] | None = None,
        engine: Engine | EngineFactory | None = None,
    ) -> None:
        given = Given(
            tools=tools,
            interactions=interactions,
            reward=reward,
            rows=rows,
            val_rows=given_rows(val_rows),
            engine=engine,
        )
        self.config = config = with_absolute_paths(given.mark(config))
        self.components = parts = components or start_components(config, given)
        self.world = parts.world
        self.run_logger = parts.run_logger
        self.folder = config.trainer.default_local_dir
        self.step = 0
        self.policy_version = 0
        self.summary = Summary(seed=config.trainer.seed)
        self.engine_sync = EngineSync.of(config, parts.engine, parts.actor.policy)
        self._efficiency = Efficiency.of(parts.actor.policy, config.trainer.peak_tflops)
        self._timer = Timer(
            on_enter=lambda stage: self.world.status.enter(f"{stage} of step {self.step}")
        )
        self._tracer = Tracer(config, self.world, self.run_logger.info)
        self._profiler = StepProfiler(config.trainer, self.world, self.run_logger.info)
        self._interruption = Interruption(self.world)
        self._last = LastCompletedStep(parts.order, parts.updaters)
        self._checkpointer = Checkpointer(config, parts)
        self._runner = NestableRunner()
        self._is_closed = False
        self._traffic = Traffic()
        self._failures: list[FailureSummary] = []
        self._success_rules: dict[str, str] = {}
        self._started = time.monotonic()

    # The loop.

    def fit(self) -> Summary:
        """Train to the last step, validate, save; return the summary.

        SIGINT or SIGTERM stops the run: tools are released and the last completed step is saved.
        An error that every rank sees does the same (for example, too many requests of a batch
        failed). If only one rank fails (out of memory, killed), nothing can be saved: resume from
        the last periodic checkpoint.

        Raises:
            KeyboardInterrupt: if the run was asked to stop, also while it wrote its final files.
        """
        with rare_gc(), self._interruption.listening(), self.world.status.explain_errors():
            try:
                self.begin()
                self._take_steps()
                self._interruption.check()
                return self.summary
            except Interrupted:
                self.save_last_step()
                raise Interrupted(self.summary.at_stop(self._last.step)) from None
            except Exception as error:
                self._save_after_error(error)
                raise
            finally:
                self.close()

    def begin(self) -> None:
        """Resume from a checkpoint or start a new run, and validate the untrained policy."""
        if (state := self._checkpointer.load()) is not None:
            self.step = state.step
            self.summary = Summary(**state.trainer)
            self._last.record(self.step, self.summary, unlogged=state.unlogged)
        self.summary.count_preparation(self.components.seconds_prepare)
        self.sync_weights()
        self.components.files.save_weights(self.step, self.engine_sync.weight_digest)
        self._timer.pop_metrics()  # these seconds are of no step
        unlogged = self._last.unlogged
        # If the checkpoint holds metrics that were not logged, log them now and drop a line of that
        # step, which a killed run may have written.
        logged = self.step if unlogged is None else self.step - 1
        self.run_logger.open(
            start=self._checkpointer.start_folder,
            resumed_step=logged if self.step else None,
            total_steps=self.components.total_steps,
        )
        if self.step == 0 and self.config.trainer.val_before_train and self.components.data.val:
            self.log_step(self.validate())
        if unlogged is not None:
            self.end_step(unlogged)

    def _take_steps(self) -> None:
        """Train from the first step to the last, and write the results."""
        total = self.components.total_steps
        shown = self.run_logger.progress.bar("steps", total, done=self.step, with_stage=True)
        with shown as advance:
            while self.step < total:
                self.end_step(self.train_step())
                advance()
            self.finish()

    def train_step(self) -> dict[str, float]:
        """Run one step, from prompts to new weights in the engine; return its metrics."""
        self.step += 1
        parts = self.components
        self._traffic = self._count_traffic()
        self._profiler.start(self.step, before_rollout=True)
        with self._timer("step"):
            samples = parts.sampler.take(self.step, self.load_prompts, self.roll_out)
            self._profiler.start(self.step, before_rollout=False)
            self._runner.run(self.engine_sync.sleep())
            batch = self.collate(samples.batch)
            samples.add_baselines(batch)
            self.compute_log_probs(batch)
            self.compute_values(batch)
            credit = self.compute_advantages(batch)
            self._interruption.check()
            learned = self.update_critic(batch)
            update = self.update_actor(batch)
            credit |= learned.metrics | update.metrics
            credit |= parts.credit.add_log_probs_of_update(batch, update.outputs)
            if update.metrics["actor/optimizer_steps"]:
                parts.credit.commit()
            parts.order.update(batch)
            # Recorded before the sync: if the engine fails now, the step can still be saved.
            self._last.record(self.step, self.summary, unlogged=credit)
            self.sync_weights()
        self._profiler.save(self.step)
        parts.files.save_step(self.step, samples.everything, batch)
        parts.files.save_weights(self.step, self.engine_sync.weight_digest)
        parts.files.save_skipped(self.step, samples.batch, [*learned.skipped, *update.skipped])
        rows = {"update_critic": learned.row_lengths, "update_actor": update.row_lengths}
        return self.measure(samples, batch, rows) | credit

    def end_step(self, metrics: dict[str, float]) -> None:
        """Validate and save if due, and log the step."""
        self._last.record(self.step, self.summary, unlogged=metrics)
        self._interruption.check()
        if self._is_due(self.config.trainer.test_freq):
            metrics = metrics | self.validate()
        self.log_step(metrics)
        self._last.record(self.step, self.summary)
        try:
            if self._checkpointer.is_written():
                self.finish_checkpoint()
            if self._is_due(self.config.trainer.save_freq):
                self.start_checkpoint()
        except CheckpointError:
            # The export needs less memory and a smaller disk.
            if self.step == self.components.total_steps:
                with suppress(CheckpointError):
                    self.export()
            raise
        with self.world.raise_on_all_ranks():
            self.summary.check_skipped_updates("actor", self.config.actor.max_skipped_updates)
            self.summary.check_skipped_updates("critic", self.config.critic.max_skipped_updates)
        self._interruption.check()

    def finish(self) -> None:
        """Export the policy, write the summary, draw the learning curve."""
        if self.config.trainer.val_only and not self.config.trainer.val_before_train:
            self.log_step(self.validate())
        self.export()
        self.finish_checkpoint()
        self.summary.steps = self.step
        self._count_seconds()
        if self.world.is_main:
            self.summary.save(self.folder / "summary.json")
        self.run_logger.plot()

    # Stages.

    def load_prompts(self) -> Sequence[Prompt]:
        """Load the next batch of all ranks."""
        indices = self.components.order.next_batch(self.config.prompts_per_rollout)
        return self.components.data.train.select(indices)

    def roll_out(
        self, prompts: Sequence[Prompt], *plans: SamplingPlan
    ) -> list[AsyncRolloutRequest]:
        """Sample this rank's share of the prompts by each plan, and score the samples.

        The reward model scores here too, so that groups are filtered by the combined reward.

        Raises:
            RolloutError: on every rank, if too much of the batch failed.
        """
        parts = self.components
        requests = parts.sampler.make_requests(self.step, prompts, plans)
        finished: list[AsyncRolloutRequest] = []
        with (
            self._interruption.together(),
            self.run_logger.requests_bar(f"rollout {plans[0].name}", len(requests)) as count,
        ):
            scored = drive_and_score(
                parts.manager,
                parts.setup.plugins.rewards,
                requests,
                on_finished=count,
                timer=self._timer,
            )
            finished += self._interruption.run(self._runner, scored)
        self.score_with_reward_model(finished)
        self._tracer.add(self.step, finished)
        failures = FailureSummary.merge(self.world.gather(FailureSummary.of(finished)))
        self._failures.append(failures)
        try:
            with self.world.raise_on_all_ranks():
                parts.manager.apply_failure_policy(finished, failures)
        except RolloutError:
            parts.files.save_refused(self.step, finished, plans[0].name)
            raise
        return finished

    def score_with_reward_model(self, finished: Sequence[AsyncRolloutRequest]) -> None:
        """Add the reward model's scores, if the run has a reward model. A collective."""
        if (reward_model := self.components.reward_model) is not None:
            with self._timer("reward_model"):
                reward_model.score(finished, self._runner.run)

    def sample(self, prompts: Sequence[Prompt]) -> list[AsyncRolloutRequest]:
        """Sample the prompts as training does (`rollout.n` times each), and score the samples.

        Raises:
            RolloutError: on every rank, if too much of the batch failed.
        """
        return self.roll_out(prompts, self.components.manager.train_plan())

    def collate(self, requests: Sequence[AsyncRolloutRequest]) -> DataProto:
        """Turn requests into tensors that have the same width on all ranks."""
        prompt_width, response_width = map(int, self.world.max(widest(requests)))
        return collate(
            requests,
            pad_token_id=self.components.setup.pad_token_id,
            reward=self.config.reward,
            segment_credit=self.config.algorithm.segment_credit,
            processor=self.components.setup.processor,
            prompt_width=prompt_width,
            response_width=response_width,
        )

    def compute_log_probs(self, batch: DataProto) -> None:
        """Add the log-probabilities of the policy before its update, and of the reference.

        Those of the policy are left out if the update computes them.
        """
        parts, temperature = self.components, self.config.rollout.temperature
        parts.credit.add_log_probs(
            batch, parts.actor, parts.reference, self._timer, temperature=temperature
        )

    def compute_values(self, batch: DataProto) -> None:
        """Add the values of the critic before its update, if there is one."""
        if (critic := self.components.critic) is not None:
            with self._timer("values"):
                values = critic.compute_values(batch)
            batch.union(DataProto.from_dict({"values": values}))

    def compute_advantages(self, batch: DataProto) -> dict[str, float]:
        """Add token rewards, advantages and returns; return their metrics."""
        return self.components.credit.compute(batch)

    def update_critic(self, batch: DataProto) -> UpdateResult:
        """Train the critic, if there is one, on the returns of the batch."""
        if (critic := self.components.critic) is None:
            return UpdateResult({})
        with self._timer("update_critic"):
            result = critic.update_critic(batch)
        self.summary.note_update("critic", result)
        return result

    def update_actor(self, batch: DataProto) -> UpdateResult:
        """Train the policy on the batch, after the steps that warm up the critic."""
        if self.components.critic and self.step <= self.config.trainer.critic_warmup:
            return UpdateResult({"actor/optimizer_steps": 0.0})
        temperature = self.config.rollout.temperature
        with self._timer("update_actor"):
            result = self.components.actor.update_policy(batch, temperature=temperature)
        self.summary.note_update("actor", result)
        return result

    def sync_weights(self) -> None:
        """Send the policy's weights to the engine and raise the policy version."""
        self.policy_version = self.step
        with self._timer("sync_weights"):
            self._runner.run(self.engine_sync.sync(self.policy_version))
        if (pool := self.components.rollout_pool) is not None:
            pool.use_version(self.policy_version)

    def validate(self) -> dict[str, float]:
        """Roll out and score every validation set; return the metrics over all ranks."""
        parts, reward = self.components, self.config.reward
        sets = {name: rows for name, rows in parts.data.val.items() if rows}
        if not sets:
            return {}
        metrics: dict[str, float] = {}
        with self._timer("validate"):
            for name, rows in sets.items():
                plan, size = parts.manager.val_plan(name), self.config.data.val_batch_size
                requests: list[AsyncRolloutRequest] = []
                for start in range(0, len(rows), size or len(rows)):
                    prompts = rows[start : start + (size or len(rows))]
                    requests += self.roll_out(prompts, plan._replace(index_offset=start))
                parts.files.save_validation(self.step, requests, name)
                outcomes = self.world.gather_flat([read_outcome(one, reward) for one in requests])
                if name not in self._success_rules:
                    self._success_rules[name] = describe_success(name, outcomes)
                    self.run_logger.info(self._success_rules[name])
                metrics |= validation_metrics(name, outcomes)
        success = {name: metrics[f"val/{name}/success"] for name in sets}
        self.summary.note_validation(
            self.step, success, int(metrics[f"val/{next(iter(sets))}/num"])
        )
        return metrics | {"timing_s/validate": self._timer.pop_metrics()["timing_s/validate"]}

    # Logs and files.

    def measure(
        self, samples: StepSamples, batch: DataProto, updated: Mapping[str, Sequence[int]]
    ) -> dict[str, float]:
        """Measure a training step over all ranks.

        Args:
            samples: Everything that was rolled out for the step.
            batch: The rows made from it.
            updated: By update: the length of each row of this rank that it computed.
        """
        seconds = self._timer.pop_metrics()
        mine = {
            **step_metrics(samples.sampled, batch, seconds),
            **reward_metrics(samples.sampled, self.config.reward),
            **samples.metrics,
            **self.engine_sync.metrics(),
            **self._efficiency.metrics(samples.sampled, batch, seconds, updated),
        }
        if self.components.cluster is not None:
            mine |= pool_metrics(self.config, seconds)
        if self.components.rollout_pool is not None:
            mine |= traffic_metrics(self._count_traffic() - self._traffic)
        metrics = compute_values(merge_metrics(self.world.gather(mine)))
        self.summary.note_signal(metrics)
        return {
            **metrics,
            **compute_throughput(metrics, self.world.size),
            "training/global_step": float(self.step),
            "training/epoch": float(self.components.order.epoch),
            "training/policy_version": float(self.policy_version),
        }

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log a step's metrics, and one line on the tools and scorers that failed in it."""
        self.run_logger.track(self.step, metrics)
        self._tracer.end_step(self.step, self._timer.pop_intervals())
        failures, self._failures = self._failures, []
        if text := FailureSummary.merge(failures).describe():
            self.run_logger.info(f"{'':>8}step {self.step}: {text}")

    def save_last_step(self) -> None:
        """Save the last completed step, unless it is saved. A collective.

        Prompts and random numbers that a later step has taken are restored first.
        """
        self.finish_checkpoint()
        if self._last.is_overwritten():
            self.run_logger.info(
                f"step {self.step} ended after it had changed the weights, so the step before it "
                f"cannot be saved; last checkpoint: {self.summary.checkpoint or 'none'}"
            )
        elif self.components.total_steps and (snapshot := self._last.restore()):
            self.step = snapshot.step
            self.summary = self.summary.restored(snapshot.summary)
            if snapshot.unlogged is not None:
                with self.run_logger.ignoring_write_errors("the metrics of the last step"):
                    self.run_logger.track(self.step, snapshot.unlogged, is_complete=False)
            if not self._checkpointer.has(self.step):
                self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Write the whole run to disk, and wait until it is complete."""
        self.start_checkpoint()
        self.finish_checkpoint()

    def start_checkpoint(self) -> None:
        """Copy the state of the whole run, and write it to disk in the background."""
        self.finish_checkpoint()
        self._count_seconds()
        self.summary.note_checkpoint(self.step)
        self._checkpointer.start(self.step, self.summary, self._last.unlogged)

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete."""
        if (path := self._checkpointer.finish()) is not None:
            self.summary.checkpoint = str(path)
            self.run_logger.info(f"checkpoint: {path}")

    def export(self) -> None:
        """Write the policy as a Hugging Face folder."""
        if self.components.total_steps:
            self.summary.exported = str(self._checkpointer.export(self.step, self.summary))

    # The end.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release plug-ins, engine, log files and event loop; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._checkpointer.close()
            self._runner.run(self._release())
        finally:
            self._runner.close()
            self._profiler.close()
            self._tracer.close()
            self.run_logger.close()

    async def _release(self) -> None:
        try:
            if (pool := self.components.rollout_pool) is not None:
                await pool.close()
            await self.components.setup.plugins.shutdown()
        finally:
            await self.components.engine.close()

    def _save_after_error(self, error: Exception) -> None:
        """Save the last completed step before an error ends the run.

        All ranks must save together, so this is possible only if all of them know of the error. If
        saving itself failed, it would fail again.
        """
        if not (self.world.is_alone or error is self.world.status.shared_error):
            return
        try:
            self.finish_checkpoint()
            if not isinstance(error, CheckpointError):
                self.save_last_step()
        except Exception as second:  # noqa: BLE001 - the first error is the one to report
            self.run_logger.info(f"the last completed step could not be saved: {second}")

    def _is_due(self, frequency: int) -> bool:
        """Return whether an action of every so many steps, and of the last step, is due."""
        is_last = self.step == self.components.total_steps
        return is_last or (frequency > 0 and self.step % frequency == 0)

    def _count_traffic(self) -> Traffic:
        pool = self.components.rollout_pool
        return Traffic() if pool is None else pool.traffic

    def _count_seconds(self) -> None:
        now = time.monotonic()
        self.summary.seconds_total += now - self._started
        self._started = now
