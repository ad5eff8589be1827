"""Write checked sequences of an agent loop into its request: turns, versions, messages, results.

Tokens enter through `append_sampled` and `append_observed` only.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agentrl.agent_loops.output import AgentLoopOutput
from agentrl.agent_loops.placeholders import load_given, read_tokens, runs_between
from agentrl.agent_loops.reconcile import (
    CheckedSequence,
    SampledToken,
    TokenRun,
    check_sequence,
)
from agentrl.agent_loops.server_manager import AsyncLLMServerManager, RecordedCall
from agentrl.engines.protocol import FinishReason, VersionSpan
from agentrl.errors import AgentError
from agentrl.messages import Message
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.media import by_kind
from agentrl.rollout.records import BranchCause
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.rollout.tool_calls import read_turn

MASKED = "the agent loop set its mask to 0"
REPEATED = "trained in another sequence of the trajectory"


async def check_outputs(
    outputs: Sequence[AgentLoopOutput], manager: AsyncLLMServerManager
) -> list[CheckedSequence]:
    """Check all outputs of a trajectory. A token is trained in the first output that trains it.

    Raises:
        AgentError: See `check_sequence`. The message names the output if there are several.
    """
    trained: set[SampledToken] = set()
    sequences: list[CheckedSequence] = []
    for index, output in enumerate(outputs):
        try:
            given = output.multi_modal_data or {}
            images, videos = (given.get(f"{k}s", given.get(k)) for k in ("image", "video"))
            items = await load_given(manager.media, images, videos)
            sequence = check_sequence(output, manager, trained, items)
        except AgentError as error:
            if len(outputs) > 1:
                error.details["output"] = f"{index} (of {len(outputs)}, counted from 0)"
            raise
        trained |= _tokens_of(run for run in sequence.runs if run.is_trained)
        sequences.append(sequence)
    if not any(sequence.calls for sequence in sequences):
        raise AgentError(
            "no token of what the loop returned was sampled by the policy",
            expected="a loop that calls server_manager.generate and returns what it sampled",
        )
    return sequences


def record_sequences(
    request: AsyncRolloutRequest, context: RolloutContext, sequences: Sequence[CheckedSequence]
) -> None:
    """Write the sequences into a running request. The last one stays; the others are branches.

    Raises:
        AgentError: If a sequence is longer than the budgets of the request.
    """
    opening = [message.model_copy(deep=True) for message in request.messages]
    media = {kind: [*values] for kind, values in request.multi_modal_data.items()}
    for index, sequence in enumerate(sequences):
        if index:
            cause = _find_cause(sequences[index - 1], sequence)
            request.set_aside(cause, [message.model_copy(deep=True) for message in opening])
            request.add_media(media)
        _record_sequence(request, context, sequence)


def _find_cause(last: CheckedSequence, new: CheckedSequence) -> BranchCause:
    """Call it a branch if the new sequence starts from the same prompt, else a rewrite."""
    is_branch = new.prompt_ids[: len(last.prompt_ids)] == last.prompt_ids
    return "branch" if is_branch else "rewrite"


def _record_sequence(
    request: AsyncRolloutRequest, context: RolloutContext, sequence: CheckedSequence
) -> None:
    prompt_len, response_len = len(sequence.prompt_ids), len(sequence.response_ids)
    budgets = request.budgets
    left = min(budgets.max_response_tokens, budgets.max_model_len - prompt_len)
    if response_len > left:
        raise AgentError(
            f"the response has {response_len} tokens after a prompt of {prompt_len}",
            expected=f"at most {left} (data.max_response_length, rollout.max_model_len)",
        )
    request.begin(sequence.prompt_ids, runs_between(sequence.media, 0, prompt_len))
    last: RecordedCall | None = None
    for run in sequence.runs:
        ids = sequence.response_ids[run.start : run.end]
        if run.call is None:
            shown = runs_between(sequence.media, prompt_len + run.start, prompt_len + run.end)
            request.append_observed(ids, role="user", runs=shown)
            content = read_tokens(ids, shown, context.template.decode)
            request.messages.append(Message(role="user", content=content))
            request.add_media(by_kind([item for *_, item, offset in shown if offset == 0]))
            continue
        _record_run(request, run, run.call)
        if last is not run.call:
            read = read_turn(run.call.token_ids, context.template, context.parser, tools=())
            request.messages.append(read.message)
        last = run.call


def _record_run(request: AsyncRolloutRequest, run: TokenRun, call: RecordedCall) -> None:
    completion, start = call.completion, run.offset
    end = start + run.end - run.start
    is_whole_end = end == len(completion.token_ids)
    turn = request.append_sampled(
        completion.token_ids[start:end],
        completion.log_probs[start:end],
        finish_reason=completion.finish_reason if is_whole_end else None,
        weight_versions=_cut_versions(completion.weight_versions, start, end),
        cached_tokens=completion.cached_tokens if start == 0 else 0,
        seconds=call.seconds if start == 0 else 0.0,
        seconds_started=call.seconds_started if start == 0 else None,
    )
    if turn.finish_reason is FinishReason.LENGTH:
        is_response = request.nearest_limit is StopReason.RESPONSE_BUDGET
        spent = "response" if is_response else "model"
        turn.cut = "turn" if request.num_tokens_left > 0 else spent
    run_t, call_t = request.sampling.temperature, call.sampling.temperature
    if not run.is_trained:
        request.exclude_turn(turn.index, MASKED if not run.is_repeated else REPEATED)
    elif call_t != run_t:
        # The trainer computes log-probabilities at the temperature of the run.
        request.exclude_turn(turn.index, f"sampled at temperature {call_t:g}, not {run_t:g}")


def _cut_versions(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    cut = (
        VersionSpan(span.version, max(span.start, start) - start, min(span.end, end) - start)
        for span in spans
    )
    return tuple(span for span in cut if span.start < span.end)


def record_partial(
    request: AsyncRolloutRequest, context: RolloutContext, manager: AsyncLLMServerManager
) -> None:
    """Write the last conversation of a loop that failed into its request, for the user to read."""
    if not manager.calls or request.num_prompt_tokens:
        return
    call = manager.calls[-1]
    prompt = call.root.prompt_ids
    response = (call.prompt_ids + call.token_ids)[len(prompt) :]
    if not response:
        return
    output = AgentLoopOutput(
        prompt_ids=prompt, response_ids=response, response_mask=[0] * len(response)
    )
    found = check_sequence(output, manager)
    runs = [replace(run, is_trained=run.call is not None) for run in found.runs]
    _record_sequence(request, context, replace(found, runs=runs))


def record_results(
    request: AsyncRolloutRequest,
    outputs: Sequence[AgentLoopOutput],
    sequences: Sequence[CheckedSequence],
    manager: AsyncLLMServerManager,
) -> None:
    """Record the loop's reward, fields and metrics, and which sampled tokens are not trained.

    Raises:
        AgentError: If the reward is no finite number.
    """
    last = outputs[-1]
    if last.reward_score is not None and not math.isfinite(last.reward_score):
        raise AgentError(f"reward_score is {last.reward_score}", expected="a finite number or None")
    request.agent_reward = last.reward_score
    # The dicts are shared by the group.
    request.extra_info = {**request.extra_info, **last.extra_fields}
    request.columns = {**request.columns, **last.extra_fields}
    runs = [run for sequence in sequences for run in sequence.runs]
    returned = _tokens_of(runs)
    trained = _tokens_of(run for run in runs if run.is_trained)
    used = {index for index, _ in returned}
    num_sampled = sum(len(call.token_ids) for call in manager.calls)
    own = last.metrics.model_dump()
    request.metrics |= {
        "agent_loop/num_turns": float(last.num_turns),
        "agent_loop/generate_sequences": float(own["generate_sequences"]),
        "agent_loop/tool_calls": float(own["tool_calls"]),
        "agent_loop/calls": float(len(manager.calls)),
        "agent_loop/unused_calls": float(len(manager.calls) - len(used)),
        "agent_loop/dropped_tokens": float(num_sampled - len(returned)),
        "agent_loop/masked_tokens": float(len(returned) - len(trained)),
    }


def _tokens_of(runs: Iterable[TokenRun]) -> set[SampledToken]:
    return {token for run in runs for token in run.tokens}
