"""Check the requests of a step: all are there once, and their tokens, rows and rewards agree."""

from collections import Counter
from typing import Any

from agentrl.commands.audit.saved_run import TRAIN, VAL, Check, Step, is_close
from agentrl.config import RunConfig
from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import AgentRLError, DataError
from agentrl.messages import CallOutcome
from agentrl.rewards import combine_rewards, make_reward_manager
from agentrl.rollout.records import MALFORMED_CALL
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import draw_seed
from agentrl.rollout.templates import ChatTemplate, check_request
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.rollout_setup import probe_model
from agentrl.trainer.state.resume import read_start_date
from agentrl.trainer.validation import read_outcome, validation_metrics


def check_requests(check: Check, step: Step) -> None:
    """Check that each sample of each prompt is there once, with the ids and seed of its step."""
    for line, one in enumerate(step.saved, start=1):
        request = one.request
        if one.step != step.number:
            raise DataError(f"a line of step {one.step}", file=step.path, line=line)
        _check_identity(request, step)
    ids = Counter((one.uid, one.rollout_offset) for one in step.requests)
    check.num += len(ids)
    if doubled := next((name for name, count in ids.items() if count > 1), None):
        raise DataError("a trajectory is there twice", file=step.path, group=doubled[0])
    groups = Counter(one.batch_data_id for one in _samples(step))
    if sorted(groups) != list(range(len(groups))):
        raise DataError("prompts are missing", file=step.path, saved=sorted(groups))
    rollout = step.config.rollout
    size = rollout.n if step.file.kind == TRAIN else rollout.val_kwargs.n
    for index, count in groups.items():
        if count != size:
            message = f"prompt {index} has {count} samples"
            raise DataError(message, file=step.path, expected=size)


def _samples(step: Step) -> list[AsyncRolloutRequest]:
    return step.sampled if step.file.kind == TRAIN else step.requests


def _check_identity(request: AsyncRolloutRequest, step: Step) -> None:
    """Check what follows from plan, step, row and index: ids, seed and temperature."""
    rollout, kind = step.config.rollout, step.file.kind
    if kind != TRAIN:
        plan, temperature = kind.replace("_", "-", 1), rollout.val_kwargs.temperature
    elif request.sampling.temperature == 0:
        plan, temperature = "greedy", 0.0
    else:
        plan, temperature = "train", rollout.temperature
    row, offset = row_of(request), request.rollout_offset
    uid = f"{plan}-{step.number}-{row}-{request.batch_data_id}"
    repeated = f"~{request.attempt}" if request.attempt else ""
    expected = {
        "uid": uid,
        "request_id": f"{uid}-{offset}{repeated}",
        "seed": draw_seed(f"{rollout.seed}:{uid}:{offset}"),
        "temperature": temperature,
    }
    found: dict[str, Any] = {name: getattr(request, name) for name in ("uid", "request_id", "seed")}
    found["temperature"] = request.sampling.temperature
    for name, value in expected.items():
        if found[name] != value:
            raise DataError(
                f"the {name} does not follow from step, row and index",
                file=step.path, request=request.request_id, saved=found[name], expected=value,
            )  # fmt: skip


def row_of(request: AsyncRolloutRequest) -> int | None:
    """Return the row of the data that a request is of, from the id of its group."""
    row = request.uid.rsplit("-", 2)[1:2]  # PLAN-STEP-ROW-INDEX
    return int(row[0]) if row and row[0].isdecimal() else None


def check_exclusions(step: Step) -> None:
    """Check that turns with malformed calls, and no others, are excluded as such.

    The mask of each turn was checked against its exclusion when the line was read.
    """
    masks = step.config.rollout.multi_turn.on_malformed_call == "mask"
    for request in step.requests:
        for turn in (turn for one in request.sequences for turn in one.turns):
            has_malformed = any(call.outcome is CallOutcome.MALFORMED for call in turn.calls)
            if (turn.excluded == MALFORMED_CALL) is not (masks and has_malformed):
                raise DataError(
                    f"the exclusion of turn {turn.index} does not follow from its calls",
                    file=step.path, request=request.request_id, saved=turn.excluded,
                    expected=MALFORMED_CALL if masks and has_malformed else "another or none",
                )  # fmt: skip


def check_combined(check: Check, step: Step) -> None:
    """Compute the combined rewards again."""
    for line, one in enumerate(step.saved, start=1):
        total = combine_rewards(one.request, step.config.reward).total
        check.num += 1
        if one.combined_reward is None or not is_close(one.combined_reward, total):
            raise DataError(
                "the combined reward does not follow from its parts", file=step.path, line=line,
                request=one.request.request_id, saved=one.combined_reward, expected=total,
            )  # fmt: skip


def check_validation(check: Check, step: Step) -> None:
    """Compute the metrics of a validation set again."""
    name = step.file.kind.removeprefix(VAL)
    outcomes = [read_outcome(one, step.config.reward) for one in step.requests]
    check.compare_metrics(step.number, step.metrics, validation_metrics(name, outcomes))


def load_template(config: RunConfig, check: Check) -> ChatTemplate | None:
    """Load the template of a run; None if it cannot be loaded, or the run did not check tokens."""
    if config.rollout.multi_turn.tokenization_sanity_check_mode == "disable":
        check.not_done = "not done: tokenization_sanity_check_mode is disable"
        return None
    try:
        plugins = Plugins([], {}, make_reward_manager(RewardConfig()))
        return probe_model(config, plugins, now=read_start_date(config)).template
    except (AgentRLError, OSError, ValueError) as error:
        check.not_done = f"not done: no template of {config.model.path}: {error}".splitlines()[0]
        return None


def check_template(check: Check, step: Step, template: ChatTemplate | None) -> None:
    """Compare tokens with the template's rendering of the messages."""
    if template is None:
        return
    mode = step.config.rollout.multi_turn.tokenization_sanity_check_mode
    for request in step.requests:
        if not request.is_checked or any(one.media_runs for one in request.sequences):
            check.num_left_out += 1
            check.not_done = (
                f"{check.what}; {check.num_left_out} left out: they have images, or the run did "
                "not check them"
            )
            continue
        check.num += 1
        found = check_request(template, request, mode)
        if len(found) != len(request.differences):
            raise DataError(
                f"{len(found)} turns differ from the template's rendering",
                file=step.path, request=request.request_id, saved=len(request.differences),
                first=found[0] if found else None,
            )  # fmt: skip
