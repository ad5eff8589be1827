"""The loop. It reads like the data's way:

    data/         a row of a dataset        -> Prompt
    rollout/      Prompt x group size       -> AsyncRolloutRequest, PENDING ... COMPLETED | FAILED
    rewards/      a finished request        -> rewards per turn and per trajectory
    collate.py    finished requests         -> DataProto: the first tensors, [B, T]
    training/     DataProto                 -> log-probabilities of the policy and its reference
    algorithms/   DataProto                 -> corrections, advantages, returns
    training/     DataProto                 -> new weights
    weight_sync   new weights               -> the engine, policy version + 1
    checkpoint    the whole run             -> disk, and back

On several ranks (torchrun) every rank runs this loop on its own share of the samples. What compares
samples with each other (credit, failures, figures) sees those of all; the main rank alone writes.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from agentrl.collate import collate, widest
from agentrl.config.schema.run import RunConfig
from agentrl.data.rows import Prompt
from agentrl.engines import Engine
from agentrl.errors import CheckpointError
from agentrl.interactions import BaseInteraction
from agentrl.protocol import DataProto
from agentrl.rewards import drive_and_score
from agentrl.rewards.scoring import ScoreFn
from agentrl.rollout.failures import FailureSummary
from agentrl.rollout.manager import SamplingPlan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.scheduling import rare_gc
from agentrl.trainer.components import Parts, start_parts
from agentrl.trainer.credit import CREDIT
from agentrl.trainer.engine_sync import HandOver
from agentrl.trainer.interruption import AnyRunner, Interrupted, Interruption
from agentrl.trainer.log_probs import add_log_probs
from agentrl.trainer.metrics.aggregators import merge_figures, to_metrics
from agentrl.trainer.metrics.plugins import reward_figures
from agentrl.trainer.metrics.step import Timer, step_figures
from agentrl.trainer.sampling import StepSamples
from agentrl.trainer.setup.plugins import EngineFactory, Given, Row, Tool, given_rows
from agentrl.trainer.setup.preflight import with_absolute_paths
from agentrl.trainer.state.data_fingerprint import RECORD
from agentrl.trainer.state.last_step import LastStep
from agentrl.trainer.state.resume import (
    check_origin,
    checkpoint_folder,
    config_digest,
    find_checkpoint,
    policy_origin,
    set_aside_superseded,
)
from agentrl.trainer.state.run_folder import STARTED_AS, changed_keys, write_start
from agentrl.trainer.state.summary import Summary
from agentrl.trainer.validation import (
    Outcome,
    describe_success,
    read_outcome,
    validation_metrics,
)
from agentrl.workers.actor import UpdateResult
from agentrl.workers.checkpoint import RunState
from agentrl.workers.snapshot import export_hf, identify, load_run, on_main, save_run


class Trainer:
    """Train a policy as a run file says.

    Tools, interactions, the scorer, rows and the engine can be passed as Python objects, in the
    place of what a run file names by path (docs/library.md). It works under a running event loop.

    Args:
        config: The checked configuration.
        parts: What the loop works with; built from the configuration if it is not given.
        tools: Tools, and functions with `@function_tool`, besides those that the configuration
            names.
        interactions: Interactions, besides those that the configuration names.
        reward: The scorer: `(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`.
        rows: Training rows: mappings of columns, as files hold them, or prompts.
        val_rows: Validation rows, or sets of them by name.
        engine: An engine; or a function `(model, tokenizer) -> engine`.

    Raises:
        AgentRLError: with what, where and what was expected.

    Example:
        >>> from agentrl import Trainer, load_config
        >>> summary = Trainer(load_config("run.yaml")).fit()
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Parts | None = None,
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
        self.parts = parts or start_parts(config, given)
        self.world = self.parts.world
        self.folder = config.trainer.default_local_dir
        self.step = 0
        self.policy_version = 0
        self.summary = Summary(seed=config.trainer.seed)
        self.hand_over = HandOver.of(config, self.parts.engine, self.parts.actor.policy)
        self._timer = Timer(on_enter=self._tell_place)
        self._interruption = Interruption(self.world)
        self._last = LastStep(self.parts.order, self.parts.actor)
        self._runner = AnyRunner()
        self._is_closed = False
        self._failure_summaries: list[FailureSummary] = []
        self._start = ""
        self._success_rules: dict[str, str] = {}
        self._started = time.monotonic()

    # The loop.

    def fit(self) -> Summary:
        """Train to the last step, validate, save; returns what came of it.

        Ctrl-C and SIGTERM end it: tools are released, and the last finished step is saved. So it
        is where an error ends it that all ranks know of: too much of a batch failed, one could not
        roll out or score, the main one could not export. Of what one of several meets elsewhere
        (an update without memory, a kill) the others learn too late: the last checkpoint stands.

        Raises:
            KeyboardInterrupt: where it was asked to stop, be it while the end was written.
        """
        with rare_gc(), self._interruption.listening(), self.world.board.explaining():
            try:
                self.begin()
                while self.step < self.parts.total_steps:
                    self.end_step(self.train_step())
                self.finish()
                self._interruption.check()
                return self.summary
            except Interrupted:
                self.save_last_step()
                raise Interrupted(self.summary.at_stop(self._last.step)) from None
            except Exception as error:
                self._rescue(error)
                raise
            finally:
                self.close()

    def begin(self) -> None:
        """Go on from a checkpoint or begin anew, and measure the policy as it is."""
        self.resume()
        self._start = on_main(self.world, self._write_start)
        self.summary.count_preparation(self.parts.seconds_prepare)
        self.sync_weights()
        unlogged = self._last.unlogged
        # What the checkpoint's step left to log is logged now; a line that is there goes.
        logged = self.step if unlogged is None else self.step - 1
        self.parts.journal.open(
            resumed_step=logged if self.step else None, total_steps=self.parts.total_steps
        )
        if self.step == 0 and self.config.trainer.val_before_train and self.parts.data.val:
            self.log_step(self.validate())
        if unlogged is not None:
            self.end_step(unlogged)

    def train_step(self) -> dict[str, float]:
        """One step of the data's way, from prompts to new weights in the engine."""
        self.step += 1
        with self._timer("step"):
            samples = self.parts.sampler.take(self.step, self.load_prompts, self.roll_out)
            self.hand_over.sleep(self._runner)
            batch = self.collate(samples.batch)
            samples.add_baselines(batch)
            self.compute_log_probs(batch)
            credit = self.parts.credit.compute(batch)
            self._interruption.check()
            update = self.update_actor(batch)
            if update.metrics["actor/optimizer_steps"]:
                self.parts.credit.commit()
            # An engine that fails now fails behind a finished step, which can be saved.
            self._last.note(self.step, self.summary, unlogged=credit | update.metrics)
            self.sync_weights()
        self.parts.files.save_step(self.step, samples.everything)
        self.parts.files.save_skipped(self.step, samples.batch, update.skipped)
        return self.measure(samples, batch) | credit | update.metrics

    def end_step(self, metrics: dict[str, float]) -> None:
        """Validate and save where that is due, and log the step."""
        self._last.note(self.step, self.summary, unlogged=metrics)
        self._interruption.check()
        if self._is_due(self.config.trainer.test_freq):
            metrics = metrics | self.validate()
        self.log_step(metrics)
        self._last.note(self.step, self.summary)
        if self._is_due(self.config.trainer.save_freq):
            self.save_checkpoint()
        with self.world.agreeing():
            self.summary.refuse_to_idle(self.config.actor.max_skipped_updates)
        self._interruption.check()

    def finish(self) -> None:
        """Export the policy, write the summary, draw the curve."""
        if self.config.trainer.val_only and not self.config.trainer.val_before_train:
            self.log_step(self.validate())
        if self.parts.total_steps:
            self.export()
        self.summary.steps = self.step
        self._count_seconds()
        if self.world.is_main:
            self.summary.save(self.folder / "summary.json")
        self.parts.journal.plot()

    # Its stations.

    def load_prompts(self) -> Sequence[Prompt]:
        """The next batch of all ranks."""
        places = self.parts.order.next_batch(self.config.prompts_per_rollout)
        return self.parts.data.train.select(places)

    def roll_out(
        self, prompts: Sequence[Prompt], *plans: SamplingPlan
    ) -> list[AsyncRolloutRequest]:
        """Sample the prompts by each plan, this rank its share, and score what came of them.

        Raises:
            RolloutError: on every rank, where too much of the batch failed.
        """
        manager, rewards = self.parts.manager, self.parts.setup.plugins.rewards
        requests = self.parts.sampler.make_requests(self.step, prompts, plans)
        finished: list[AsyncRolloutRequest] = []
        bar = self.parts.journal.bar(plans[0].name, len(requests))
        with self._interruption.together(), bar as advance:
            scored = drive_and_score(
                manager, rewards, requests, on_finished=lambda _: advance(1), timer=self._timer
            )
            finished += self._interruption.run(self._runner, scored)
        summary = FailureSummary.merge(self.world.gather(FailureSummary.of(finished)))
        self._failure_summaries.append(summary)
        with self.world.agreeing():
            manager.apply_failure_policy(finished, summary)
        return finished

    def sample(self, prompts: Sequence[Prompt]) -> list[AsyncRolloutRequest]:
        """Sample the prompts as training does (`rollout.n` times each), and score the samples.

        Raises:
            RolloutError: on every rank, if too much of the batch failed.
        """
        return self.roll_out(prompts, self.parts.manager.train_plan())

    def compute_advantages(self, batch: DataProto) -> dict[str, float]:
        """Add the tokens' rewards, advantages and returns; returns figures of them."""
        return self.parts.credit.compute(batch)

    def collate(self, requests: Sequence[AsyncRolloutRequest]) -> DataProto:
        """Turn requests into tensors, as wide as the widest of all ranks."""
        prompt_width, response_width = map(int, self.world.max(widest(requests)))
        return collate(
            requests,
            pad_token_id=self.parts.setup.pad_token_id,
            reward=self.config.reward,
            prompt_width=prompt_width,
            response_width=response_width,
        )

    def compute_log_probs(self, batch: DataProto) -> None:
        """Add those of the policy before its update, and of the reference."""
        temperature = self.config.rollout.temperature
        add_log_probs(batch, self.parts, self._timer, temperature=temperature)

    def update_actor(self, batch: DataProto) -> UpdateResult:
        """Train on the batch."""
        with self._timer("update_actor"):
            result = self.parts.actor.update_policy(
                batch, temperature=self.config.rollout.temperature
            )
        self.summary.note_update(result)
        return result

    def sync_weights(self) -> None:
        """Bring the engine to the policy's weights and raise the policy's version."""
        self.policy_version = self.step
        with self._timer("sync_weights"):
            self.hand_over.sync(self._runner, version=self.policy_version)

    def validate(self) -> dict[str, float]:
        """Roll out and score every validation set; returns its figures, over all ranks."""
        sets = [name for name, rows in self.parts.data.val.items() if rows]
        if not sets:
            return {}
        metrics: dict[str, float] = {}
        with self._timer("validate"):
            for name in sets:
                outcomes = self._validate_set(name)
                if name not in self._success_rules:
                    self._success_rules[name] = describe_success(name, outcomes)
                    self.parts.journal.say(self._success_rules[name])
                metrics |= validation_metrics(name, outcomes)
        success = {name: metrics[f"val/{name}/success"] for name in sets}
        self.summary.note_validation(self.step, success, int(metrics[f"val/{sets[0]}/num"]))
        return metrics | {"timing_s/validate": self._timer.pop_metrics()["timing_s/validate"]}

    def _validate_set(self, name: str) -> list[Outcome]:
        rows, plan = self.parts.data.val[name], self.parts.manager.val_plan(name)
        size = self.config.data.val_batch_size or len(rows)
        requests: list[AsyncRolloutRequest] = []
        for start in range(0, len(rows), size):
            requests += self.roll_out(rows[start : start + size], plan._replace(index_offset=start))
        self.parts.files.save_validation(self.step, requests, name)
        reward = self.config.reward
        return self.world.gather_flat([read_outcome(request, reward) for request in requests])

    # What it leaves behind.

    def measure(self, samples: StepSamples, batch: DataProto) -> dict[str, float]:
        """Describe a training step, merged over the ranks."""
        mine = step_figures(samples.sampled, batch, self._timer.pop_metrics())
        mine |= reward_figures(samples.sampled, self.config.reward)
        mine |= samples.figures | self.hand_over.figures()
        metrics = to_metrics(merge_figures(self.world.gather(mine)))
        self.summary.note_signal(metrics)
        return metrics | {
            "training/global_step": float(self.step),
            "training/epoch": float(self.parts.order.epoch),
            "training/policy_version": float(self.policy_version),
        }

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log the figures of a step, and in one line which tools and scorers failed in it."""
        self.parts.journal.track(self.step, metrics)
        summaries, self._failure_summaries = self._failure_summaries, []
        if troubles := FailureSummary.merge(summaries).describe():
            self.parts.journal.say(f"{'':>8}step {self.step}: {troubles}")

    def save_last_step(self) -> None:
        """Write the last finished step to disk, unless it is there. A collective.

        The run goes back to it: what a step that was begun has taken and drawn is given back.
        """
        if self._last.is_lost():
            self.parts.journal.say(
                f"step {self.step} ended after its weights had moved, and the one before it cannot "
                f"be saved any more; the last checkpoint: {self.summary.checkpoint or 'none'}"
            )
        elif self.parts.total_steps and (mark := self._last.go_back()):
            self.step = mark.step
            self.summary = self.summary.back_at(mark.summary)
            place = checkpoint_folder(self.config) / f"global_step_{mark.step}"
            if not on_main(self.world, place.is_dir):
                self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Write the whole run to disk."""
        self._count_seconds()
        self.summary.note_checkpoint(self.step)
        state = RunState(
            step=self.step,
            identity=identify(self.parts.actor.policy),
            config_digest=self._config_digest(),
            origin=policy_origin(self.config),
            trainer=asdict(replace(self.summary, checkpoint=None))
            | {CREDIT: self.parts.credit.state_dict(), STARTED_AS: self._start},
            data=self.parts.order.state_dict() | {RECORD: self.parts.record.to_json()},
            unlogged=self._last.unlogged,
        )
        path = save_run(
            checkpoint_folder(self.config),
            self.parts.actor,
            state,
            keep=self.config.trainer.max_ckpt_to_keep,
            best=self.summary.best_saved_step,
        )
        self.summary.checkpoint = str(path)
        seconds = time.monotonic() - self._started
        self.parts.journal.say(f"checkpoint: {path}, {seconds:.1f} s")

    def export(self) -> None:
        """Write the policy as a plain Hugging Face folder."""
        folder = self.folder / "trained"
        about = {
            "step": self.step,
            "val_success": self.summary.val_success_after,
            "best_step": self.summary.best_step,
        }
        export_hf(self.parts.actor.policy, self.parts.setup.tokenizer, folder, about=about)
        self.summary.exported = str(folder)

    def resume(self) -> None:
        """Go on from a checkpoint, where the configuration asks for it and there is one.

        Raises:
            CheckpointError: for one that is damaged, or of another model.
            DataError: where the data is not what the run began with.
        """
        path = on_main(self.world, lambda: find_checkpoint(self.config))
        if path is not None:
            self._go_on_from(path)
        moved = on_main(self.world, lambda: set_aside_superseded(self.config, path, self.step))
        self.parts.journal.say(*moved.in_words())

    def _go_on_from(self, path: Path) -> None:
        state = load_run(path, self.parts.actor)
        with self.world.agreeing():
            check_origin(state.origin, self.config, path)
        self.parts.order.load_state_dict(state.data)
        self.step = state.step
        self.parts.credit.load_state_dict(state.trainer.pop(CREDIT, {}))
        start = path.resolve().parents[1] / state.trainer.pop(STARTED_AS, "")
        self.summary = replace(Summary(**state.trainer), checkpoint=str(path))
        self._last.note(self.step, self.summary, unlogged=state.unlogged)
        self.parts.journal.say(f"resumed from {path} at step {self.step}")
        self._say_changes(start, state.config_digest)
        if self.step >= self.parts.total_steps:
            self.parts.journal.say(
                f"all {self.parts.total_steps} steps are done: raise trainer.total_training_steps "
                "to go on, or set trainer.resume_mode=disable to begin anew"
            )

    def _say_changes(self, start: Path, digest: str) -> None:
        """Name the keys that differ from those of the checkpoint's run."""
        changes = changed_keys(start, self.config)
        if digest != self._config_digest():
            self.parts.journal.say(
                "the run's configuration is not the checkpoint's: the run's own holds from here on"
            )
        self.parts.journal.say(*(f"  changed: {change}" for change in changes))

    def _write_start(self) -> str:
        return write_start(self.folder, self.config, num_ranks=self.world.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of plug-ins, engine, tracker and event loop; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._runner.run(self._release())
        finally:
            self._runner.close()
            self.parts.journal.close()

    async def _release(self) -> None:
        try:
            await self.parts.setup.plugins.shutdown()
        finally:
            await self.parts.engine.close()

    def _rescue(self, error: Exception) -> None:
        """Save the last finished step before an error ends the run.

        Ranks save together, so not where others do not know of the error. Where it is saving that
        failed, it would fail again.
        """
        is_shared = self.world.is_alone or error is self.world.board.shared
        if not is_shared or isinstance(error, CheckpointError):
            return
        try:
            self.save_last_step()
        except Exception as second:  # noqa: BLE001 - the first error is the one to tell
            self.parts.journal.say(f"the last finished step could not be saved: {second}")

    def _config_digest(self) -> str:
        steps, device = self.parts.total_steps, self.world.device.type
        return config_digest(self.config, total_steps=steps, device=device)

    def _tell_place(self, station: str) -> None:
        self.world.board.note(f"{station} of step {self.step}")

    def _is_due(self, frequency: int) -> bool:
        """Whether something that happens every so many steps, and after the last, happens now."""
        is_last = self.step == self.parts.total_steps
        return is_last or (frequency > 0 and self.step % frequency == 0)

    def _count_seconds(self) -> None:
        now = time.monotonic()
        self.summary.seconds_total += now - self._started
        self._started = now
