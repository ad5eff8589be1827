import asyncio
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.collate import collate, generate_sequences
from agentrl.config.schema.reward import Placement
from agentrl.engines.protocol import SamplingParams
from agentrl.errors import DataError
from agentrl.messages import Message
from agentrl.protocol import DataProto
from agentrl.rollout.manager import SamplingPlan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.requests import build_request, finished_requests, observed, said, weighted

PAD = 0
batches = st.lists(finished_requests(), min_size=1, max_size=5)


def test_a_conversation_is_laid_out_token_by_token():
    first = build_request(
        said(2, version=3), observed(2), said(1, version=4), num_prompt_tokens=2, reward=1.0
    )
    second = build_request(said(1), num_prompt_tokens=3, reward=0.5)
    data = collate([first, second], pad_token_id=PAD)
    rows = {key: tensor.tolist() for key, tensor in data.batch.items()}
    states = rows.pop("state_ids")
    assert len(set(rows.pop("trajectory_ids"))) == 2
    assert [[state >= 0 for state in row] for row in states] == [
        [True, True, False, False, True], [True, False, False, False, False],
    ]  # fmt: skip
    assert rows == {
        "prompts": [[0, 100, 101], [100, 101, 102]],
        "responses": [[200, 201, 202, 203, 204], [200, 0, 0, 0, 0]],
        "input_ids": [[0, 100, 101, 200, 201, 202, 203, 204], [100, 101, 102, 200, 0, 0, 0, 0]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0, 0, 0, 0]],
        "response_mask": [[1, 1, 0, 0, 1], [1, 0, 0, 0, 0]],
        "rollout_log_probs": [[-1 / 64, -2 / 64, 0, 0, -1 / 64], [-1 / 64, 0, 0, 0, 0]],
        "turn_ids": [[0, 0, 1, 1, 2], [0, -1, -1, -1, -1]],
        "policy_versions": [[3, 3, -1, -1, 4], [0, -1, -1, -1, -1]],
        "token_level_scores": [[0, 0, 0, 0, 1.0], [0.5, 0, 0, 0, 0]],
        "in_baseline": [True, True],
        "batch_data_id": [0, 0],
    }


def test_each_row_has_its_objects():
    request = build_request(
        said(2, text="It is 5."),
        observed(1),
        uid="g",
        request_id="r",
        reward=1.0,
        reward_extra_info={"acc": 1.0},
        tool_rewards={"calculator": 0.5},
        columns={"ability": "sums", "uid": "the row's own"},
        data_source="sums",
        ground_truth="5",
        stop_reason=StopReason.MAX_TOOL_CALLS,
    )
    plain = build_request(said(1), uid="g")
    columns = {k: v.tolist()[0] for k, v in collate([request, plain], pad_token_id=PAD)
               .non_tensor_batch.items()}  # fmt: skip
    assert columns.pop("messages")[1] == {"role": "assistant", "content": "It is 5."}
    assert columns == {
        "uid": "g",
        "request_id": "r",
        "stop_reason": "max_tool_calls",
        "multi_modal_data": {},
        "reward_scores": {"calculator": 0.5, "user_turn_rewards": []},
        "reward_extra_info": {"acc": 1.0},
        "reward_index": 1,
        "data_source": "sums",
        "ground_truth": "5",
        "extra_info": {},
        "ability": "sums",
    }


def test_rewards_are_combined_and_placed_as_configured():
    request = build_request(said(2, reward=3.0), observed(1), said(2), reward=1.0)
    config = weighted(1.0, trajectory=2.0, placement="uniform")
    data = collate([request], pad_token_id=PAD, reward=config)
    assert data.batch["token_level_scores"].tolist() == [[2.0, 2.0, 0.0, 0.5, 0.5]]


@settings(deadline=None, max_examples=30)
@given(batches, st.sampled_from(get_args(Placement)))
def test_rewards_on_trained_tokens_scores_are_on_trained_tokens_only(requests, placement):
    config = weighted(1.0, tool=1.0, placement=placement)
    batch = collate(requests, pad_token_id=PAD, reward=config).batch
    assert not batch["token_level_scores"][batch["response_mask"] == 0].any()


@settings(deadline=None, max_examples=30)
@given(batches)
def test_failures_are_data_failed_requests_keep_their_row_and_train_on_nothing(requests):
    data = collate(requests, pad_token_id=PAD)
    assert len(data) == len(requests)
    for row, request in enumerate(requests):
        batch = data.batch[row]
        failed = request.state is RequestState.FAILED
        assert bool(batch["in_baseline"]) is not failed
        assert batch["response_mask"].sum() == (0 if failed else sum(request.loss_mask))
        assert batch["attention_mask"].sum() >= 1
        assert not (failed and batch["token_level_scores"].any())


@settings(deadline=None, max_examples=30)
@given(batches, st.integers(0, 4), st.integers(0, 4))
def test_layout_is_invisible_rows_are_the_requests_at_any_width(
    requests, more_prompt, more_response
):
    width = max(max(r.num_prompt_tokens for r in requests), 1) + more_prompt
    length = max(max(r.num_response_tokens for r in requests), 1) + more_response
    data = collate(requests, pad_token_id=PAD, prompt_width=width, response_width=length)
    assert data.batch["responses"].shape[1] == length
    for row, request in enumerate(requests):
        batch = data.batch[row]
        tokens = batch["attention_mask"].bool()
        known = bool(request.input_ids)
        assert batch["input_ids"][tokens].tolist() == (request.input_ids or [PAD])
        assert batch["position_ids"][tokens].tolist() == (request.position_ids or [0])
        assert not batch["input_ids"][~tokens].any()
        end = request.num_response_tokens
        assert batch["rollout_log_probs"][:end].tolist() == request.rollout_log_probs
        assert (batch["turn_ids"] >= 0).sum() == end
        assert tokens[width - 1]
        assert known or not end


@settings(deadline=None, max_examples=30)
@given(batches)
def test_batches_of_equal_widths_can_be_joined(requests):
    whole = collate(requests, pad_token_id=PAD)
    width, length = whole.batch["prompts"].shape[1], whole.batch["responses"].shape[1]
    parts = [
        collate([request], pad_token_id=PAD, prompt_width=width, response_width=length)
        for request in requests
    ]
    joined = DataProto.concat(parts)
    for key, tensor in whole.batch.items():
        assert torch.equal(joined.batch[key], tensor)


@settings(deadline=None, max_examples=30)
@given(batches)
def test_a_batch_can_be_saved(tmp_path_factory, requests):
    path = tmp_path_factory.mktemp("batch") / "batch"
    data = collate(requests, pad_token_id=PAD)
    data.save_to_disk(path)
    loaded = DataProto.load_from_disk(path)
    assert loaded.non_tensor_batch.keys() == data.non_tensor_batch.keys()
    assert torch.equal(loaded.batch["input_ids"], data.batch["input_ids"])


def test_nothing_but_failures_before_the_prompt_is_a_batch_too():
    requests = [build_request(num_prompt_tokens=0, stop_reason=StopReason.FAILED)] * 2
    batch = collate(requests, pad_token_id=7).batch
    assert batch["input_ids"].tolist() == [[7, 7]] * 2
    assert batch["attention_mask"].tolist() == [[1, 0]] * 2
    assert not batch["response_mask"].any()


def test_a_dropped_request_is_masked_though_it_ended_well():
    request = build_request(said(2), reward=1.0)
    request.dropped = "a sample of its group failed"
    data = collate([request], pad_token_id=PAD)
    assert not data.batch["response_mask"].any()
    assert not data.batch["in_baseline"].any()
    assert data.non_tensor_batch["reward_index"].tolist() == [None]


def test_a_request_that_runs_is_refused():
    request = AsyncRolloutRequest(messages=[Message(role="user", content="Hi")], request_id="r1")
    with pytest.raises(DataError, match="r1 is still pending"):
        collate([request], pad_token_id=PAD)


def test_a_rank_without_work_has_a_batch_of_no_rows():
    none = collate([], pad_token_id=PAD, prompt_width=3, response_width=5)
    some = collate([build_request(said(1))], pad_token_id=PAD)
    assert len(none) == 0
    assert none.batch["responses"].shape == (0, 5)
    assert {key: t.dtype for key, t in none.batch.items()} == {
        key: t.dtype for key, t in some.batch.items()
    }


@pytest.mark.parametrize(
    ("width", "what"), [("prompt_width", "prompt"), ("response_width", "response")]
)
def test_a_width_that_does_not_suffice_names_the_request(width, what):
    requests = [build_request(said(1)), build_request(said(5), num_prompt_tokens=6, request_id="x")]
    with pytest.raises(DataError, match=f"the {what} of request x has"):
        collate(requests, pad_token_id=PAD, **{width: 4})


def test_positions_count_tokens_and_not_padding():
    requests = [build_request(said(3), num_prompt_tokens=2), build_request(said(1))]
    positions = collate(requests, pad_token_id=PAD, prompt_width=4, response_width=4).batch[
        "position_ids"
    ]
    assert positions[0].tolist() == [0, 0, 0, 1, 2, 3, 4, 0]


# The states in which turns began.


def states_of(*requests) -> list[list[int]]:
    """The state of each sampled turn of each request."""
    batch = collate(list(requests), pad_token_id=PAD).batch
    found = []
    for row in batch:
        seen = dict(zip(row["turn_ids"].tolist(), row["state_ids"].tolist(), strict=True))
        found.append([state for turn, state in seen.items() if state >= 0])
    return found


def test_turns_that_were_shown_the_same_began_in_the_same_state():
    first = build_request(said(1), observed(2), said(4))
    second = build_request(said(1), observed(2), said(1), observed(2))
    third = build_request(said(2), observed(2), said(1))
    alike, also, other = states_of(first, second, third)
    assert alike == also
    assert other[0] == alike[0]  # the same prompt
    assert other[1] != alike[1]  # its tool's answer has other tokens


def test_another_prompt_is_another_state():
    (short,), (long,) = states_of(
        build_request(said(1), num_prompt_tokens=2), build_request(said(1), num_prompt_tokens=3)
    )
    assert short != long


def test_a_declared_state_replaces_the_shown_tokens():
    def request(state, num_shown, *, by_tool):
        made = build_request(said(2, call_rewards=(0.0,)), observed(num_shown), said(1))
        report = made.turns[0].calls[0].metrics if by_tool else made.turns[0].metadata
        report["state"] = state
        return made

    (_, one), (_, same), (_, other) = states_of(
        request({"at": [1, 2], "open": True}, 1, by_tool=True),
        request({"open": True, "at": [1, 2]}, 3, by_tool=True),
        request({"at": [1, 3], "open": True}, 1, by_tool=True),
    )
    assert one == same != other
    (_, judged), (_, again) = states_of(
        request("lobby", 1, by_tool=False), request("lobby", 2, by_tool=False)
    )
    assert judged == again


def test_the_state_of_a_turn_without_observation_is_the_whole_history():
    (_, first), (_, second) = states_of(
        build_request(said(1), said(1)), build_request(said(2), said(1))
    )
    assert first != second


def test_states_have_the_same_numbers_in_every_run():
    states = states_of(build_request(said(1), observed(1), said(1)))
    assert states == [[3064079460968330856, 868721170023615147]]


@settings(deadline=None, max_examples=30)
@given(batches)
def test_every_sampled_token_has_a_state_and_no_other_one(requests):
    batch = collate(requests, pad_token_id=PAD).batch
    for row, request in zip(batch, requests, strict=True):
        sampled = [
            turn.role == "assistant" for turn in request.turns for _ in range(turn.num_tokens)
        ]
        found = (row["state_ids"] >= 0).tolist()
        assert found == sampled + [False] * (len(found) - len(sampled))


# Prompts in, trajectories out.


class EchoManager:
    """Makes requests as the manager does, and ends each with one token."""

    context = SimpleNamespace(template=SimpleNamespace(media=None))

    def make_requests(self, prompts, plan, *, step=0):
        return [
            AsyncRolloutRequest.from_prompt(prompt, uid=f"{step}-{prompt.index}-{offset}")
            for prompt in prompts
            for offset in range(plan.n)
        ]

    async def rollout(self, requests):
        for request in requests:
            request.begin([1, 2])
            request.take_edge(RequestState.RUNNING)
            request.append_sampled([3], [-0.5])
            request.messages.append(Message(role="assistant", content="!"))
            request.finish(StopReason.ANSWERED)
        return requests


@pytest.mark.parametrize("key", ["prompt", "raw_prompt"])
def test_generate_sequences_gives_a_row_for_a_row(key):
    message = [{"role": "user", "content": "2 + 3?"}]
    rows = {key: [message, message], "uid": ["g", "g"], "extra_info": [{"a": None}, {}]}
    prompts = DataProto.from_dict(non_tensors=rows)
    plan = SamplingPlan("train", 8, SamplingParams(max_new_tokens=4))
    out = asyncio.run(generate_sequences(EchoManager(), prompts, plan=plan, pad_token_id=PAD))
    assert out.batch["input_ids"].tolist() == [[1, 2, 3]] * 2
    assert out.non_tensor_batch["uid"].tolist() == ["g", "g"]
    assert out.non_tensor_batch["messages"][1][-1] == {"role": "assistant", "content": "!"}
    assert len(prompts.union(out)) == 2


def test_generate_sequences_makes_groups_of_rows_without_uid():
    prompts = DataProto.from_dict(non_tensors={"prompt": ["2 + 3?", "3 + 4?"]})
    plan = SamplingPlan("train", 1, SamplingParams(max_new_tokens=4))
    out = asyncio.run(generate_sequences(EchoManager(), prompts, plan=plan, pad_token_id=PAD))
    assert len(set(out.non_tensor_batch["uid"])) == 2
