# pyright: reportIncompatibleMethodOverride=false
"""Tools and interactions that misbehave where they are told to."""

import asyncio
import os
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.errors import ToolError
from agentrl.interactions import BaseInteraction, InteractionResult
from agentrl.messages import FunctionCall, OpenAIFunctionToolSchema, ToolCall
from agentrl.tools import BaseTool, ToolResponse, ToolResult

BEHAVIOURS = ("fine", "raise", "tool_error", "exit", "cancel_self", "hang", "ignore_cancel", "none")


def schema(name: str, **properties: dict[str, Any]) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


def call(name: str, index: int = 0, **arguments: Any) -> ToolCall:
    """Return a call of a tool."""
    return ToolCall(id=f"call_{index}", function=FunctionCall(name=name, arguments=arguments))


async def behave(behaviour: str) -> None:
    """Misbehave as told; `fine` and `none` do nothing."""
    match behaviour:
        case "raise":
            raise ValueError("secret detail")
        case "tool_error":
            raise ToolError("try a smaller number")
        case "exit":
            raise SystemExit(3)
        case "cancel_self":
            raise asyncio.CancelledError
        case "hang":
            await asyncio.Event().wait()
        case "ignore_cancel":
            while True:
                try:
                    await asyncio.sleep(0.3)
                    return
                except asyncio.CancelledError:
                    continue


class FlakyTool(BaseTool):
    """Behaves in each method as `behaviours` says, and counts."""

    def __init__(self, name: str = "flaky", **behaviours: str) -> None:
        super().__init__({}, schema(name))
        self.behaviours = behaviours
        self.counts: Counter[str] = Counter()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    async def _enter(self, method: str, kwargs: dict[str, Any]) -> None:
        self.counts[method] += 1
        self.seen.append((method, kwargs))
        await behave(self.behaviours.get(method, "fine"))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        await self._enter("create", kwargs)
        return instance_id or "", ToolResponse(text=self.behaviours.get("opening"))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await self._enter("execute", kwargs)
        return (
            None
            if self.behaviours.get("execute") == "none"
            else ToolResult(ToolResponse(text="ok"))
        )

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        await self._enter("calc_reward", kwargs)
        return None if self.behaviours.get("calc_reward") == "none" else 0.5

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._enter("release", kwargs)


class BlockingTool(BaseTool):
    """Blocks the thread it runs on for `config.block_s`; notes where it ran."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return schema("blocking")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters.get("block", True):
            time.sleep(self.config["block_s"])  # noqa: ASYNC251 - that is what it is for
        return {"thread": threading.get_ident(), "pid": os.getpid()}


class NoSuchKeyError(ToolError):
    """Packs, and does not unpack: it is built from two arguments and remembers one."""

    def __init__(self, table: str, key: int) -> None:
        super().__init__(f"no key {key} in {table}")


class CountingProcessTool(BaseTool):
    """Keeps a count in memory, and a log of its life in the file `config.log`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.counts: dict[str, int] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return schema("counting")

    def _note(self, method: str) -> None:
        with Path(self.config["log"]).open("a") as log:
            log.write(f"{method}\n")

    async def create(self, instance_id: str | None = None, start: int = 0) -> str:
        self._note("create")
        self.counts[instance_id or ""] = start
        return instance_id or ""

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
        self._note("execute")
        match parameters.get("do"):
            case "spin":
                while True:
                    pass
            case "die":
                os._exit(7)
            case "be_killed":  # as the kernel does where memory ran out
                os.kill(os.getpid(), signal.SIGKILL)
                return "dead"
            case "take_all_memory":
                resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
                return str(len(bytearray(1 << 40)))
            case "tool_error":
                raise ToolError("not so")
            case "own_tool_error":
                raise NoSuchKeyError("stars", 3)
            case "raise":
                raise ValueError("secret detail")
            case "unpicklable":
                return ToolResult("x", metrics={"lock": threading.Lock()})  # type: ignore[return-value]
            case _:
                self.counts[instance_id] += 1
                return str(self.counts[instance_id])

    async def calc_reward(self, instance_id: str) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str) -> None:
        self._note("release")
        del self.counts[instance_id]


class FlakyInteraction(BaseInteraction):
    """Behaves in each method as `behaviours` says, and counts."""

    def __init__(self, **behaviours: str) -> None:
        super().__init__({"name": "flaky"})
        self.behaviours = behaviours
        self.counts: Counter[str] = Counter()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.counts["start"] += 1
        await behave(self.behaviours.get("start", "fine"))
        return instance_id or ""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> Any:
        self.counts["respond"] += 1
        await behave(self.behaviours.get("respond", "fine"))
        if self.behaviours.get("respond") == "none":
            return None
        return InteractionResult(False, "go on", 0.5)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.counts["finalize"] += 1
        await behave(self.behaviours.get("finalize", "fine"))
