"""Memory that runs out, numbers that are not finite, data and tokenizers that changed."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from agentrl.algorithms import get_policy_loss_fn, register_policy_loss
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.transformers.continuous_batching import Batcher
from agentrl.errors import OutOfMemoryError
from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.workers.batches import read_padded_rows, split_micro_batches
from agentrl.workers.distributed import start_world
from agentrl.workers.model import PolicyModel
from agentrl.workers.scoring import find_implausible
from tests.fakes.checkpoints import read_weights
from tests.fakes.engines import tiny_model
from tests.fakes.fault_runs import (
    Train,
    assert_refused,
    assert_same_run,
    assert_same_tensors,
    make_row,
    saved_steps,
)
from tests.fakes.runs import (
    read_lines,
    scripted,
    write_jsonl,
)
from tests.fakes.training import Layout, Row, make_actor, make_batch, make_policy

pytestmark = pytest.mark.usefixtures("alone")


# Memory that runs out.


FAULTS: list[str] = []
"""What goes wrong in the next micro-batches: `memory`, `gradient`, `loss`, or nothing."""


@register_policy_loss("faulty")
@register_policy_loss("faulty_like_vanilla", only_advantages=True)
def faulty_loss(old_log_prob: Any, log_prob: torch.Tensor, *rest: Any, scale: Any = None) -> Any:
    """The usual loss, with the next of `FAULTS`."""
    loss, metrics = get_policy_loss_fn("vanilla")(old_log_prob, log_prob, *rest, scale=scale)
    match FAULTS.pop(0) if FAULTS else "":
        case "memory":
            torch.empty(1 << 50)
        case "gradient":
            torch.rand(1)
            # Itself 0, and its derivative 0 times infinity.
            loss = loss + (log_prob * 0).abs().sqrt().sum()
        case "loss":
            loss = loss * float("inf")
        case _:
            pass
    return loss, metrics


@pytest.fixture
def faults() -> Iterator[list[str]]:
    FAULTS.clear()
    yield FAULTS
    FAULTS.clear()


def test_memory_that_runs_out_in_an_update_names_its_keys_and_keeps_the_last_step(
    train: Train, tmp_path: Path, whole: Path, faults: list[str]
):
    faults += ["", "", "memory"]
    output = train(actor__policy_loss="faulty_like_vanilla")
    assert_refused(
        output, "memory ran out in the update", "can't allocate memory: you tried to allocate",
        "micro_batch: ", "actor.ppo_max_token_len_per_gpu", "enable_gradient_checkpointing",
    )  # fmt: skip
    assert saved_steps(tmp_path / "run") == ["global_step_1"]
    assert train(actor__policy_loss="faulty_like_vanilla").code == 0
    assert_same_run(tmp_path / "run", whole)


def test_update_that_breaks_off_between_its_steps_is_not_saved(
    train: Train, tmp_path: Path, faults: list[str]
):
    faults += ["", "", "", "memory"]
    output = train(actor__policy_loss="faulty")
    assert_refused(output, "memory ran out in the update")
    assert "step 2 ended after it had changed the weights" in output.out
    assert not (tmp_path / "run/checkpoints").exists()


def test_memory_that_runs_out_in_the_engine_fails_its_calls_and_names_its_keys(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, steps = Batcher.step, iter(range(1000))

    def step(self: Batcher) -> bool:
        if (tmp_path / "run/checkpoints/global_step_1").exists() and next(steps) == 2:
            torch.empty(1 << 50)
        return real(self)

    monkeypatch.setattr(Batcher, "step", step)
    output = train(rollout__engine=None, data__val_files=None, trainer__save_freq=1)
    assert_refused(output, "4 of 4 requests failed", "the engine's memory ran out", "num_pages")
    assert saved_steps(tmp_path / "run") == ["global_step_1"]


def test_memory_that_the_system_refuses_is_reported_with_the_micro_batch():
    policy = make_policy(start_world("cpu", timeout_s=60), vocab_size=50_000)
    actor = make_actor(policy, Layout(budget=4096, block_bytes=1 << 40))
    batch = make_batch([Row([1], [2] * 3000, [1] * 3000)])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        with pytest.raises(OutOfMemoryError, match="memory ran out in log-probabilities") as raised:
            actor.compute_log_probs(batch, temperature=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "3000 tokens of 1 sequences, 3000 of them trained" in str(raised.value)


# Numbers that are not finite.


def test_step_that_is_not_finite_changes_nothing_and_leaves_its_rows_in_a_file(
    train: Train, tmp_path: Path, faults: list[str]
):
    faults += ["", "", "gradient", "", "loss", "loss"]
    rollouts = tmp_path / "rollouts"
    output = train(
        actor__policy_loss="faulty", trainer__save_freq=1, trainer__rollout_data_dir=str(rollouts)
    )
    assert output.code == 0, output
    one, two, three = (tmp_path / f"run/checkpoints/global_step_{step}" for step in (1, 2, 3))
    assert_same_tensors(one, two)
    states = [json.loads((path / "state.json").read_text()) for path in (one, two)]
    assert [state["actor"]["num_optimizer_steps"] for state in states] == [2, 2]
    weights = [read_weights(path) for path in (two, three)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line.get("actor/skipped_steps") for line in lines] == [None, 0, 2, 0]
    file = tmp_path / "run/skipped/step_000002.jsonl.zst"
    assert f"not finite in 2 rows: gradient; the rows to blame: {file}" in output.out
    saved = list(read_trajectories(file))
    notes = [(one.skipped.mini_batch, dict(one.skipped.not_finite)) for one in saved if one.skipped]
    assert notes == [(0, {"gradient": []})] * 2 + [(1, {"loss": []})] * 2
    of_step = [
        one.request.request_id for one in read_trajectories(rollouts / "step_000002.jsonl.zst")
    ]
    assert sorted(one.request.request_id for one in saved) == sorted(of_step)
    assert all(one.request.num_response_tokens for one in saved)


def test_gradient_alone_that_is_not_finite_is_laid_to_its_micro_batch(faults: list[str]):
    rows = [Row([1, 2], [3 + place, 4], [1, 1]) for place in range(4)]
    actor = make_actor(
        make_policy(start_world("cpu", timeout_s=60)), Layout(budget=1), policy_loss="faulty"
    )
    batch = make_batch(rows)
    order = [one.row_index for one in split_micro_batches(
        read_padded_rows(batch), range(4), 1, actor.world
    )]  # fmt: skip
    assert len(order) == 4, "a row each"
    faults += ["", "gradient", "", ""] * 2  # the update, and the search
    before = torch.get_rng_state()
    (skipped,) = actor.update_policy(batch, temperature=1.0).skipped
    assert skipped.request_ids == (f"r{order[1][0]}",)
    assert skipped.rows[0].not_finite == {"gradient": ()}
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(1)
    assert torch.equal(torch.get_rng_state(), after), "only the update itself has drawn"
    faults += ["", "gradient", "", ""]
    (skipped,) = actor.update_policy(batch, temperature=1.0).skipped
    assert len(skipped.rows) == 4, "none breaks alone: all may be to blame"
    assert not actor.optimizer.state_slices()


def test_run_that_takes_no_step_any_more_ends(train: Train, tmp_path: Path, faults: list[str]):
    faults += ["", "", *["loss"] * 8]
    output = train(actor__policy_loss="faulty", actor__max_skipped_updates=2)
    assert_refused(
        output,
        "the last 2 updates of the actor took no step",
        "actor.max_skipped_updates",
        "skipped/",
    )
    assert saved_steps(tmp_path / "run") == ["global_step_3"], "what was reached is kept"


# A dataset that changed under a resumed run.


def test_changed_rows_are_reported_before_the_model_loads(
    train: Train, plugin_folder: Path, tmp_path: Path
):
    assert train(trainer__total_training_steps=1).code == 0
    rows, file = [make_row(number) for number in range(12)], plugin_folder / "rows.jsonl"
    edited = [*rows[:7], rows[7] | {"reward_model": {"ground_truth": "7"}}, *rows[8:]]
    other = write_jsonl(tmp_path / "other.jsonl", [*rows, make_row(99)])
    for changed, changes, parts in (
        ([*rows, rows[0]], {}, ["there are 13 rows, there were 12", str(file)]),
        (edited, {}, ["the first that differs is row 7"]),
        (rows[::-1], {}, ["they are the same rows in another order"]),
        (rows, {"data__train_files": [str(other)]}, ["other.jsonl, were", "there are 13 rows"]),
        (
            rows,
            {"data__train_max_samples": 11, "data__max_prompt_length": 299},
            ["data.train_max_samples is 11, was None", "data.max_prompt_length is 299, was 300"],
        ),
        (rows, {"data__seed": 5}, ["data.seed is 5, was 0"]),
    ):
        write_jsonl(file, changed)
        output = train(**changes)
        assert_refused(output, "not those that the run began with", "global_step_1", *parts)
        assert "trainer.resume_mode=disable" in output.err
        assert "Qwen2ForCausalLM" not in output.out


def test_changed_validation_set_is_reported_and_the_run_continues(
    train: Train, plugin_folder: Path, tmp_path: Path
):
    assert train(trainer__total_training_steps=1).code == 0
    other = write_jsonl(tmp_path / "val.jsonl", [make_row(50)])
    output = train(data__val_files={"rows": str(other)}, trainer__total_training_steps=2)
    assert output.code == 0, output
    assert "the validation set 'rows' is not the one that the run began with" in output.out


@pytest.mark.slow
def test_rows_under_another_name_are_the_same_rows(
    train: Train, plugin_folder: Path, tmp_path: Path
):
    assert train(trainer__total_training_steps=1).code == 0
    moved = (plugin_folder / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    output = train(
        data__train_files=[str(moved)],
        data__val_files={"rows": str(moved)},
        trainer__total_training_steps=2,
    )
    assert output.code == 0, output
    assert "began with" not in output.out


# A tokenizer and a model that disagree.


def test_tokenizer_with_more_tokens_than_the_model_is_reported_before_the_model_loads(
    train: Train, tiny_home: Path, tmp_path: Path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_home / "policy")
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(9)])
    tokenizer.save_pretrained(tmp_path / "larger")
    output = train(model__tokenizer_path=str(tmp_path / "larger"))
    assert_refused(output, "the tokenizer has ids up to 408, the model has 400 embeddings")
    assert "Qwen2ForCausalLM" not in output.out


def test_tokenizer_that_disagrees_with_the_models_own_is_refused(
    train: Train, tiny_home: Path, tmp_path: Path
):
    other = tmp_path / "other"
    other.mkdir()
    for file in (tiny_home / "policy").glob("*token*"):
        (other / file.name).write_text(file.read_text())
    (other / "chat_template.jinja").write_text(
        (tiny_home / "policy/chat_template.jinja").read_text()
    )
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    output = train(model__tokenizer_path=str(other))
    assert_refused(output, "is 'b' to the tokenizer of", "and 'a' to the one in the model's folder")


def test_special_tokens_of_another_tokenizer_are_reported(
    train: Train, tiny_home: Path, tmp_path: Path
):
    policy = tmp_path / "policy"
    policy.mkdir()
    for file in (tiny_home / "policy").iterdir():
        (policy / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        content = json.loads((policy / name).read_text())
        content["eos_token_id"] = 70
        (policy / name).write_text(json.dumps(content))
    output = train(model__path=str(policy), trainer__total_training_steps=1)
    assert output.code == 0, output
    assert "note: the model's eos_token_id is 70, which is the plain token" in output.out
    assert "note: the tokenizer's end of sequence is '<|im_end|>'" in output.out


def test_template_without_an_end_of_turn_token_is_reported(train: Train):
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}[END]\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    changes: dict[str, Any] = {
        "model__custom_chat_template": template,
        "rollout__multi_turn": {"max_tokens_per_turn": 8},
        "rollout__engine": scripted("42[END]"),
        "data__val_files": None,
        "trainer__total_training_steps": 0,
    }
    output = train(**changes)
    assert output.code == 0, output
    assert "note: the chat template ends a turn with no token of the tokenizer" in output.out
    assert "ends a turn with" not in train(**changes, rollout__stop=["[END]"]).out


def make_walk(length: int, draws: torch.Generator, *, jumps: float) -> list[int]:
    """Ids from 10 to 29, each the one behind the last but for jumps."""
    ids = [10]
    while len(ids) < length:
        leap = int(torch.randint(10, 30, (1,), generator=draws))
        is_leap = torch.rand(1, generator=draws).item() < jumps
        ids.append(leap if is_leap else 10 + (ids[-1] - 9) % 20)
    return ids


def make_walker() -> PolicyModel:
    """A policy that was trained a little, on walks with few jumps, and is sure of itself."""
    lm = tiny_model(vocab_size=600, initializer_range=0.1, tie_word_embeddings=False)
    optimizer, draws = torch.optim.AdamW(lm.parameters(), lr=0.02), torch.Generator().manual_seed(1)
    for _ in range(100):
        ids = torch.tensor([make_walk(24, draws, jumps=0.02) for _ in range(4)])
        logits = lm(input_ids=ids).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return PolicyModel(lm, start_world("cpu", timeout_s=60), torch.float32, FsdpConfig())


def test_prompt_that_a_trained_policy_cannot_read_is_reported():
    policy = make_walker()
    # Nothing that it was trained on: less likely than chance (6.4 nats), and in its own ids.
    prompt = make_walk(60, torch.Generator().manual_seed(2), jumps=1.0)
    assert find_implausible(policy, prompt, budget=64) is None
    other = torch.randperm(600, generator=torch.Generator().manual_seed(3))
    message = find_implausible(policy, other[torch.tensor(prompt)].tolist(), budget=64)
    assert message is not None
    assert "about as unlikely as random tokens" in message
    assert find_implausible(policy, prompt[:1], budget=64) is None


def test_policy_that_knows_nothing_is_not_suspected():
    lm = tiny_model(initializer_range=0.02)
    policy = PolicyModel(lm, start_world("cpu", timeout_s=60), torch.float32, FsdpConfig())
    assert find_implausible(policy, list(range(5, 60)), budget=64) is None


def test_doubt_about_the_tokenizer_is_not_repeated_at_a_resume(
    train: Train, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.trainer.components.find_doubt", lambda *_: "it is unlikely")
    assert "note: it is unlikely" in train(trainer__total_training_steps=1).out
    again = train(trainer__total_training_steps=2)
    assert "resumed from" in again.out
    assert "unlikely" not in again.out
