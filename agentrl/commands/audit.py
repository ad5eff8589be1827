"""`agentrl audit`: compute a run's account again from what it saved, and compare.

The functions are those of the run itself: collation, rewards, credit and metrics of each step are
computed from the saved requests, and compared with the saved tokens and the logged metrics.
"""

import json
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from agentrl.collate import collate
from agentrl.commands.resample import (
    TurnChoice,
    digest_checkpoint,
    find_checkpoints,
    resample,
)
from agentrl.config import RunConfig, parse_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.data.order import DataOrder
from agentrl.errors import AgentRLError, DataError
from agentrl.progress import NO_PROGRESS, Progress, ProgressDisplay
from agentrl.protocol import DataProto
from agentrl.rewards import combine_rewards, make_reward_manager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import ChatTemplate, check_request
from agentrl.trainer.credit import IS_COMPUTED, Credit, tensors_of
from agentrl.trainer.metrics.aggregators import compute_values
from agentrl.trainer.metrics.rollout import reward_metrics, rollout_metrics
from agentrl.trainer.metrics.sinks import METRICS_FILE, read_metrics
from agentrl.trainer.metrics.step import batch_metrics
from agentrl.trainer.rollouts.digests import DIGESTS_FILE, digest_file, read_digests
from agentrl.trainer.rollouts.files import SavedTrajectory, read_trajectories
from agentrl.trainer.rollouts.line_files import find_rollout_files
from agentrl.trainer.rollouts.token_files import TOKEN_COLUMNS, read_tokens, token_path
from agentrl.trainer.sampling import StepSamples, read_baselines
from agentrl.trainer.setup.plugins import Plugins, import_plugins
from agentrl.trainer.setup.rollout_setup import probe_model
from agentrl.trainer.state.resume import read_start_date
from agentrl.trainer.state.run_folder import RESOLVED, STARTS, check_run, find_last_start
from agentrl.workers.checkpoint import open_checkpoint

TOLERANCE = 1e-5
"""Largest difference, absolute plus relative, of two numbers that count as equal."""
_OF_MODELS = ("old_log_probs", "entropies", "ref_log_prob", "values")
"""Columns that a model computed: they are taken as they were saved."""


@dataclass
class Check:
    """One kind of check, over all steps."""

    name: str
    what: str
    num: int = 0
    """How many things were compared."""
    differences: list[AgentRLError] = field(default_factory=list[AgentRLError])
    not_done: str = ""
    """Why the check, or a part of it, was not done."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect a difference that the block raises. The rest of the block is not run."""
        try:
            yield
        except AgentRLError as error:
            self.differences.append(error)


WHAT = {
    "digests": "files of rollouts and tokens, and their chain",
    "lines": "trajectories: tokens, masks, turns, states; each once, all samples",
    "rewards": "combined rewards, and token rewards by their placement",
    "advantages": "masks, log-probabilities, advantages, returns of tokens",
    "versions": "turns: the weights that sampled their tokens",
    "weights": "checkpoints: their weights with the digest of their step",
    "template": "trajectories: tokens against the template's rendering",
    "order": "prompts: rows of the data in the order of the seed",
    "metrics": "metrics that follow from the rows",
}
"""What each check compares, by its name."""


@dataclass(frozen=True)
class Step:
    """What a run saved of one step."""

    number: int
    file: Path
    saved: Sequence[SavedTrajectory]
    tokens: pa.Table
    metrics: Mapping[str, float]

    @property
    def requests(self) -> list[AsyncRolloutRequest]:
        """The requests in the order of the file."""
        return [one.request for one in self.saved]

    @property
    def sampled(self) -> list[AsyncRolloutRequest]:
        """The training samples: all but the greedy rollouts of their prompts."""
        return [one for one in self.requests if one.sampling.temperature != 0]


def audit(run: Path, console: Console, *, num_resampled: int = 0, seed: int = 0) -> int:
    """Audit a run, and print a line for each check; return the number of differences.

    Args:
        run: The run's folder.
        console: Where the result is printed.
        num_resampled: Number of turns whose log-probabilities are computed again.
        seed: Chooses these turns.

    Raises:
        DataError: If the folder has no saved rollouts of training, or no record of its start.
    """
    check_run(run)
    config = read_start(run)
    import_plugins(config.plugins)
    folder = config.trainer.rollout_data_dir
    if folder is None:
        raise DataError(
            "the run saved no training rollouts",
            file=run,
            expected="a run with trainer.rollout_data_dir",
        )
    if not find_rollout_files(folder, "step"):
        raise DataError(
            "no training rollouts are in the folder in which the run saved them",
            file=folder,
            expected="the files step_*.jsonl.zst of trainer.rollout_data_dir",
        )
    if run.resolve() not in folder.resolve().parents:
        console.print(f"rollouts: {folder}", markup=False, highlight=False, soft_wrap=True)
    choice = TurnChoice(
        num_resampled, {0: None, **find_checkpoints(config, run)}, random.Random(seed)
    )
    checks = run_checks(config, run, folder, choice, ProgressDisplay(console))
    table = Table("check", "compared", "differences", "", box=None)
    for one in checks:
        found = str(len(one.differences)) if one.num or one.differences else "-"
        table.add_row(one.name, str(one.num), found, one.not_done or one.what)
    console.print(table)
    differences = [(one.name, found) for one in checks for found in one.differences]
    for name, found in differences[:20]:
        console.print(f"\n{name}: {found.args[0]}", markup=False, highlight=False, soft_wrap=True)
        for key, value in found.details.items():
            console.print(f"  {key}: {value}", markup=False, highlight=False, soft_wrap=True)
    return len(differences)


def read_start(run: Path) -> RunConfig:
    """Read the configuration of a run's last start; `run` may be a copy, or may have been moved.

    Raises:
        DataError: If there is no record of a start.
    """
    start = find_last_start(run)
    if start is None:
        raise DataError(
            "no record of a start of a run",
            file=run / STARTS,
            expected="the folder of a run (trainer.default_local_dir)",
        )
    content = yaml.safe_load((start / RESOLVED).read_text(encoding="utf-8"))
    recorded = Path(content["trainer"]["default_local_dir"])
    if recorded.resolve() != run.resolve():
        content = _move_paths(content, recorded, run.resolve())
    return parse_config(content)


def _move_paths(tree: Any, recorded: Path, run: Path) -> Any:
    """Copy a configuration with the paths in a run's recorded folder changed to those in `run`."""
    if isinstance(tree, dict):
        return {key: _move_paths(value, recorded, run) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_move_paths(value, recorded, run) for value in tree]
    if not isinstance(tree, str):
        return tree
    if Path(tree).is_relative_to(recorded):
        return str(run / Path(tree).relative_to(recorded))
    for start in range(1, len(recorded.parts)):
        folder = Path(*recorded.parts[start:])  # relative to where the run was started
        if Path(tree).is_relative_to(folder):
            moved = run / Path(tree).relative_to(folder)
            return str(moved) if moved != run and moved.exists() else tree
    return tree


def run_checks(
    config: RunConfig,
    run: Path,
    folder: Path,
    choice: TurnChoice | None = None,
    progress: Progress = NO_PROGRESS,
) -> list[Check]:
    """Run every check on every step, and compare the log-probabilities of chosen turns."""
    checks = [Check(name, what) for name, what in WHAT.items()]
    digests, lines, rewards, advantages, versions, weights, template, order, metrics = checks
    recorded = dict[int, str]()
    with digests.collecting():
        recorded |= _check_digests(digests, folder)
    logged = {one.step: one.metrics for one in read_metrics(run / METRICS_FILE)}
    with weights.collecting():
        _check_recorded(recorded, logged, config)
    _check_weights(weights, recorded, config, run)
    renderer, rows = _load_template(config, template), list[tuple[int, int]]()
    places = _find_places(config, run, logged, order)
    files = [one.path for one in find_rollout_files(folder, "step")]
    with lines.collecting():
        _check_steps(files, logged)
    with progress.bar("audit", len(files)) as advance:
        for file in files:
            with lines.collecting():
                step = _read_step(file, logged)
                with order.collecting():
                    _check_order(order, step, places, rows)
                with versions.collecting():
                    _check_versions(versions, step, recorded)
                if choice is not None:
                    choice.offer(file, step.sampled)
                with template.collecting():
                    _check_template(template, step, renderer, config)
                with rewards.collecting():
                    _check_combined(rewards, step, config)
                _check_samples(lines, step, config)
                with advantages.collecting():
                    _check_batch(advantages, rewards, metrics, step, config)
            advance()
    if choice is not None and choice.num:
        checks.append(_resample(config, choice, recorded))
    return checks


def _resample(config: RunConfig, choice: TurnChoice, recorded: Mapping[int, str]) -> Check:
    check = Check("resample", "", len(choice.chosen))
    if choice.left_out:
        versions = ", ".join(map(str, sorted(choice.left_out)))
        check.not_done = f"no checkpoint of the weights of versions {versions}; "
    if not choice.chosen:
        check.not_done += "no turn to compute again"
        return check
    with check.collecting():
        result = resample(config, choice, recorded)
        check.differences += result.differences
        check.what = (
            f"turns: log-probabilities of {result.num_tokens} tokens; largest difference "
            f"{result.largest:.2g} nats, tolerance {result.tolerance:g}"
        )
        check.not_done = check.not_done and check.not_done + check.what
    return check


def _check_digests(check: Check, folder: Path) -> dict[int, str]:
    """Check the digests of files; return those of weights, by version."""
    known = read_digests(folder)
    for one in known:
        check.num += 1
        if one.is_of_weights:
            continue
        path = folder / one.file
        if not path.is_file():
            raise DataError(f"{one.file} is missing", file=folder / DIGESTS_FILE)
        if (found := digest_file(path)) != one.digest:
            raise DataError("the file was changed", file=path, saved=one.digest, found=found)
    names = {one.file for one in known}
    last = max((one.step for one in known), default=0)
    for path in sorted([*folder.glob("*.jsonl*"), *folder.glob("*.parquet")]):
        if path.name not in names and path.name != DIGESTS_FILE:
            # A run that was killed between both writes repeats the step when it resumes.
            if int(path.stem.split(".")[0].rpartition("_")[2]) > last:
                check.not_done = f"{path.name} has no digest: the run ended before it was written"
                continue
            raise DataError("the file has no digest", file=path)
    return {one.step: one.digest for one in known if one.is_of_weights}


def _check_recorded(
    recorded: Mapping[int, str], logged: Mapping[int, Mapping[str, float]], config: RunConfig
) -> None:
    """Check that the weights after each step since the first recorded one have a digest."""
    first = min(recorded, default=None)
    if first is None or not config.trainer.weight_digests:
        return
    for step in _training_steps(logged):
        if step > first and step not in recorded:
            raise DataError("the weights after a step have no digest", step=step)


def _check_weights(check: Check, recorded: Mapping[int, str], config: RunConfig, run: Path) -> None:
    """Compare the weights of each checkpoint with the digest of its step."""
    found = find_checkpoints(config, run)
    if unknown := sorted(found.keys() - recorded.keys()):
        check.not_done = f"no digest of the weights of steps {', '.join(map(str, unknown))}"
    for step in sorted(found.keys() & recorded.keys()):
        check.num += 1
        with check.collecting():
            if (digest := digest_checkpoint(open_checkpoint(found[step]))) != recorded[step]:
                raise DataError(
                    "the weights are not those that the run had after the step",
                    file=found[step], saved=recorded[step], found=digest,
                )  # fmt: skip


def _check_steps(files: Sequence[Path], logged: Mapping[int, Mapping[str, float]]) -> None:
    """Check that each step since the first saved one has a file."""
    saved = {_step_of(file) for file in files}
    for step in _training_steps(logged):
        if step > min(saved) and step not in saved:
            raise DataError("the step has no file of rollouts", step=step, folder=files[0].parent)


def _step_of(file: Path) -> int:
    return int(file.name.split(".")[0].removeprefix("step_"))


def _read_step(file: Path, logged: Mapping[int, Mapping[str, float]]) -> Step:
    number = _step_of(file)
    if number not in logged:
        raise DataError("the step has no metrics", file=file)
    saved, tokens = list(read_trajectories(file)), read_tokens(token_path(file))
    return Step(number, file, saved, tokens, logged[number])


def _check_samples(check: Check, step: Step, config: RunConfig) -> None:
    ids = Counter(one.request_id for one in step.requests)
    check.num += len(ids)
    if doubled := next((name for name, count in ids.items() if count > 1), None):
        raise DataError("a trajectory is there twice", file=step.file, request=doubled)
    groups = Counter(one.batch_data_id for one in step.sampled)
    if sorted(groups) != list(range(len(groups))):
        raise DataError("prompts are missing", file=step.file, saved=sorted(groups))
    for index, count in groups.items():
        if count != config.rollout.n:
            message = f"prompt {index} has {count} samples"
            raise DataError(message, file=step.file, expected=config.rollout.n)
    known = {one.request_id for request in step.requests for one in request.sequences}
    for name in step.tokens["request_id"].to_pylist():
        if name not in known:
            raise DataError("tokens of a trajectory that is not there", request=name)


def _check_versions(check: Check, step: Step, recorded: Mapping[int, str]) -> None:
    """Check that weights of earlier steps sampled each turn, and that their digest is recorded.

    A run that was resumed by a version that records digests has none of earlier steps.
    """
    first = min(recorded, default=step.number)
    if first:
        check.not_done = f"no digests of the weights before version {first}"
    for request in step.requests:
        for one in request.sequences:
            for turn in one.turns:
                check.num += 1
                if any(not 0 <= span.version < step.number for span in turn.weight_versions):
                    raise DataError(
                        f"turn {turn.index} was sampled by weights of a later step",
                        file=step.file, request=one.request_id, saved=turn.weight_versions,
                    )  # fmt: skip
                for version in {span.version for span in turn.weight_versions} - recorded.keys():
                    if version >= first:
                        raise DataError(
                            f"turn {turn.index} was sampled by weights without a digest",
                            file=step.file, request=one.request_id, version=version,
                        )  # fmt: skip


def _load_template(config: RunConfig, check: Check) -> ChatTemplate | None:
    if config.rollout.multi_turn.tokenization_sanity_check_mode == "disable":
        check.not_done = "not done: tokenization_sanity_check_mode is disable"
        return None
    try:
        plugins = Plugins([], {}, make_reward_manager(RewardConfig()))
        return probe_model(config, plugins, now=read_start_date(config)).template
    except (AgentRLError, OSError, ValueError) as error:
        check.not_done = f"not done: no template of {config.model.path}: {error}".splitlines()[0]
        return None


def _check_template(
    check: Check, step: Step, template: ChatTemplate | None, config: RunConfig
) -> None:
    if template is None:
        return
    mode = config.rollout.multi_turn.tokenization_sanity_check_mode
    for request in step.requests:
        if not request.is_checked or any(one.media_runs for one in request.sequences):
            check.not_done = "not done for images, and for what the run did not check"
            continue
        check.num += 1
        found = check_request(template, request, mode)
        if len(found) != len(request.differences):
            raise DataError(
                f"{len(found)} turns differ from the template's rendering",
                file=step.file, request=request.request_id, saved=len(request.differences),
                first=found[0] if found else None,
            )  # fmt: skip


def _find_places(
    config: RunConfig, run: Path, logged: Mapping[int, Mapping[str, float]], check: Check
) -> dict[int, list[int]]:
    """Return, for each step, the places of its prompts in the order of the data.

    Empty if no checkpoint has the number of rows.
    """
    states = sorted((run / "checkpoints").glob("global_step_*/state.json"))
    if not states:
        check.not_done = "not done: no checkpoint has the number of rows"
        return {}
    data = json.loads(states[0].read_text(encoding="utf-8"))["data"]
    order = DataOrder(data["num_rows"], seed=config.data.seed, shuffle=config.data.shuffle)
    places: dict[int, list[int]] = {}
    for step in sorted(_training_steps(logged)):
        num_batches = int(logged[step].get("filter_groups/num_gen_batches", 1))
        batches = [order.next_batch(config.prompts_per_rollout) for _ in range(num_batches)]
        places[step] = [place for batch in batches for place in batch]
    return places


def _training_steps(logged: Mapping[int, Mapping[str, float]]) -> list[int]:
    return [step for step, metrics in logged.items() if "rollout/num_requests" in metrics]


def _check_order(
    check: Check, step: Step, places: Mapping[int, Sequence[int]], rows: list[tuple[int, int]]
) -> None:
    """Check that each place of the data has one row, in the order of the file.

    Data without its overlong prompts keeps the order of the file; which rows were left out is not
    known here.

    Args:
        check: Counts the prompts.
        step: The step.
        places: Of each step's prompts.
        rows: Places and rows of earlier steps, sorted; those of this step are added.
    """
    if not places:
        return
    own = places[step.number]
    check.num += len(own)
    for request in step.sampled:
        # The id is PLAN-STEP-ROW-INDEX-SAMPLE.
        row, index = int(request.request_id.split("-")[-3]), request.batch_data_id
        where = {"file": step.file, "request": request.request_id}
        if index >= len(own):
            raise DataError(f"prompt {index} of {len(own)}", **where)
        found = own[index], row
        at = bisect_left(rows, found)
        if rows[at : at + 1] == [found]:
            continue
        for other in rows[max(0, at - 1) : at + 1]:
            if (other[0] < found[0]) is not (other[1] < found[1]) or other[0] == found[0]:
                raise DataError(
                    f"row {row} is at place {found[0]} of the data, and row {other[1]} at place "
                    f"{other[0]}",
                    **where,
                    expected="one row at each place, in the order of the file",
                )
        rows.insert(at, found)


def _check_combined(check: Check, step: Step, config: RunConfig) -> None:
    for number, one in enumerate(step.saved, start=1):
        total = combine_rewards(one.request, config.reward).total
        check.num += 1
        if one.combined_reward is None or not _close(one.combined_reward, total):
            raise DataError(
                "the combined reward does not follow from its parts", file=step.file, line=number,
                request=one.request.request_id, saved=one.combined_reward, expected=total,
            )  # fmt: skip


def _check_batch(
    advantages: Check, rewards: Check, metrics: Check, step: Step, config: RunConfig
) -> None:
    """Collate the step's rows again, compute their credit, and compare columns and metrics."""
    batch, before_update = _collate(step, config)
    _compare(advantages, step, batch, ["rollout_log_probs"])
    with rewards.collecting():
        _compare(rewards, step, batch, ["token_level_scores"])
    credit = Credit(config.algorithm, None, is_before_update=before_update)
    if (coefficient := step.metrics.get("actor/reward_kl_penalty_coeff")) is not None:
        credit.kl_ctrl.value = coefficient
    found = credit.compute(batch)
    compared = [name for name in TOKEN_COLUMNS if name not in _OF_MODELS]
    _compare(advantages, step, batch, compared)
    tensors = tensors_of(batch)
    if "old_log_probs" in step.tokens.column_names and "old_log_probs" not in tensors:
        tensors.update(_columns_of_models(step, batch, ["old_log_probs"]))
        is_null = step.tokens["old_log_probs"].is_null().to_pylist()
        tensors[IS_COMPUTED] = torch.tensor([not one for one in is_null])
    with metrics.collecting():
        _check_metrics(metrics, step, batch, found if before_update else {}, config)


def _check_metrics(
    check: Check, step: Step, batch: DataProto, found: Mapping[str, float], config: RunConfig
) -> None:
    values = compute_values(
        {
            **rollout_metrics(step.sampled),
            **batch_metrics(batch),
            **reward_metrics(step.sampled, config.reward),
        }
    )
    for name, value in {**values, **found}.items():
        if name not in step.metrics:
            continue
        check.num += 1
        if not _close(value, step.metrics[name]):
            raise DataError(
                f"{name} does not follow from the rows",
                step=step.number, saved=step.metrics[name], expected=value,
            )  # fmt: skip


def _collate(step: Step, config: RunConfig) -> tuple[DataProto, bool]:
    """Make the batch before its credit; and whether log-probabilities were known before it."""
    names = step.tokens["request_id"].to_pylist()
    owners = {one.request_id: request for request in step.requests for one in request.sequences}
    requests = list({id(owners[name]): owners[name] for name in names}.values())
    batch = collate(
        requests,
        pad_token_id=0,
        reward=config.reward,
        segment_credit=config.algorithm.segment_credit,
    )
    found = batch.non_tensor_batch["request_id"].tolist()
    if sorted(found) != sorted(names):
        raise DataError("the sequences of the batch are others", file=token_path(step.file))
    places = {name: place for place, name in enumerate(found)}
    batch = batch[[places[name] for name in names]]
    before_update = "timing_s/old_log_prob" in step.metrics
    before_update |= config.algorithm.rollout_correction.bypass_mode
    known = [name for name in _OF_MODELS if name in step.tokens.column_names]
    if not before_update:
        known = [name for name in known if name not in ("old_log_probs", "entropies")]
    tensors_of(batch).update(_columns_of_models(step, batch, known))
    if greedy := [one for one in step.requests if one.sampling.temperature == 0]:
        for one in greedy:
            one.dropped = None  # as it was when the baselines were read
        baselines = read_baselines(greedy, config.reward, None)
        StepSamples(baselines=baselines).add_baselines(batch)
    return batch, before_update


def _columns_of_models(step: Step, batch: DataProto, names: Sequence[str]) -> dict[str, Tensor]:
    """Return saved columns as `[B, T]` float32, 0 on padding."""
    shape = tuple(tensors_of(batch)["responses"].shape)
    columns: dict[str, Tensor] = {}
    for name in names:
        column = columns[name] = torch.zeros(shape)
        for row, values in zip(column, step.tokens[name].to_pylist(), strict=True):
            row[: len(values or ())] = torch.tensor(values or [])
    return columns


def _compare(check: Check, step: Step, batch: DataProto, names: Sequence[str]) -> None:
    """Compare columns of the batch with those that were saved."""
    tensors, file = tensors_of(batch), token_path(step.file)
    width = tensors["responses"].shape[1]
    lengths = tensors["attention_mask"][:, -width:].sum(-1).tolist()
    requests = step.tokens["request_id"].to_pylist()
    for name in names:
        if (name in tensors) is not (name in step.tokens.column_names):
            raise DataError(f"{name} was {'not ' * (name in tensors)}saved", file=file)
        if name not in tensors:
            continue
        column = step.tokens[name].to_pylist()
        for row, (saved, length) in enumerate(zip(column, lengths, strict=True)):
            check.num += 1
            expected = tensors[name][row, :length].float().numpy()
            found = np.asarray(saved, np.float32)
            if found.shape != expected.shape:
                message = f"{name} has {len(found)} tokens"
                raise DataError(message, file=file, request=requests[row], expected=length)
            wrong = np.flatnonzero(~np.isclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE))
            if len(wrong):
                raise DataError(
                    f"{name} of response token {wrong[0]} does not follow from the rows",
                    file=file, request=requests[row],
                    saved=float(found[wrong[0]]), expected=float(expected[wrong[0]]),
                )  # fmt: skip


def _close(one: float, other: float) -> bool:
    return bool(np.isclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
