"""Names next to verl's agent loops: tool parsers, the texts of gpt-oss, timers, trajectories."""

import asyncio
import os
import time
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from agentrl.agent_loops.views import tool_view
from agentrl.errors import ConfigError
from agentrl.messages import ToolResponse, dump_json
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.tools import BaseTool
from agentrl.tools import initialize_tools_from_config as load_tools

P = TypeVar("P", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """A tool call as verl's parsers return it."""

    arguments: str
    """JSON."""
    name: str
    tool_call_id: str | None = None


class ToolParser:
    """Reads tool calls with the parser of agentrl that has the same name; base class of others.

    Args:
        tokenizer: The policy's.
        name: A tool-call format of agentrl.
    """

    _registry: ClassVar[dict[str, "type[ToolParser]"]] = {}

    def __init__(self, tokenizer: Any, name: str = "hermes") -> None:
        self.tokenizer, self._name = tokenizer, name

    @property
    def stop_token_ids(self) -> list[int]:
        """Further tokens that end a completion: none."""
        return []

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text without its calls, and the calls that can be read."""
        text = self.tokenizer.decode(list(responses_ids))
        parsed = get_tool_parser(self._name).parse(text, tools=list(tools or ()))
        calls = [
            FunctionCall(name=call.name, arguments=dump_json(call.arguments))
            for call in parsed.calls
        ]
        return parsed.content, calls

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Make a parser by name: a registered one, else one of agentrl.

        Raises:
            ConfigError: For an unknown name.
        """
        if name in cls._registry:
            return cls._registry[name](tokenizer)
        get_tool_parser(name)
        return ToolParser(tokenizer, name)

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Register a class of parsers."""

        def decorate(parser: P) -> P:
            cls._registry[name] = parser
            return parser

        return decorate


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """Build the tools of a YAML file; `execute` returns three values, as in verl."""
    return [tool_view(tool) for tool in load_tools(tools_config_file)]


class FunctionTool:
    """verl's class of function tools. agentrl's function tools have the methods of `BaseTool`, so
    none of them is an instance, and loops use these methods.
    """


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Return what a function tool returned as response, reward and metrics.

    Raises:
        TypeError: For a tuple of another length than 1, 2 or 3.
    """
    if isinstance(ret, tuple):
        if not 1 <= len(ret) <= 3:
            raise TypeError(f"a tuple of length {len(ret)}; expected (response, reward, metrics)")
        response, reward, metrics = (*ret, None, None)[:3]
        found, _, _ = normalize_function_tool_return(response)
        return found, 0.0 if reward is None else reward, metrics or {}
    if isinstance(ret, ToolResponse):
        return ret, 0.0, {}
    text = dump_json(ret) if isinstance(ret, dict) else str(ret)
    return ToolResponse(text=text), 0.0, {}


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """Write the answer of a tool in the format of gpt-oss."""
    head = f"<|start|>functions.{tool_call_name} to=assistant"
    return f"{head}<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """Append the opening of an assistant's turn in the format of gpt-oss."""
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(
    messages: Sequence[dict[str, Any]], tool_call_names: Sequence[str]
) -> str:
    """Write the answers of tools and the opening of a turn in the format of gpt-oss."""
    texts = map(
        format_gpt_oss_tool_response_manually,
        [message["content"] for message in messages],
        tool_call_names,
    )
    return add_generation_prompt_for_gpt_oss("".join(texts))


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Generator[None]:
    """Add the seconds of a block to `timing_raw[name]`."""
    started = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0) + time.perf_counter() - started


def resolve_config_path(config_path: str) -> str:
    """Return the path of an existing file as an absolute path.

    Raises:
        ConfigError: If there is no such file.
    """
    if not os.path.exists(config_path):
        raise ConfigError(f"no file {config_path}", expected="a path from the working directory")
    return os.path.abspath(config_path)


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop, or a new one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.new_event_loop()


async def get_trajectory_info(
    step: int, index: Sequence[Any], validate: bool
) -> list[dict[str, Any]]:
    """Number the samples of each prompt: rows with the same index follow each other."""
    found: list[dict[str, Any]] = []
    for position, sample in enumerate(index):
        is_next = position > 0 and index[position - 1] == sample
        rollout_n = found[-1]["rollout_n"] + 1 if is_next else 0
        found.append(
            {"step": step, "sample_index": sample, "rollout_n": rollout_n, "validate": validate}
        )
    return found
