"""Tiny reward models with random weights, and tokenizers and templates of their own."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from agentrl.engines.protocol import FinishReason
from agentrl.messages import Message
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason

VOCAB_SIZE = 264
OPENING, END, PADDING = "<|turn|>", "<|end|>", "<|pad|>"
TEMPLATE = """\
{%- if tools %}<|turn|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}
{%- for message in messages %}<|turn|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
call {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}<|end|>
{% endfor %}"""
"""Writes every role, the calls and the tools."""
WITHOUT_TOOL_ROLE = """\
{%- for message in messages %}
{%- if message.role not in ['user', 'assistant'] %}
{{- raise_exception('only user and assistant roles are supported') }}
{%- endif %}<|turn|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor %}"""
"""Refuses the role `tool`, as the templates of many reward models do."""
DROPS_TOOLS = """\
{%- for message in messages if message.role in ['user', 'assistant'] %}<|turn|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor %}"""
"""Drops results of tools without a word."""


def byte_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token for each byte, and three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PADDING,
        additional_special_tokens=[OPENING], chat_template=template,
    )  # fmt: skip


def build_reward_model(
    *, num_labels: int = 1, pad_token_id: int | None = None, family: str = "Qwen2"
) -> PreTrainedModel:
    """A causal model with a head of random weights; its scores differ clearly."""
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=48, max_position_embeddings=2048,
        pad_token_id=pad_token_id, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.num_labels = num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForSequenceClassification")(config)
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.5 if "score" in name else 0.1)
    return model


def build_encoder_model() -> BertForSequenceClassification:
    """A bidirectional model with positions of its own, whose score is read at its first token."""
    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=48, max_position_embeddings=2048,
        pad_token_id=byte_tokenizer().pad_token_id,
    )  # fmt: skip
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(config)


def make_reward_model(
    folder: Path, model: PreTrainedModel | None = None, template: str = TEMPLATE
) -> Path:
    """Write a Hugging Face folder."""
    (model or build_reward_model()).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def finished_conversation(*messages: Message, tools: Sequence[Any] = ()) -> AsyncRolloutRequest:
    """A completed request with these messages and one sampled token."""
    request = AsyncRolloutRequest(messages=list(messages), tool_schemas=list(tools))
    request.begin([1])
    request.take_edge(RequestState.RUNNING)
    request.append_sampled([2], [-0.5], finish_reason=FinishReason.STOP)
    request.finish(StopReason.ANSWERED)
    request.reward = 0.0
    return request


def ask(question: str, answer: str) -> AsyncRolloutRequest:
    """A completed request of two messages."""
    return finished_conversation(
        Message(role="user", content=question), Message(role="assistant", content=answer)
    )


def run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a loop of its own."""
    return asyncio.run(work)
