"""Save a run, and load it again: checkpoints, and the exported policy."""

from dataclasses import asdict, replace
from pathlib import Path

from agentrl.config.schema.run import RunConfig
from agentrl.trainer.components import TrainerComponents
from agentrl.trainer.credit import CREDIT
from agentrl.trainer.state.data_fingerprint import RECORD
from agentrl.trainer.state.resume import (
    archive_earlier_outputs,
    check_origin,
    checkpoint_folder,
    config_digest,
    find_checkpoint,
    policy_origin,
)
from agentrl.trainer.state.run_folder import STARTED_AS, changed_keys, write_start
from agentrl.trainer.state.summary import Summary
from agentrl.workers.checkpoint import RunState
from agentrl.workers.snapshot import export_hf, identify, load_run, on_main, save_run


class Checkpointer:
    """Saves and loads the state of a run. Every method is a collective.

    Args:
        config: The run's configuration.
        components: The objects with the state to save: actor, order, credit.
    """

    def __init__(self, config: RunConfig, components: TrainerComponents) -> None:
        self._config = config
        self._components = components
        self._world = components.world
        self._folder = config.trainer.default_local_dir
        self._digest = config_digest(
            config, total_steps=components.total_steps, device=self._world.device.type
        )
        self._start = ""

    def load(self) -> RunState | None:
        """Load the checkpoint that `trainer.resume_mode` asks for, if there is one.

        Outputs of an earlier run are archived, and the start is recorded in the run's folder.

        Raises:
            CheckpointError: if the checkpoint is damaged, or of another model.
            DataError: if the data is not the data that the run began with.
        """
        config, world = self._config, self._world
        path = on_main(world, lambda: find_checkpoint(config))
        state = None if path is None else self._load(path)
        step = 0 if state is None else state.step
        archived = on_main(world, lambda: archive_earlier_outputs(config, path, step))
        self._components.run_logger.info(*archived.describe())
        self._start = on_main(
            world, lambda: write_start(self._folder, config, num_ranks=world.size)
        )
        return state

    def _load(self, path: Path) -> RunState:
        parts = self._components
        state = load_run(path, parts.actor)
        with self._world.raise_on_all_ranks():
            check_origin(state.origin, self._config, path)
        parts.order.load_state_dict(state.data)
        parts.credit.load_state_dict(state.trainer.pop(CREDIT, {}))
        start = path.resolve().parents[1] / state.trainer.pop(STARTED_AS, "")
        state.trainer["checkpoint"] = str(path)
        lines = [f"resumed from {path} at step {state.step}"]
        changes = changed_keys(start, self._config)
        if state.config_digest != self._digest:
            lines.append(
                "the run's configuration differs from the checkpoint's; the run's applies from now"
            )
        lines += [f"  changed: {change}" for change in changes]
        if state.step >= parts.total_steps:
            lines.append(
                f"all {parts.total_steps} steps are done: raise trainer.total_training_steps to "
                "train further, or set trainer.resume_mode=disable to start again"
            )
        parts.run_logger.info(*lines)
        return state

    def has(self, step: int) -> bool:
        """Return whether a step is saved."""
        folder = checkpoint_folder(self._config) / f"global_step_{step}"
        return on_main(self._world, folder.is_dir)

    def save(self, step: int, summary: Summary, unlogged: dict[str, float] | None) -> Path:
        """Write the whole run to disk.

        Args:
            step: The step.
            summary: The summary of the run so far.
            unlogged: Metrics of the step that are not logged yet.
        """
        parts = self._components
        state = RunState(
            step=step,
            identity=identify(parts.actor.policy),
            config_digest=self._digest,
            origin=policy_origin(self._config),
            trainer=asdict(replace(summary, checkpoint=None))
            | {CREDIT: parts.credit.state_dict(), STARTED_AS: self._start},
            data=parts.order.state_dict() | {RECORD: asdict(parts.record)},
            unlogged=unlogged,
        )
        folder, keep = checkpoint_folder(self._config), self._config.trainer.max_ckpt_to_keep
        return save_run(folder, parts.actor, state, keep=keep, best=summary.best_saved_step)

    def export(self, step: int, summary: Summary) -> Path:
        """Write the policy as a plain Hugging Face folder."""
        about = {
            "step": step,
            "val_success": summary.val_success_after,
            "best_step": summary.best_step,
        }
        folder = self._folder / "trained"
        policy, tokenizer = self._components.actor.policy, self._components.setup.tokenizer
        export_hf(policy, tokenizer, folder, about=about)
        return folder
