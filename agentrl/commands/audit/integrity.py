"""Check that the files and weights of a run are those that it wrote, and that none is missing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image

from agentrl.commands.audit.saved_run import TRAIN, VAL, Check, SavedRun, Step
from agentrl.errors import DataError
from agentrl.trainer.rollouts.digests import DIGESTS_FILE, digest_file, read_digests
from agentrl.trainer.rollouts.files import SKIPPED
from agentrl.trainer.rollouts.line_files import RolloutFile, find_later_files
from agentrl.trainer.rollouts.pictures import digest_picture
from agentrl.workers.checkpoint import WEIGHT, Checkpoint, open_checkpoint
from agentrl.workers.shards import LocalSlice
from agentrl.workers.weight_files import digest_weights, sum_placed_bits


def check_digests(check: Check, run: SavedRun) -> dict[int, str]:
    """Check the digests of all rollout files; return those of weights, by version."""
    recorded = dict[int, str]()
    for folder in (*run.folders, run.folder / SKIPPED):
        if not (files := find_later_files(folder, -1)):
            continue
        with check.collecting(folder / DIGESTS_FILE):
            for step, digest in _check_folder(check, run, folder, files).items():
                if step not in recorded or folder.resolve() == run.folder_of(step, TRAIN):
                    recorded[step] = digest
    return recorded


def _check_folder(
    check: Check, run: SavedRun, folder: Path, files: Sequence[Path]
) -> dict[int, str]:
    known = read_digests(folder)
    for one in known:
        check.num += 1
        if one.is_of_weights:
            continue
        path = folder / one.file
        with check.collecting(path):
            if not path.is_file():
                raise DataError(f"{one.file} is missing", file=folder / DIGESTS_FILE)
            if (found := digest_file(path)) != one.digest:
                raise DataError("the file was changed", file=path, saved=one.digest, found=found)
    names = {one.file for one in known}
    last = max((one.step for one in known), default=0)
    for path in files:
        if path.name not in names:
            label = path.name.split(".")[0]
            kind, _, number = label.rpartition("_")
            file = RolloutFile(path, label, kind, int(number))
            is_current = folder == run.folder / SKIPPED or run.is_current(file)
            if is_current and run.is_complete(file) and file.step <= last:
                raise DataError("the file has no digest", file=path)
            # A run that was killed between both writes repeats the step when it resumes.
            check.not_done = f"{path.name} has no digest: the run ended before it was written"
    return {one.step: one.digest for one in known if one.is_of_weights}


def check_steps(check: Check, run: SavedRun) -> None:
    """Check that each step and validation whose start saved rollouts has a file."""
    if left_out := sorted({file.step for file in run.files if not run.is_complete(file)}):
        steps = ", ".join(map(str, left_out))
        check.not_done = f"not done for step {steps}, which the run did not complete"
    saved, training = {(file.kind, file.step) for file in run.files}, set(run.training_steps)
    for step, metrics in run.logged.items():
        saving = run.start_of(max(step, 1)).config.trainer
        kinds = list[str]()
        if saving.rollout_data_dir is not None and step in training:
            kinds.append(TRAIN)
        if saving.validation_data_dir is not None:
            kinds += [VAL + name for name in _validated(metrics)]
        for kind in kinds:
            if (kind, step) not in saved:
                raise DataError("the step has no file of rollouts", step=step, kind=kind)


def _validated(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the validation sets that metrics are of."""
    names = (name.removeprefix("val/").removesuffix("/num") for name in metrics)
    return [name for name in names if f"val/{name}/num" in metrics]


def check_recorded(run: SavedRun, recorded: Mapping[int, str]) -> None:
    """Check that the weights after each step have a digest, if the step's start recorded them."""
    for step in run.training_steps:
        if run.start_of(step).records_weights and step not in recorded:
            raise DataError("the weights after a step have no digest", step=step)


def check_weights(check: Check, run: SavedRun, recorded: Mapping[int, str]) -> None:
    """Compare the weights of each checkpoint with the digest of its step."""
    found = run.checkpoints
    if unknown := sorted(found.keys() - recorded.keys()):
        check.not_done = f"no digest of weights after step {', '.join(map(str, unknown))}"
    for step, path in sorted(found.items()):
        with check.collecting(path):
            checkpoint = open_checkpoint(path)
            if step > max(run.logged, default=0) and checkpoint.state.unlogged is None:
                raise DataError("the step of a checkpoint has no metrics", file=path)
            if step not in recorded:
                continue
            check.num += 1
            if (digest := digest_checkpoint(checkpoint)) != recorded[step]:
                raise DataError(
                    "the weights are not those that the run had after the step",
                    file=path, saved=recorded[step], found=digest,
                )  # fmt: skip


def digest_checkpoint(checkpoint: Checkpoint) -> str:
    """Compute the digest of the policy's trained weights in a checkpoint."""

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in checkpoint.state.identity.shapes.items():
            weight = torch.empty(shape)
            part = LocalSlice(weight, tuple(shape), (0,) * len(shape))
            checkpoint.read({WEIGHT + name: part})
            yield name, weight

    return digest_weights(read(), None, sum_placed_bits)


def check_versions(check: Check, step: Step, run: SavedRun, recorded: Mapping[int, str]) -> None:
    """Check that the weights before a step sampled each turn, and that their digest is recorded."""
    version = step.number - 1 if step.file.kind == TRAIN else step.number
    for request in step.requests:
        for one in request.sequences:
            for turn in one.turns:
                check.num += 1
                if any(span.version != version for span in turn.weight_versions):
                    raise DataError(
                        f"turn {turn.index} was sampled by weights of another step",
                        file=step.path, request=one.request_id, saved=turn.weight_versions,
                        expected=f"version {version}",
                    )  # fmt: skip
    if version not in recorded:
        if run.start_of(max(version, 1)).records_weights:
            raise DataError(
                "turns were sampled by weights without a digest", file=step.path, version=version
            )
        check.not_done = "no digests of the weights of some versions: no start recorded them"


def check_pictures(check: Check, step: Step, known: set[str]) -> None:
    """Check the names of pictures, which are digests of their pixels; videos are left out.

    Args:
        check: Counts the pictures.
        step: The step.
        known: Files that were checked for other steps; those of this step are added.
    """
    for request in step.requests:
        for one in request.sequences:
            for shown in one.multi_modal_data.get("image", ()):
                where = {"file": step.path, "request": request.request_id}
                if isinstance(shown, dict) and "thumbnail" in shown:
                    raise DataError(f"{shown['path']} is missing", **where)
                path = shown.info.get("path") if isinstance(shown, Image.Image) else None
                if path is None or path in known:
                    continue
                known.add(path)
                check.num += 1
                with Image.open(path) as picture:
                    name = digest_picture([picture])
                if name != Path(path).stem:
                    raise DataError("the picture was changed", picture=path, **where)
