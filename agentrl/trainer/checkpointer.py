"""Save a run, and load it again: checkpoints, and the exported policy."""

from dataclasses import asdict, replace
from pathlib import Path

from agentrl.config.schema.run import RunConfig
from agentrl.errors import CheckpointError, StoreError
from agentrl.remote_io import Location, RemotePath, upload_folder
from agentrl.trainer.components import TrainerComponents
from agentrl.trainer.credit import CREDIT
from agentrl.trainer.state.data_fingerprint import RECORD
from agentrl.trainer.state.model_card import write_card
from agentrl.trainer.state.resume import (
    archive_earlier_outputs,
    check_origin,
    checkpoint_folder,
    config_digest,
    find_checkpoint,
    policy_origin,
    saved_folder,
)
from agentrl.trainer.state.run_folder import STARTED_AS, changed_keys, write_start
from agentrl.trainer.state.summary import Summary
from agentrl.workers.checkpoint import MANIFEST, STATE, Checkpoint, RunState, reading
from agentrl.workers.export import ABOUT, export_adapter, export_hf
from agentrl.workers.snapshot import (
    RunningSave,
    identify,
    load_run,
    on_main,
    start_save,
)


class Checkpointer:
    """Saves and loads the state of a run. Every method except `close` is a collective.

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
        self._running: RunningSave | None = None

    @property
    def start_folder(self) -> Path:
        """Folder with the record of this start of the run, after `load`."""
        return self._folder / self._start

    def load(self) -> RunState | None:
        """Load the checkpoint that `trainer.resume_mode` asks for, if there is one.

        Outputs of an earlier run are archived, and the start is recorded in the run's folder.

        Raises:
            CheckpointError: if the checkpoint is damaged, or of another model.
            DataError: if the data is not the data that the run began with.
        """
        config, world = self._config, self._world
        checkpoint = find_checkpoint(config, world)
        path = None if checkpoint is None else checkpoint.path
        state = None if checkpoint is None else self._load(checkpoint)
        step = 0 if state is None else state.step
        archived = on_main(world, lambda: archive_earlier_outputs(config, path, step))
        self._components.run_logger.info(*archived.describe())
        self._start = on_main(
            world,
            lambda: write_start(self._folder, config, num_ranks=world.size, resumed_step=step),
        )
        return state

    def _load(self, checkpoint: Checkpoint) -> RunState:
        parts, path = self._components, checkpoint.path
        state = load_run(checkpoint, parts.actor, parts.critic)
        with self._world.raise_on_all_ranks():
            check_origin(state.origin, self._config, path)
        run = path.resolve().parents[1] if isinstance(path, Path) else self._folder
        with reading(path, STATE):
            parts.order.load_state_dict(state.data)
            parts.credit.load_state_dict(state.trainer.pop(CREDIT, {}))
            start = run / state.trainer.pop(STARTED_AS, "")
            Summary(**state.trainer)
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
                f"all {state.step} steps are done: raise trainer.total_training_steps to "
                "train further, or set trainer.resume_mode=disable to start again"
            )
        parts.run_logger.info(*lines)
        return state

    def has(self, step: int) -> bool:
        """Return whether a step is saved."""
        manifest = checkpoint_folder(self._config) / f"global_step_{step}" / MANIFEST
        return on_main(self._world, manifest.is_file)

    def start(self, step: int, summary: Summary, unlogged: dict[str, float] | None) -> None:
        """Copy the state of the whole run, and write it in the background.

        Args:
            step: The step.
            summary: The summary of the run so far.
            unlogged: Metrics of the step that are not logged yet.
        """
        parts = self._components
        self._world.status.enter(f"checkpoint of step {step}")
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
        self._running = start_save(
            folder, parts.actor, state,
            critic=parts.critic, keep=keep, best=summary.best_saved_step,
        )  # fmt: skip

    def is_written(self) -> bool:
        """Return whether a checkpoint was started and is written by now, or failed."""
        return self._running is not None and self._running.is_done()

    def finish(self) -> Location | None:
        """Wait for the checkpoint that is being written.

        Returns:
            Its folder; None if no checkpoint is being written.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        self._world.status.enter("checkpoint")
        return running.finish()

    def close(self) -> None:
        """End a write whose result no rank waits for, after an error. Not a collective."""
        running, self._running = self._running, None
        if running is not None:
            running.abandon()

    def export(self, step: int, summary: Summary) -> Location:
        """Write the policy as a plain Hugging Face folder, or its adapter as a folder of peft.

        Returns:
            The folder; in a store, if the run has one.

        Raises:
            CheckpointError: on every rank, if it cannot be written.
        """
        self._world.status.enter(f"export of step {step}")
        about = {
            "step": step,
            "val_success": summary.val_success_after,
            "best_step": summary.best_step,
            "tools": [tool.name for tool in self._components.setup.plugins.tools],
            "data_sources": sorted({p.data_source for p in self._components.data.train}),
        }
        folder = self._folder / "trained"
        policy, tokenizer = self._components.actor.policy, self._components.setup.tokenizer
        is_adapter = self._config.trainer.export == "adapter" and policy.adapters is not None
        write = export_adapter if is_adapter else export_hf
        write(policy, tokenizer, folder, about=about)
        on_main(self._world, lambda: self._write_card(folder))
        target = saved_folder(self._config) / folder.name
        if isinstance(target, RemotePath):
            on_main(self._world, lambda: self._upload(folder, target))
        return target

    def _write_card(self, model: Path) -> None:
        with self._components.run_logger.ignoring_write_errors("the model card"):
            write_card(self._folder, model)

    def _upload(self, folder: Path, target: RemotePath) -> None:
        try:
            upload_folder(folder, target, marker=ABOUT)
        except StoreError as error:
            raise CheckpointError(
                f"cannot write the model: {error.args[0]}",
                path=target,
                expected=f"a store that answers; the model is complete in {folder}",
            ) from error
