"""Rows of the real GSM8K, the real Qwen2.5 tokenizer and a Qwen2 of random weights."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl import RunConfig, Trainer
from agentrl.config import parse_config
from agentrl.config.schema.prepare import Gsm8kConfig
from agentrl.data.prepare.gsm8k import prepare_gsm8k
from agentrl.data.rows import Prompt
from agentrl.engines import Completion, Engine, SamplingParams
from agentrl.media.records import MediaSpan
from agentrl.protocol import DataProto
from agentrl.rollout import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.trainer.engine_sync import EngineSync
from agentrl.trainer.setup.rollout_setup import make_manager
from agentrl.workers.weight_sync import iter_full_weights
from tests.fakes.runs import ROOT, SHARED, write_yaml

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
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        done = await self.inner.generate(input_ids, sampling, request_id=request_id, media=media)
        self.said.setdefault(request_id, []).append((list(input_ids), done))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def make_home(folder: Path) -> Path:
    """Write rows, model and tools; skip where the real data is not at hand."""
    if not (SHARED / "gsm8k/train.jsonl").is_file():
        pytest.skip(f"needs GSM8K and the Qwen2.5 tokenizer in {SHARED}")
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
    return folder


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


def make_config(
    home: Path, name: str, *, engine: str = "transformers", **multi_turn: Any
) -> RunConfig:
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
                "engine": {"name": engine},
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
    manager = make_manager(trainer.config, trainer.components.setup, engine)
    trainer.components = dataclasses.replace(trainer.components, engine=engine, manager=manager)
    trainer.engine_sync = EngineSync.of(trainer.config, engine, trainer.components.actor.policy)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in iter_full_weights(trainer.components.actor.policy)}


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
    """The ledger is consistent and trains what was sampled, up to the tensors of the update."""
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


def run_all_stages(config: RunConfig) -> None:
    """One step on what an engine samples, and a look at the engine behind it."""
    trainer = WatchedTrainer(config)
    try:
        engine = RecordingEngine(trainer.components.engine)
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
        again = trainer.roll_out(
            trainer.components.data.train[:4], trainer.components.manager.train_plan()
        )
        second = trainer.collate(again)
        scores = trainer.components.actor.compute_log_probs(
            second, temperature=config.rollout.temperature
        )
        mask = second.batch["response_mask"].bool()
        difference = scores.log_probs - second.batch["rollout_log_probs"]
        assert difference[mask].abs().max() < 1e-4
        spans = [span for r in again for turn in r.turns for span in turn.weight_versions]
        assert {span.version for span in spans} == {1}
    finally:
        trainer.close()
