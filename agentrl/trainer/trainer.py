"""The loop. It reads like the data's way:

    data/         a row of a dataset        -> Prompt
    rollout/      Prompt x group size       -> AsyncRolloutRequest, PENDING ... COMPLETED | FAILED
    rewards/      a finished request        -> rewards per turn and per trajectory
    collate.py    finished requests         -> DataProto: the first tensors, [B, T]
    training/     DataProto                 -> log-probabilities of the policy and its reference
    algorithms/   DataProto                 -> advantages, returns
    training/     DataProto                 -> new weights
    weight_sync   new weights               -> the engine, policy version + 1
    checkpoint    the whole run             -> disk, and back

On several ranks (torchrun) every rank runs this loop on its own share of the prompts. Groups stay
whole on a rank, and the main rank alone writes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl.algorithms import compute_advantage
from agentrl.collate import collate
from agentrl.config.schema import RunConfig
from agentrl.data.prompt import Prompt
from agentrl.protocol import DataProto
from agentrl.rollout.manager import SamplingPlan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.build import Parts, start_parts
from agentrl.trainer.merge import RankMetrics, merge_metrics
from agentrl.trainer.metrics import Timer, batch_metrics, perf_metrics, rollout_metrics
from agentrl.trainer.resume import (
    check_origin,
    checkpoint_folder,
    config_digest,
    find_checkpoint,
    policy_origin,
    set_aside_superseded,
)
from agentrl.trainer.rollout_log import rollout_path, save_rollouts
from agentrl.trainer.summary import Summary
from agentrl.trainer.validation import Outcome, read_outcome, validation_metrics
from agentrl.training.checkpoint import RunState
from agentrl.training.snapshot import export_hf, identify, load_run, save_run
from agentrl.training.weight_sync import sync_weights


class Trainer:
    """Train a policy as a run file says.

    Args:
        config: The checked configuration.
        parts: What the loop works with; built from the configuration where it is not given.

    Example:
        >>> from agentrl import Trainer, load_config
        >>> summary = Trainer(load_config("run.yaml")).fit()
    """

    def __init__(self, config: RunConfig, parts: Parts | None = None) -> None:
        self.config = config
        self.parts = parts or start_parts(config)
        self.world = self.parts.world
        self.folder = config.trainer.default_local_dir
        self.step = 0
        self.policy_version = 0
        self.summary = Summary(seed=config.trainer.seed)
        self._timer = Timer()
        self._runner = asyncio.Runner()
        self._started = time.monotonic()

    # The loop.

    def fit(self) -> Summary:
        """Train to the last step, validate, save; returns what came of it.

        Ctrl-C ends it: tools are released, finished steps and checkpoints stand.
        """
        try:
            self.resume()
            self.summary.count_preparation(self.parts.seconds_prepare)
            self.sync_weights()
            self.parts.journal.open(resumed_step=self.step or None)
            if self.step == 0 and self.config.trainer.val_before_train and self.parts.data.val:
                self.parts.journal.track(0, self.validate())
            while self.step < self.parts.total_steps:
                metrics = self.train_step()
                if self._is_due(self.config.trainer.test_freq):
                    metrics |= self.validate()
                self.parts.journal.track(self.step, metrics)
                if self._is_due(self.config.trainer.save_freq):
                    self.save_checkpoint()
            return self.finish()
        finally:
            self.close()

    def train_step(self) -> dict[str, float]:
        """One step of the data's way, from prompts to new weights in the engine."""
        self.step += 1
        with self._timer("step"):
            prompts = self.load_prompts()
            requests = self.roll_out(prompts, self.parts.manager.train_plan())
            batch = self.collate(requests)
            self.compute_log_probs(batch)
            compute_advantage(batch, self.config.algorithm)
            update = self.update_actor(batch)
            self.sync_weights()
        self.save_rollouts(requests, "step")
        return self.measure(requests, batch) | update

    def finish(self) -> Summary:
        """Export the policy, write the summary, draw the curve."""
        if self.config.trainer.val_only and not self.config.trainer.val_before_train:
            self.parts.journal.track(self.step, self.validate())
        if self.parts.total_steps:
            self.export()
        self.summary.steps = self.step
        self._count_seconds()
        if self.world.is_main:
            self.summary.save(self.folder / "summary.json")
        self.parts.journal.plot()
        return self.summary

    # Its stations.

    def load_prompts(self) -> Sequence[Prompt]:
        """This rank's share of the next batch."""
        places = self.parts.order.next_batch(self.config.data.train_batch_size)
        # Dealt in turn, so that mini-batches are those of one rank.
        return self.parts.data.train.select(places[self.world.rank :: self.world.size])

    def roll_out(self, prompts: Sequence[Prompt], plan: SamplingPlan) -> list[AsyncRolloutRequest]:
        """Sample the prompts' groups and score what came of them."""
        manager = self.parts.manager
        requests = manager.make_requests(prompts, plan, step=self.step)
        with self.parts.journal.bar(plan.name, len(requests)) as advance:
            with self._timer("gen"):
                rolled_out = manager.rollout(requests, on_finished=lambda _: advance(1))
                finished = self._runner.run(rolled_out)
            with self._timer("reward"):
                self._runner.run(self.parts.setup.plugins.rewards.score(finished))
            manager.apply_failure_policy(finished)
        return finished

    def collate(self, requests: Sequence[AsyncRolloutRequest]) -> DataProto:
        """Turn requests into tensors."""
        reward = self.config.reward
        return collate(
            requests,
            pad_token_id=self.parts.setup.pad_token_id,
            weights=reward.weights,
            placement=reward.placement,
        )

    def compute_log_probs(self, batch: DataProto) -> None:
        """Add `old_log_probs`, their entropies, and the reference's log-probabilities."""
        temperature = self.config.rollout.temperature
        with self._timer("old_log_prob"):
            scores = self.parts.actor.compute_log_probs(batch, temperature=temperature)
        found = {"old_log_probs": scores.log_probs, "entropies": scores.entropy}
        if self.parts.reference is not None:
            with self._timer("ref"):
                found["ref_log_prob"] = self.parts.reference.compute_ref_log_prob(
                    batch, temperature=temperature
                )
        batch.union(DataProto.from_dict(found))

    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Train on the batch; a step that was skipped is told."""
        with self._timer("update_actor"):
            result = self.parts.actor.update_policy(
                batch, temperature=self.config.rollout.temperature
            )
        for skipped in result.skipped:
            self.parts.journal.say(f"step {self.step}: an optimizer step was skipped: {skipped}")
        return result.metrics

    def sync_weights(self) -> None:
        """Bring the engine to the policy's weights and raise the policy's version."""
        self.policy_version = self.step
        with self._timer("sync_weights"):
            self._runner.run(
                sync_weights(
                    self.parts.actor.policy, self.parts.engine, version=self.policy_version
                )
            )

    def validate(self) -> dict[str, float]:
        """Roll out and score every validation set; returns its figures, over all ranks."""
        if not self.parts.data.val:
            return {}
        metrics: dict[str, float] = {}
        with self._timer("validate"):
            for name in self.parts.data.val:
                metrics |= validation_metrics(name, self._validate_set(name))
        success = {name: metrics[f"val/{name}/success"] for name in self.parts.data.val}
        first = next(iter(success))
        self.summary.note_validation(self.step, success, int(metrics[f"val/{first}/num"]))
        return metrics | {"timing_s/validate": self._timer.pop_metrics()["timing_s/validate"]}

    def _validate_set(self, name: str) -> list[Outcome]:
        rows = self.parts.data.val[name]
        mine = rows.select(range(self.world.rank, len(rows), self.world.size))
        size = self.config.data.val_batch_size or len(mine) or 1
        requests: list[AsyncRolloutRequest] = []
        for start in range(0, len(mine), size):
            plan = self.parts.manager.val_plan(name)
            requests += self.roll_out(mine[start : start + size], plan)
        self.save_rollouts(requests, f"val_{name}")
        return self.world.gather_flat([read_outcome(request) for request in requests])

    # What it leaves behind.

    def measure(
        self, requests: Sequence[AsyncRolloutRequest], batch: DataProto
    ) -> dict[str, float]:
        """Describe a training step, merged over the ranks."""
        timing = self._timer.pop_metrics()
        tokens = sum(r.num_prompt_tokens + r.num_response_tokens for r in requests)
        mine = (
            rollout_metrics(requests)
            | batch_metrics(batch)
            | perf_metrics(tokens, timing["timing_s/step"])
            | timing
        )
        merged = merge_metrics(self.world.gather(RankMetrics(mine, weight=len(requests))))
        return merged | {
            "training/global_step": float(self.step),
            "training/epoch": float(self.parts.order.epoch),
            "training/policy_version": float(self.policy_version),
        }

    def save_rollouts(self, requests: Sequence[AsyncRolloutRequest], kind: str) -> None:
        """Save rollouts as JSONL, where the configuration names a folder."""
        trainer = self.config.trainer
        folder = trainer.rollout_data_dir if kind == "step" else trainer.validation_data_dir
        if folder is None:
            return
        everyone = self.world.gather_flat(requests)
        if self.world.is_main:
            save_rollouts(rollout_path(folder, self.step, kind), everyone, step=self.step)

    def save_checkpoint(self) -> None:
        """Write the whole run to disk."""
        self._count_seconds()
        state = RunState(
            step=self.step,
            identity=identify(self.parts.actor.policy),
            config_digest=config_digest(self.config),
            origin=policy_origin(self.config),
            trainer=asdict(self.summary),
            data=self.parts.order.state_dict(),
        )
        path = save_run(
            checkpoint_folder(self.config),
            self.parts.actor,
            state,
            keep=self.config.trainer.max_ckpt_to_keep,
        )
        self.summary.checkpoint = str(path)
        seconds = time.monotonic() - self._started
        self.parts.journal.say(f"checkpoint: {path}, {seconds:.1f} s")

    def export(self) -> None:
        """Write the policy as a plain Hugging Face folder."""
        folder = self.folder / "trained"
        export_hf(self.parts.actor.policy, self.parts.setup.tokenizer, folder)
        self.summary.exported = str(folder)

    def resume(self) -> None:
        """Go on from a checkpoint, where the configuration asks for it and there is one.

        Raises:
            CheckpointError: for one that is damaged, or of another model.
            DataError: where the data is not what the run began with.
        """
        path = self.world.broadcast(find_checkpoint(self.config))
        if path is not None:
            self._go_on_from(path)
        if self.world.is_main:
            for moved in set_aside_superseded(self.config, path, self.step):
                self.parts.journal.say(f"another run's checkpoint was moved to {moved}")
        self.world.barrier()

    def _go_on_from(self, path: Path) -> None:
        state = load_run(path, self.parts.actor)
        check_origin(state.origin, self.config, path)
        self.parts.order.load_state_dict(state.data)
        self.step = state.step
        self.summary = Summary(**state.trainer)
        self.summary.checkpoint = str(path)
        self.parts.journal.say(f"resumed from {path} at step {self.step}")
        if state.config_digest != config_digest(self.config):
            self.parts.journal.say(
                "the run's configuration is not the checkpoint's: the run's own holds from here on"
            )
        if self.step >= self.parts.total_steps:
            self.parts.journal.say(
                f"all {self.parts.total_steps} steps are done: raise trainer.total_training_steps "
                "to go on, or set trainer.resume_mode=disable to begin anew"
            )

    def close(self) -> None:
        """Let go of the engine, the tracker and the event loop; may be called twice."""
        self.parts.journal.close()
        try:
            self._runner.run(self.parts.engine.close())
        finally:
            self._runner.close()

    def _is_due(self, frequency: int) -> bool:
        """Whether something that happens every so many steps, and after the last, happens now."""
        is_last = self.step == self.parts.total_steps
        return is_last or (frequency > 0 and self.step % frequency == 0)

    def _count_seconds(self) -> None:
        now = time.monotonic()
        self.summary.seconds_total += now - self._started
        self._started = now
