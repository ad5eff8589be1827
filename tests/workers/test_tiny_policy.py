import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agentrl.config.schema.prepare import ArithmeticConfig, TinyPolicyConfig
from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.data.rows import load_conversations
from agentrl.errors import DataError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.quickstart.arithmetic import prepare_arithmetic
from agentrl.quickstart.tiny_policy import make_tiny_policy, train_tokenizer
from agentrl.rollout.templates import ChatTemplate, encode_conversation
from agentrl.workers.load import load_policy

CALCULATOR = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TinyPolicyConfig:
    folder = tmp_path_factory.mktemp("tiny")
    prepare_arithmetic(
        ArithmeticConfig(out_dir=folder / "data", num_train=4, num_val=4, num_demos=200)
    )
    made = TinyPolicyConfig(
        out_dir=folder / "policy", corpus=folder / "data" / "demos.jsonl", vocab_size=500
    )
    assert make_tiny_policy(made, tools=[CALCULATOR])
    return made


def test_made_once_and_the_same_from_the_same(config: TinyPolicyConfig, tmp_path: Path):
    assert not make_tiny_policy(config, tools=[CALCULATOR])
    again = config.model_copy(update={"out_dir": tmp_path / "again"})
    assert make_tiny_policy(again, tools=[CALCULATOR])
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again.out_dir / name).read_bytes() == (config.out_dir / name).read_bytes()


def test_another_seed_makes_other_weights(config: TinyPolicyConfig, tmp_path: Path):
    other = config.model_copy(update={"out_dir": tmp_path, "seed": 1})
    make_tiny_policy(other, tools=[CALCULATOR])
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path, config.out_dir)]
    assert weights[0] != weights[1]


def test_files_of_another_origin_are_not_overwritten(config: TinyPolicyConfig, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="was not made by"):
        make_tiny_policy(config.model_copy(update={"out_dir": tmp_path}))


def test_seed_of_the_process_is_left_alone(config: TinyPolicyConfig, tmp_path: Path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_tiny_policy(config.model_copy(update={"out_dir": tmp_path}))
    assert torch.equal(torch.rand(3), expected)


def test_folder_loads_as_any_other_model(config: TinyPolicyConfig):
    model = AutoModelForCausalLM.from_pretrained(config.out_dir)
    tokenizer = AutoTokenizer.from_pretrained(config.out_dir)
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer) <= 500
    ends = GenerationConfig.from_pretrained(config.out_dir).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]
    assert sum(p.numel() for p in model.parameters()) < 140_000


def test_tokenizer_after_loading_is_the_one_that_was_trained(config: TinyPolicyConfig):
    conversations = load_conversations(config.corpus)
    trained = train_tokenizer(conversations, config.vocab_size, [CALCULATOR])
    loaded = AutoTokenizer.from_pretrained(config.out_dir)
    for message in conversations[0].messages:
        assert loaded.encode(message.text) == trained.encode(message.text)
    assert loaded.get_vocab() == trained.get_vocab()


def test_digits_tags_and_role_words_are_single_tokens(config: TinyPolicyConfig):
    tokenizer = AutoTokenizer.from_pretrained(config.out_dir)
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for word in ("assistant", "user", "system", "<tool_call>", "</tool_response>", "<|im_start|>"):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word
    anything = "Ünïcode 12,5 € \x00 {}"
    assert tokenizer.decode(tokenizer.encode(anything)) == anything


def test_template_carries_a_whole_conversation_with_tools(config: TinyPolicyConfig):
    tokenizer = AutoTokenizer.from_pretrained(config.out_dir)
    call = {
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": "1"}},
    }
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="1?"),
        Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call, call]}),
        Message(role="tool", content="1"),
        Message(role="tool", content="2"),
        Message(role="assistant", content="#### 1"),
    ]
    text = tokenizer.apply_chat_template(
        [message.to_template() for message in messages],
        tools=[CALCULATOR.to_template()],
        tokenize=False,
    )
    schema = json.dumps(CALCULATOR.to_template()["function"])
    called = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    hint = 'Call: <tool_call>{"name": ..., "arguments": ...}</tool_call>'
    assert text == (
        f"<|im_start|>system\nBe brief.\nTools:\n{schema}\n{hint}<|im_end|>\n"
        "<|im_start|>user\n1?<|im_end|>\n"
        f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n#### 1<|im_end|>\n"
    )
    encoded = encode_conversation(ChatTemplate(tokenizer), messages, [CALCULATOR])
    assert tokenizer.decode(encoded.ids) == text.removesuffix("\n")


def test_policy_trains_packed(world, config: TinyPolicyConfig):
    policy = load_policy(ModelConfig(path=str(config.out_dir)), world, FsdpConfig())
    assert policy.transform.scale == 1.0
