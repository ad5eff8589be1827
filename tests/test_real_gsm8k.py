"""64 rows of the real GSM8K, the real Qwen2.5 tokenizer, a Qwen2 of random weights: all the way.

A random model hardly ever calls a tool, so the same rows go twice: once sampled by the embedded
engine, once as a script that calls both tools, errs, is corrected and answers.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from agentrl import Trainer
from agentrl.engines import SamplingParams, ScriptedEngine
from agentrl.protocol import DataProto
from agentrl.rollout import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.workers.checkpoint import open_checkpoint
from agentrl.workers.distributed import stop_world
from agentrl.workers.snapshot import load_run
from tests.fakes.checkpoints import read_weights
from tests.fakes.gsm8k import (
    VOCAB_SIZE,
    RecordingEngine,
    WatchedTrainer,
    assert_trained_is_what_was_sampled,
    make_config,
    make_home,
    run_all_stages,
    weights_of,
    with_engine,
)
from tests.fakes.training import moments_of


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rows, model, tools and interaction on disk."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield make_home(tmp_path_factory.mktemp("gsm8k"))
    stop_world()
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_rows_sampled_by_the_embedded_engine_go_all_the_way(home: Path):
    run_all_stages(make_config(home, "sampled", max_tokens_per_turn=4, max_tool_response_length=64))


# The scripted policy: the first sample of a group is corrected and finds the answer, the second
# insists on a wrong one.

CALLS = {
    "0": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>',
    "1": '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "-1"}}\n</tool_call>',
}
CALLED = ("calculator", "calc_gsm8k_reward")


def scripted_trainer(home: Path, name: str) -> WatchedTrainer:
    trainer = WatchedTrainer(make_config(home, name))
    truths = {prompt.index: str(prompt.ground_truth) for prompt in trainer.components.data.train}

    def answer(ids: Sequence[int], _: SamplingParams, request_id: str, turn: int) -> str:
        _, _, index, _, offset = request_id.split("-")
        if turn == 0:
            return CALLS[offset]
        return f"#### {truths[int(index)]}" if turn == 2 and offset == "0" else "#### -1"

    engine = ScriptedEngine(answer, tokenizer=trainer.components.setup.tokenizer)
    with_engine(trainer, RecordingEngine(engine))
    trainer.sync_weights()
    return trainer


class ScriptedRun(NamedTuple):
    """A trainer behind its first step, and what the step was made of."""

    trainer: WatchedTrainer
    before: dict[str, torch.Tensor]
    metrics: dict[str, float]
    requests: list[AsyncRolloutRequest]
    batch: DataProto
    path: Path


@pytest.fixture(scope="module")
def scripted_run(home: Path) -> Iterator[ScriptedRun]:
    """One update with tools and interaction, and the checkpoint behind it."""
    trainer = scripted_trainer(home, "scripted")
    before = weights_of(trainer)
    metrics = trainer.train_step()
    trainer.save_checkpoint()
    path = home / "scripted/checkpoints/global_step_1"
    yield ScriptedRun(trainer, before, metrics, trainer.requests, trainer.batch, path)
    trainer.close()


@pytest.mark.slow
def test_tools_and_interaction_are_walked_by_every_row(scripted_run: ScriptedRun):
    engine: Any = scripted_run.trainer.components.engine
    metrics = scripted_run.metrics
    assert_trained_is_what_was_sampled(engine, scripted_run.requests, scripted_run.batch)
    for request in scripted_run.requests:
        right = request.rollout_offset == 0
        roles = [turn.role for turn in request.turns]
        talk = ["user", "assistant"] * (1 if right else 2)
        assert roles == ["assistant", "tool", "assistant", *talk]
        (call,) = request.turns[0].calls
        assert (call.name, call.outcome) == (CALLED[request.rollout_offset], "ok")
        shown = [message.text for message in request.messages if message.role == "tool"]
        assert shown == ["42" if right else "The answer -1 is scored 0.0."]
        assert request.stop_reason is StopReason.INTERACTION_ENDED
        assert request.reward_extra_info["acc"] == float(right)
        assert request.tool_rewards["calc_gsm8k_reward"] == 0.0
        assert request.turns[-1].reward == float(right)
    assert metrics["rollout/tool_calls/ok"] == 1.0
    assert metrics["rollout/failed_frac"] == 0.0
    assert metrics["rollout/tokenization_differences_frac"] == 0.0
    assert 0 < metrics["rollout/mask_ones_ratio"] < 0.7


@pytest.mark.slow
def test_rewards_of_the_script_move_the_weights(scripted_run: ScriptedRun):
    trainer, batch = scripted_run.trainer, scripted_run.batch.batch
    advantages, mask = batch["advantages"], batch["response_mask"].bool()
    assert not advantages[~mask].any()
    for row, request in enumerate(scripted_run.requests):
        sign = 1 if request.rollout_offset == 0 else -1
        assert (advantages[row][mask[row]] * sign > 0).all()
    assert scripted_run.metrics["actor/grad_norm"] > 0
    engine: Any = trainer.components.engine
    assert trainer.policy_version == engine.version == 1
    after = weights_of(trainer)
    assert all(not torch.equal(old, after[name]) for name, old in scripted_run.before.items())


@pytest.mark.slow
def test_checkpoint_is_complete_and_loads_as_written(scripted_run: ScriptedRun):
    trainer, path = scripted_run.trainer, scripted_run.path
    saved = read_weights(path)
    assert saved["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 32)
    assert {file.name for file in path.iterdir()} == {
        "rank_0.safetensors",
        "state.json",
        "manifest.json",
    }
    assert load_run(open_checkpoint(path), trainer.components.actor).step == 1


@pytest.mark.slow
def test_resumed_run_takes_the_step_of_the_uninterrupted_one(scripted_run: ScriptedRun, home: Path):
    trainer, path = scripted_run.trainer, scripted_run.path
    shutil.copytree(path, home / "resumed/checkpoints/global_step_1")
    resumed = scripted_trainer(home, "resumed")
    try:
        resumed.begin()
        assert (resumed.step, resumed.policy_version) == (1, 1)
        assert resumed.components.order.state_dict() == trainer.components.order.state_dict()
        assert_same_weights(trainer, resumed)
        moments = [moments_of(one.components.actor) for one in (trainer, resumed)]
        assert moments[0].keys() == moments[1].keys()
        assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
        saved = json.loads((path / "state.json").read_text())
        again = resumed.components.actor.counters()
        assert saved["actor"] == dataclasses.asdict(again)
        trainer.num_prompts = resumed.num_prompts = 16
        ours, theirs = trainer.train_step(), resumed.train_step()
        assert ours["training/epoch"] == 1.0
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            assert ours[name] == theirs[name], name
        assert_same_weights(trainer, resumed)
    finally:
        resumed.close()


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    ours, theirs = weights_of(one), weights_of(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
