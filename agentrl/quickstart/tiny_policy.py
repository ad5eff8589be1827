"""Make a policy small enough to learn on two cores: a tokenizer and a model of random weights.

The tokenizer is a byte-level BPE trained on rendered conversations. (Without the role names in the
corpus, `assistant` is six tokens.) Each digit is a token, so that the policy can copy numbers and
compare them digit by digit.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.atomic_io import naming_path
from agentrl.config.schema.prepare import TinyPolicyConfig, TinyVisionConfig
from agentrl.data.prepare.manifest import content_of, make_once
from agentrl.data.rows import Conversation, load_conversations
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.workers.base_files import BaseFiles
from agentrl.workers.export import refuse_damage, write_lm
from agentrl.workers.export_check import find_damage

START_OF_TURN, END_OF_TURN, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
)  # fmt: skip
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

MAX_CORPUS_CONVERSATIONS = 2000
"""This number is enough for a vocabulary of some hundred tokens."""

CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro turn(role, content) -%}
{{- '<|im_start|>' + role + '\\n' + show(content) + '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{%- set ns = namespace(text=system + '\\nTools:') -%}
{%- for tool in tools -%}
{%- set ns.text = ns.text + '\\n' + (tool.function | tojson) -%}
{%- endfor -%}
{%- set system = ns.text + '\\nCall: <tool_call>{"name": ..., "arguments": ...}</tool_call>' -%}
{%- endif -%}
{%- if system -%}{{- turn('system', system) -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role != 'system' or not loop.first -%}
{{- turn(message.role, message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with tool calls in the Hermes format and images, as short as possible."""


def make_tiny_policy(
    config: TinyPolicyConfig, *, tools: Sequence[OpenAIFunctionToolSchema] = ()
) -> bool:
    """Write a Hugging Face folder with a small model and its tokenizer, unless it exists.

    The same configuration, corpus and tools make the same files.

    Args:
        config: Sizes, seed, corpus.
        tools: Tools of the run. Their schemas are part of the corpus of the tokenizer.

    Returns:
        Whether files were made.

    Raises:
        DataError: If the corpus cannot be read, or the folder has files of another origin.
    """
    folder = config.out_dir
    without = {"out_dir", "corpus"} | (set() if config.vision else {"vision"})
    arguments = config.model_dump(mode="json", exclude=without)
    arguments["of"] = content_of(config.corpus)
    arguments["tools"] = [tool.to_template() for tool in tools]
    files = [folder / "model.safetensors", folder / "config.json", folder / "tokenizer.json"]
    return make_once(folder, "tiny_policy/3", arguments, files, lambda: _write(config, tools))


def train_tokenizer(
    conversations: Sequence[Conversation],
    vocab_size: int,
    tools: Sequence[OpenAIFunctionToolSchema] = (),
    *,
    has_vision: bool = False,
) -> Qwen2Tokenizer:
    """Train a byte-level BPE on rendered conversations.

    Args:
        conversations: The corpus.
        vocab_size: Number of tokens, including control tokens and tool tags.
        tools: Tools of the conversations that name none.
        has_vision: Whether the vocabulary has the control tokens of images.
    """
    control = [START_OF_TURN]
    if has_vision:
        control += [VISION_START, VISION_END, IMAGE, VIDEO]
    # AutoTokenizer uses the pre-tokenizer of Qwen2 when it loads the folder.
    untrained = Qwen2Tokenizer(
        vocab={},
        merges=[],
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=control,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer = untrained.train_new_from_iterator(
        _corpus(untrained, conversations, tools),
        vocab_size - len(TOOL_TAGS),
        show_progress=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens(list(TOOL_TAGS))
    return tokenizer


def build_tiny_model(config: TinyPolicyConfig, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Build a Qwen2 model with random weights from the configured seed."""
    vocabulary = tokenizer.get_vocab()
    end_of_turn, end_of_text = vocabulary[END_OF_TURN], vocabulary[END_OF_TEXT]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(**_text_settings(config, vocabulary), tie_word_embeddings=True)
        )
    model.generation_config = GenerationConfig(
        eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text
    )
    return model


def _text_settings(config: TinyPolicyConfig, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": len(vocabulary),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": vocabulary[END_OF_TURN],
        "pad_token_id": vocabulary[END_OF_TEXT],
    }


def build_vision_model(
    config: TinyPolicyConfig, vision: TinyVisionConfig, tokenizer: Qwen2Tokenizer
) -> Qwen2VLForConditionalGeneration:
    """Build a Qwen2-VL model with random weights from the configured seed."""
    vocabulary = tokenizer.get_vocab()
    pairs = config.hidden_size // config.num_heads // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(
                text_config=_text_settings(config, vocabulary) | {"rope_parameters": rope},
                vision_config={
                    "in_chans": 3,  # SGLang reads this name
                    "depth": vision.num_layers,
                    "embed_dim": vision.hidden_size,
                    "hidden_size": config.hidden_size,
                    "num_heads": vision.num_heads,
                    "mlp_ratio": 2,
                    "patch_size": vision.patch_size,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                },
                image_token_id=vocabulary[IMAGE],
                video_token_id=vocabulary[VIDEO],
                vision_start_token_id=vocabulary[VISION_START],
                vision_end_token_id=vocabulary[VISION_END],
                tie_word_embeddings=True,
            )
        )
    ends = [vocabulary[END_OF_TURN], vocabulary[END_OF_TEXT]]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    return model


def make_image_processor(vision: TinyVisionConfig) -> Qwen2VLImageProcessorPil:
    """Make the processor of images: each becomes a square of `image_size`."""
    pixels = vision.image_size**2
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=pixels,
        max_pixels=pixels,
    )


def _write(config: TinyPolicyConfig, tools: Sequence[OpenAIFunctionToolSchema]) -> None:
    conversations = load_conversations(config.corpus, max_rows=MAX_CORPUS_CONVERSATIONS)
    tokenizer = train_tokenizer(
        conversations, config.vocab_size, tools, has_vision=config.vision is not None
    )
    folder = config.out_dir
    with naming_path(folder):
        tokenizer.save_pretrained(folder)
        if config.vision is None:
            lm = build_tiny_model(config, tokenizer)
        else:
            lm = build_vision_model(config, config.vision, tokenizer)
            make_image_processor(config.vision).save_pretrained(folder)
        written = write_lm(lm, lm.named_parameters(), folder, lm.dtype, BaseFiles())
        refuse_damage(find_damage(folder, written, tokenizer), folder)


def _corpus(
    renderer: Qwen2Tokenizer,
    conversations: Sequence[Conversation],
    tools: Sequence[OpenAIFunctionToolSchema],
) -> Iterator[str]:
    """Yield the texts between control tokens of the rendered conversations."""
    images = (VISION_START, VISION_END, IMAGE, VIDEO)
    control = (START_OF_TURN, END_OF_TURN, END_OF_TEXT, *TOOL_TAGS, *images)
    marks = re.compile("|".join(map(re.escape, control)))
    for conversation in islice(conversations, MAX_CORPUS_CONVERSATIONS):
        schemas: list[Any] = [tool.to_template() for tool in conversation.tools or tools]
        rendered = renderer.apply_chat_template(
            [message.to_template() for message in conversation.messages],
            tools=schemas or None,
            tokenize=False,
        )
        yield from (text for text in marks.split(str(rendered)) if text)
