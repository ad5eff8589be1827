"""The production templates and the real tokenizer, for tests of chat templates."""

import re
from functools import lru_cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentrl.messages import Message, OpenAIFunctionToolSchema, ToolCall
from agentrl.rollout.templates import ChatTemplate, TemplateReport, probe_template

DATA = Path(__file__).resolve().parents[2].parent / "shared/data"
TEMPLATES = DATA / "chat_templates"
NAMES = (
    "cohere2",
    "deepseek_r1_distill",
    "gemma3",
    "glm4moe",
    "gptoss",
    "llama3_2",
    "phi3_5",
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
)
CONTROL = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>"
    r"|</?(?:tool_response|arg_key|arg_value)>"
)


@lru_cache(maxsize=1)
def load_tokenizer() -> PreTrainedTokenizerBase:
    """The Qwen2.5 tokenizer, with every control token that the ten templates write."""
    if not TEMPLATES.exists():
        pytest.skip(f"needs the templates and tokenizer in {DATA}")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2_5")
    written = (CONTROL.findall(read_source(name)) for name in NAMES)
    found = dict.fromkeys(token for tokens in written for token in tokens)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in found if token not in known], special_tokens=True)
    return tokenizer


def read_source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@lru_cache(maxsize=16)
def load_template(name: str) -> ChatTemplate:
    """One of the ten production templates."""
    tokenizer = load_tokenizer()
    return ChatTemplate(tokenizer, custom_template=str(TEMPLATES / f"{name}.jinja"))


@lru_cache(maxsize=16)
def load_report(name: str) -> TemplateReport:
    return probe_template(load_template(name))


def make_template(source: str, **template_kwargs: object) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(), custom_template=source, template_kwargs=template_kwargs)


def render_really(
    name: str,
    messages: list[Message],
    tools: list[OpenAIFunctionToolSchema] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """What the template writes where the texts stand in the messages themselves."""
    return load_tokenizer().apply_chat_template(
        [message.to_template() for message in messages],
        tools=[tool.to_template() for tool in tools or []] or None,
        chat_template=read_source(name),
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text, tool_calls=list(calls) or None)


def call(name: str = "search", number: int = 0, **arguments: object) -> ToolCall:
    return ToolCall.model_validate(
        {"id": f"call0000{number}", "function": {"name": name, "arguments": arguments}}
    )


def tool(text: str, number: int = 0, name: str = "search") -> Message:
    return Message(role="tool", content=text, name=name, tool_call_id=f"call0000{number}")


def schema(name: str = "search", description: str = "Search.") -> OpenAIFunctionToolSchema:
    query = {"type": "string", "description": "What to look for."}
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {"query": query},
                    "required": ["query"],
                },
            },
        }
    )


def control_tokens(template: ChatTemplate, ids: list[int]) -> list[int]:
    """Ids in `ids` that are added tokens, in order."""
    added = set(load_tokenizer().get_added_vocab().values())
    return [id for id in ids if id in added]
