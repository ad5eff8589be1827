import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config.schema.prepare import ArithmeticConfig, SftConfig, TinyPolicyConfig
from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import OptimConfig
from agentrl.data.rows import load_conversations
from agentrl.errors import ConfigError, DataError
from agentrl.quickstart.arithmetic import prepare_arithmetic
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.rollout.templates import ChatTemplate, encode_conversation
from agentrl.tools.calculator_tool import CalculatorTool
from agentrl.workers.demonstrations import DemonstrationEncoder, Demonstrations, pad_demonstrations
from agentrl.workers.distributed import World
from agentrl.workers.sft import SftStep, run_sft
from tests.fakes.runs import write_jsonl

TOOLS = [CalculatorTool({}).tool_schema]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SftConfig:
    folder = tmp_path_factory.mktemp("sft")
    data = ArithmeticConfig(out_dir=folder / "data", num_train=4, num_val=4, num_demos=40)
    prepare_arithmetic(data)
    corpus = folder / "data" / "demos.jsonl"
    make_tiny_policy(
        TinyPolicyConfig(out_dir=folder / "policy", corpus=corpus, hidden_size=32, num_layers=1)
    )
    return SftConfig(
        model_path=str(folder / "policy"), train_file=corpus, out_dir=folder / "out",
        steps=30, batch_size=8, observed_loss_weight=0.3, num_held_out=0,
        optim=OptimConfig(name="muon", lr=8e-3, muon_lr=0.01, lr_scheduler="cosine"),
    )  # fmt: skip


def template(config: SftConfig) -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(config.model_path))


def test_warm_up_learns_and_leaves_a_plain_folder(world: World, config: SftConfig):
    seen = []
    result = run_sft(config, world, tools=TOOLS, on_step=seen.append)
    assert [step.step for step in seen] == list(range(1, 31))
    assert result.last == seen[-1]
    assert seen[-1].loss < 0.6 * seen[0].loss
    assert seen[-1].lr < seen[0].lr
    assert (result.num_conversations, result.num_dropped) == (40, 0)
    model = AutoModelForCausalLM.from_pretrained(config.out_dir)
    assert loss_of(model, config, seed_batch(config)) < 0.6 * seen[0].loss


def test_conversations_that_are_held_out_are_not_trained_and_their_loss_is_reported(
    world: World, config: SftConfig
):
    dataset = Demonstrations(config.model_copy(update={"num_held_out": 3}), template(config), TOOLS)
    held_out = {tuple(one.ids) for one in dataset.held_out()}
    trained = {tuple(one.ids) for batch in dataset.batches() for one in batch}
    assert len(held_out) == 3
    assert not held_out & trained
    result = run_sft(config.model_copy(update={"num_held_out": 3, "steps": 1}), world, tools=TOOLS)
    model = AutoModelForCausalLM.from_pretrained(config.out_dir)
    expected = loss_of(model, config, dataset.held_out())
    assert result.held_out_loss == pytest.approx(expected, rel=1e-4)


def test_a_conversation_that_calls_an_unknown_tool_is_refused(config: SftConfig, tmp_path: Path):
    call = {"function": {"name": "calculater", "arguments": {"expression": "1"}}}
    messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "tool_calls": [call]}]
    write_jsonl(tmp_path / "demos.jsonl", [{"messages": messages}])
    mine = config.model_copy(update={"train_file": tmp_path / "demos.jsonl"})
    with pytest.raises(DataError, match="calls the tool 'calculater'") as caught:
        Demonstrations(mine, template(config), [CalculatorTool({}).tool_schema])
    assert caught.value.details["row"] == 0
    assert caught.value.details["expected"] == "one of calculator"


def seed_batch(config: SftConfig):
    return next(Demonstrations(config, template(config), TOOLS).batches())


def loss_of(model, config: SftConfig, batch) -> float:
    """The weighted loss, one conversation after the other, unpadded."""
    total = weight_sum = 0.0
    with torch.no_grad():
        for one in batch:
            ids, weights = torch.tensor([one.ids]), torch.tensor(one.weights)[1:]
            log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            chosen = log_probs.gather(1, ids[0, 1:, None]).squeeze(1)
            total -= float((chosen * weights).sum())
            weight_sum += float(weights.sum())
    return total / weight_sum


def test_first_loss_is_that_of_the_naive_computation(world: World, config: SftConfig):
    seen = []
    run_sft(config.model_copy(update={"steps": 1}), world, tools=TOOLS, on_step=seen.append)
    model = AutoModelForCausalLM.from_pretrained(config.model_path)
    assert seen[0].loss == pytest.approx(loss_of(model, config, seed_batch(config)), rel=1e-4)


def first_step(config: SftConfig, world: World, **options: Any) -> SftStep:
    return run_sft(config.model_copy(update={"steps": 1}), world, tools=TOOLS, **options).last


def test_templates_of_the_run_are_those_of_the_warm_up(world: World, config: SftConfig):
    own = AutoTokenizer.from_pretrained(config.model_path).chat_template
    plain = first_step(config, world).num_tokens
    dated = ModelConfig(path="", custom_chat_template="{{ strftime_now('%Y') }}{{ word }}" + own)
    now = datetime(2031, 1, 1)
    year = first_step(config, world, model=dated, now=now).num_tokens
    assert year > plain
    kwargs = {"word": "a longer opening"}
    assert first_step(config, world, model=dated, now=now, template_kwargs=kwargs).num_tokens > year
    exported = AutoTokenizer.from_pretrained(config.out_dir).chat_template
    assert exported == dated.custom_chat_template


def test_model_settings_of_the_run_are_those_of_the_warm_up(
    world: World, config: SftConfig, tmp_path: Path
):
    exact = first_step(config, world).loss
    rough = first_step(config, world, model=ModelConfig(path="unread", dtype="bfloat16")).loss
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.02)
    scale = ModelConfig(path="", override_config={"rope_thetta": 1.0})
    with pytest.raises(ConfigError, match="rope_thetta"):
        first_step(config, world, model=scale)
    with pytest.raises(ConfigError, match="nowhere"):
        first_step(
            config, world, model=ModelConfig(path="", tokenizer_path=str(tmp_path / "nowhere"))
        )


def test_weights_are_one_on_assistant_tokens_and_none_on_the_system_prompt(config: SftConfig):
    chat = template(config)
    conversation = next(c for c in load_conversations(config.train_file) if len(c.messages) > 3)
    encoder = DemonstrationEncoder(chat, 0.3)
    found = encoder.encode(conversation.messages, [])
    mask = encode_conversation(chat, conversation.messages, []).loss_mask
    assert [weight == 1.0 for weight in found.weights] == [bool(bit) for bit in mask]
    opening = found.weights.index(0.3)
    assert set(found.weights[opening:]) == {0.3, 1.0}
    system = chat.decode(found.ids[:opening])
    assert conversation.messages[0].text in system
    assert conversation.messages[1].text not in system
    assert chat.decode(found.ids[opening:]).startswith(conversation.messages[1].text[:4])


def test_order_is_seeded_and_each_epoch_has_every_row(config: SftConfig):
    one_epoch = config.model_copy(update={"steps": 5})

    def ids(changed: SftConfig) -> list[list[int]]:
        batches = Demonstrations(changed, template(config), TOOLS).batches()
        return [one.ids for batch in batches for one in batch]

    first = ids(one_epoch)
    assert first == ids(one_epoch)
    other = ids(one_epoch.model_copy(update={"seed": 1}))
    assert first != other
    assert sorted(first) == sorted(other)


def test_long_conversations_are_dropped_and_counted(config: SftConfig):
    lengths = sorted(
        len(one.ids) for one in seed_batch(config.model_copy(update={"batch_size": 40}))
    )
    data = Demonstrations(
        config.model_copy(update={"max_length": lengths[20], "steps": 12}), template(config), TOOLS
    )
    assert all(len(one.ids) <= lengths[20] for batch in data.batches() for one in batch)
    assert data.num_dropped == sum(length > lengths[20] for length in lengths)
    with pytest.raises(DataError, match="no conversation has at most 3 tokens"):
        next(
            Demonstrations(
                config.model_copy(update={"max_length": 3}), template(config), TOOLS
            ).batches()
        )


def test_padding_is_no_response(config: SftConfig):
    rows, weights = pad_demonstrations(seed_batch(config)[:3])
    assert rows.input_ids.shape[1] == rows.response_mask.shape[1] + 1
    assert not rows.response_mask[rows.attention_mask[:, 1:] == 0].any()
    assert torch.equal(rows.response_mask, weights != 0)


def test_bad_row_is_named(config: SftConfig, tmp_path: Path):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "nobody", "content": "x"}]}) + "\n")
    with pytest.raises(DataError) as caught:
        Demonstrations(config.model_copy(update={"train_file": file}), template(config), TOOLS)
    assert caught.value.details["row"] == 0


def test_halves_in_two_threads_train_as_one_thread_does(world: World, config: SftConfig):
    short = config.model_copy(update={"steps": 3})
    num_threads, losses = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            seen: list[SftStep] = []
            run_sft(short, world, tools=TOOLS, on_step=seen.append)
            assert torch.get_num_threads() == count
            losses.append([(step.loss, step.grad_norm) for step in seen])
    finally:
        torch.set_num_threads(num_threads)
    one, two, again = losses
    assert two == again
    assert torch.allclose(torch.tensor(one), torch.tensor(two), rtol=1e-4)
