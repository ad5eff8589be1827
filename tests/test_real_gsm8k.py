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
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl import RunConfig, Trainer
from agentrl.config import Gsm8kConfig, parse_config
from agentrl.data import Prompt
from agentrl.data.prepare import prepare_gsm8k
from agentrl.engines import Completion, Engine, SamplingParams, ScriptedEngine
from agentrl.protocol import DataProto
from agentrl.rollout import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.trainer.rollout_setup import make_manager
from agentrl.training.distributed import stop_world
from agentrl.training.snapshot import load_run
from agentrl.training.weight_sync import iter_full_weights
from tests.fakes_runs import ROOT, SHARED, write_yaml

ROWS, SAMPLES, VOCAB_SIZE = 64, 2, 151_936
SCORER = """
from agentrl.rewards import gsm8k

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info)
    # A random model is never right; without a difference there would be nothing to train on.
    return found | {"score": found["score"] + sum(map(ord, solution_str)) % 5 / 10}
"""


class RecordingEngine:
    """Passes every call on, and keeps what went in and came out."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.max_model_len = inner.max_model_len
        self.said: dict[str, list[tuple[list[int], Completion]]] = {}

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        done = await self.inner.generate(input_ids, sampling, request_id=request_id)
        self.said.setdefault(request_id, []).append((list(input_ids), done))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rows, model, tools and interaction on disk."""
    if not (SHARED / "gsm8k/train.jsonl").is_file():
        pytest.skip(f"needs GSM8K and the Qwen2.5 tokenizer in {SHARED}")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("gsm8k")
    prepare_gsm8k(
        Gsm8kConfig(out_dir=folder / "data", source_dir=SHARED / "gsm8k", max_samples=ROWS)
    )
    make_model(folder / "model")
    (folder / "score.py").write_text(SCORER)
    tools = [
        {"class_name": "agentrl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}},
        {"class_name": "agentrl.tools.calculator_tool.CalculatorTool"},
    ]
    write_yaml(folder / "tools.yaml", {"tools": tools})
    yield folder
    stop_world()
    torch.set_num_threads(threads)


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for file in (SHARED / "tokenizers/qwen2_5").iterdir():
        shutil.copyfile(file, folder / file.name)


def make_config(home: Path, name: str, **multi_turn: Any) -> RunConfig:
    interaction = ROOT / "configs/interaction_config/gsm8k_interaction_config.yaml"
    return parse_config(
        {
            "data": {
                "train_files": [home / "data/train.parquet"],
                "train_batch_size": ROWS,
                "max_prompt_length": 900,
                "max_response_length": 512,
                "filter_num_workers": 1,
                "cache_dir": home / "cache",
            },
            "model": {"path": str(home / "model")},
            "rollout": {
                "n": SAMPLES,
                "temperature": 0.8,
                "multi_turn": {
                    "tool_config_path": home / "tools.yaml",
                    "interaction_config_path": interaction,
                    "tokenization_sanity_check_frac": 1.0,
                    **multi_turn,
                },
            },
            "reward": {"custom_reward_function": {"path": str(home / "score.py")}},
            "actor": {"optim": {"lr": 1e-3}},
            "trainer": {
                "default_local_dir": home / name,
                "total_training_steps": 2,
                "device": "cpu",
                "plot": False,
                "logger": ["jsonl"],
            },
        }
    )


def with_engine(trainer: Trainer, engine: Engine) -> None:
    """Put another engine into a trainer that has not begun."""
    manager = make_manager(trainer.config, trainer.parts.setup, engine)
    trainer.parts = dataclasses.replace(trainer.parts, engine=engine, manager=manager)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in iter_full_weights(trainer.parts.actor.policy)}


class WatchedTrainer(Trainer):
    """A trainer that keeps the last step's requests and batch, and may use a part of a batch."""

    num_prompts = ROWS
    requests: list[AsyncRolloutRequest]
    batch: DataProto

    def load_prompts(self) -> Sequence[Prompt]:
        return super().load_prompts()[: self.num_prompts]

    def collate(self, requests: Sequence[AsyncRolloutRequest]) -> DataProto:
        self.requests, self.batch = list(requests), super().collate(requests)
        return self.batch


def assert_trained_is_what_was_sampled(
    engine: RecordingEngine, requests: list[AsyncRolloutRequest], batch: DataProto
) -> None:
    """Laws 1 and 2, from the engine's own words to the tensors of the update."""
    for row, request in enumerate(requests):
        said = engine.said[request.request_id]
        for input_ids, done in said:
            end = len(input_ids) + len(done.token_ids)
            assert request.input_ids[: len(input_ids)] == input_ids
            assert request.input_ids[len(input_ids) : end] == done.token_ids
        sampled = [token for _, done in said for token in done.token_ids]
        log_probs = [value for _, done in said for value in done.log_probs]
        mask = batch.batch["response_mask"][row].bool()
        assert batch.batch["responses"][row][mask].tolist() == sampled
        found = batch.batch["rollout_log_probs"][row]
        assert torch.equal(found[mask], torch.tensor(log_probs))
        assert not found[~mask].any()
        num_observed = request.num_response_tokens - len(sampled)
        assert sum(request.loss_mask) == len(sampled)
        assert request.loss_mask.count(0) == num_observed
        whole = batch.batch["attention_mask"][row].bool()
        assert batch.batch["input_ids"][row][whole].tolist() == request.input_ids


def test_rows_sampled_by_the_embedded_engine_go_all_the_way(home: Path):
    config = make_config(home, "sampled", max_tokens_per_turn=4, max_tool_response_length=64)
    trainer = WatchedTrainer(config)
    try:
        engine = RecordingEngine(trainer.parts.engine)
        with_engine(trainer, engine)
        trainer.sync_weights()
        before = weights_of(trainer)
        metrics = trainer.train_step()
        requests, batch = trainer.requests, trainer.batch
        assert len(requests) == ROWS * SAMPLES
        assert len({request.uid for request in requests}) == ROWS
        assert {r.stop_reason for r in requests} == {StopReason.INTERACTION_ENDED}
        assert {r.num_user_turns for r in requests} == {2}, "two hints, then the talk is over"
        assert_trained_is_what_was_sampled(engine, requests, batch)
        assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_steps"] == 0
        after = weights_of(trainer)
        assert all(not torch.equal(before[name], after[name]) for name in before)
        # The engine's weights are the new ones: it agrees with the trainer again.
        assert trainer.policy_version == 1
        again = trainer.roll_out(trainer.parts.data.train[:4], trainer.parts.manager.train_plan())
        second = trainer.collate(again)
        trainer.compute_log_probs(second)
        mask = second.batch["response_mask"].bool()
        difference = second.batch["old_log_probs"] - second.batch["rollout_log_probs"]
        assert difference[mask].abs().max() < 1e-4
        spans = [span for r in again for turn in r.turns for span in turn.weight_versions]
        assert {span.version for span in spans} == {1}
    finally:
        trainer.close()


# The scripted policy: the first sample of a group is corrected and finds the answer, the second
# insists on a wrong one.

CALLS = {
    "0": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>',
    "1": '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "-1"}}\n</tool_call>',
}
CALLED = ("calculator", "calc_gsm8k_reward")


def scripted_trainer(home: Path, name: str) -> WatchedTrainer:
    trainer = WatchedTrainer(make_config(home, name))
    truths = {prompt.index: str(prompt.ground_truth) for prompt in trainer.parts.data.train}

    def answer(ids: Sequence[int], _: SamplingParams, request_id: str, turn: int) -> str:
        _, _, index, _, offset = request_id.split("-")
        if turn == 0:
            return CALLS[offset]
        return f"#### {truths[int(index)]}" if turn == 2 and offset == "0" else "#### -1"

    engine = ScriptedEngine(answer, tokenizer=trainer.parts.setup.tokenizer)
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


def test_tools_and_interaction_are_walked_by_every_row(scripted_run: ScriptedRun):
    engine: Any = scripted_run.trainer.parts.engine
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


def test_rewards_of_the_script_move_the_weights(scripted_run: ScriptedRun):
    trainer, batch = scripted_run.trainer, scripted_run.batch.batch
    advantages, mask = batch["advantages"], batch["response_mask"].bool()
    assert not advantages[~mask].any()
    for row, request in enumerate(scripted_run.requests):
        sign = 1 if request.rollout_offset == 0 else -1
        assert (advantages[row][mask[row]] * sign > 0).all()
    assert scripted_run.metrics["actor/grad_norm"] > 0
    engine: Any = trainer.parts.engine
    assert trainer.policy_version == engine.version == 1
    after = weights_of(trainer)
    assert all(not torch.equal(old, after[name]) for name, old in scripted_run.before.items())


def test_checkpoint_is_complete_and_loads_as_written(scripted_run: ScriptedRun):
    trainer, path = scripted_run.trainer, scripted_run.path
    saved = load_file(path / "model.safetensors")
    assert saved["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 32)
    assert {file.name for file in path.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    }
    assert load_run(path, trainer.parts.actor).step == 1


def test_resumed_run_takes_the_step_of_the_uninterrupted_one(scripted_run: ScriptedRun, home: Path):
    trainer, path = scripted_run.trainer, scripted_run.path
    shutil.copytree(path, home / "resumed/checkpoints/global_step_1")
    resumed = scripted_trainer(home, "resumed")
    try:
        resumed.resume()
        resumed.sync_weights()
        assert (resumed.step, resumed.policy_version) == (1, 1)
        assert resumed.parts.order.state_dict() == trainer.parts.order.state_dict()
        assert_same_weights(trainer, resumed)
        moments = [one.parts.actor.optimizer.state_tensors() for one in (trainer, resumed)]
        assert moments[0].keys() == moments[1].keys()
        assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
        saved = json.loads((path / "state.json").read_text())
        again = resumed.parts.actor.counters()
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
