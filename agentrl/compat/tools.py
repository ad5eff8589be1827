"""Tools of verl 0.6.1 with verl's texts, the records of calls, and helpers that plug-ins import."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, Literal, NoReturn

from pydantic import BaseModel

from agentrl.clients.http import HttpClient
from agentrl.compat.scoring import FINISHED
from agentrl.errors import ConfigError, ServiceError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins import load_class
from agentrl.plugins.from_verl import VERL_TOOLS, our_names, translate
from agentrl.sandbox import Execution
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.geo3k_tool import Geo3kTool as OwnGeo3kTool
from agentrl.tools.gsm8k_tool import Gsm8kTool as OwnGsm8kTool
from agentrl.tools.image_zoom_in_tool import ImageZoomInTool as OwnImageZoomInTool
from agentrl.tools.mcp_tool import MCPTool
from agentrl.tools.retrieval import Document, ServiceRetriever
from agentrl.tools.sandbox_fusion_tool import SandboxFusionTool as OwnSandboxFusionTool
from agentrl.tools.search_tool import SearchTool as OwnSearchTool

DEFAULT_TIMEOUT = 30
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_NO_QUERIES = "Error: 'query_list' is missing, empty, or not a list in parameters."
_NOT_FINISHED = "no stdout here"
_RESULTS = re.compile(r'"results"\s*:\s*(\[.*?\])', re.DOTALL)
_TITLE = re.compile(r'"title"\s*:')
_QUERY = re.compile(r'query"\s*:\s*"([^"]+)"')


# Records.


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as one of verl's parsers returns it."""

    name: str
    arguments: str
    """JSON."""


class OpenAIFunctionCallSchema(BaseModel):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> "tuple[OpenAIFunctionCallSchema, bool]":
        """Decode a call. Return it, and whether its arguments are no JSON object."""
        try:
            arguments: Any = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_broken = not isinstance(arguments, dict)
        given: dict[str, Any] = {} if is_broken else arguments
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=given), is_broken


class OpenAIFunctionToolCall(BaseModel):
    """A call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


# Tools.


class Gsm8kTool(OwnGsm8kTool):
    """Scores answers to a GSM8K problem."""

    def describe(self, answer: str, number: str, score: float) -> str:
        """Write verl's text for a score; an answer without a number gets 0."""
        reward = score if number else 0
        return f"Current parsed {answer=} {reward=}"


class Geo3kTool(OwnGeo3kTool):
    """Scores answers to a problem of Geometry3K, compared as mathematics (extra `math`)."""

    def describe(self, answer: str, number: str, score: float) -> str:
        """Write verl's text for a score."""
        return f"Current parsed {answer=} reward={score}"


class ImageZoomInTool(OwnImageZoomInTool):
    """Shows a region of an image. The keys of verl's pool of workers have no effect."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(our_names(config, type(self)), tool_schema)


class MCPBaseTool(MCPTool):
    """Calls a tool of an MCP server; subclasses override `_parse_tool_result`."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Call the tool. An error that the server reports is shown to the policy too."""
        text, metadata = self._parse_tool_result(
            list((await self.ask(instance_id, parameters)).content)
        )
        metrics = {
            "query_count": metadata.get("query_count", 0),
            "status": metadata.get("status", "unknown"),
            "total_results": metadata.get("total_results", 0),
        }
        return ToolResult(ToolResponse(text=text), 0.0, metrics)

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Return the text of an answer's parts, and metadata."""
        return " ".join(part.text for part in content if part.type == "text"), {}


class MCPSearchTool(MCPBaseTool):
    """Shows the list `results` of each text of the server's answer."""

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        texts = [part.text.replace("'", '"') for part in content if part.type == "text"]
        found = [match.group(1) for text in texts if (match := _RESULTS.search(text))]
        queries = [match.group(1) if (match := _QUERY.search(text)) else "" for text in texts]
        metadata = {
            "status": "success",
            "queries": queries,
            "query_count": len(queries),
            "total_results": sum(len(_TITLE.findall(text)) for text in texts),
        }
        return "".join(found), metadata


class MCPClientManager:
    """Can be imported; `verl.tools.mcp_base_tool.MCPBaseTool` calls the servers itself."""

    async def call_tool(
        self, tool_name: str, parameters: dict[str, Any], timeout: float
    ) -> NoReturn:
        """Refuse a call.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "agentrl has no MCPClientManager",
            expected="a class that derives from verl.tools.mcp_base_tool.MCPBaseTool and overrides "
            "_parse_tool_result",
        )


ClientManager = MCPClientManager()


class SearchTool(OwnSearchTool):
    """Searches a retrieval service.

    Args:
        config: verl's keys (`retrieval_service_url`, `topk`, `timeout`, `num_workers`), or ours.
        tool_schema: The schema that the policy is shown.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.retrieval_service_url = self._keys.url
        self.topk = self._keys.top_k
        self.timeout = self.config.get("timeout_s", 30)
        self.num_workers = self.config.get("max_concurrency", 120)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Search for every query of the call; a call without queries gets verl's error text."""
        queries = parameters.get("query_list")
        if not queries or not isinstance(queries, list):
            text = json.dumps({"result": _NO_QUERIES})
            return ToolResult(ToolResponse(text=text), 0.0)
        result = await super().execute(instance_id, parameters, **execute_kwargs)
        return result._replace(reward=0.0)

    def render(self, found: Sequence[Sequence[Document]]) -> str:
        """Write the documents as verl does."""
        return _write_documents(found)


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    concurrent_semaphore: Any = None,
    timeout: int = DEFAULT_TIMEOUT,
) -> tuple[str, dict[str, Any]]:
    """Search for several queries, from a thread without an event loop.

    Returns:
        The text for the policy, and `status`, `query_count`, `total_results`, `api_request_error`.
    """

    async def search() -> list[list[Document]]:
        client = HttpClient(retrieval_service_url, headers={}, max_bytes=_MAX_ANSWER_BYTES)
        retriever = ServiceRetriever(client)
        try:
            async with asyncio.timeout(timeout):
                return await retriever.search(query_list, topk)
        finally:
            await retriever.close()

    metadata: dict[str, Any] = {"query_count": len(query_list), "queries": query_list}
    metadata |= {"api_request_error": None, "total_results": 0, "status": "success"}
    with concurrent_semaphore or nullcontext():
        try:
            found = asyncio.run(search())
        except (ServiceError, TimeoutError) as error:
            metadata |= {"status": "api_error", "api_request_error": str(error)}
            return json.dumps({"result": f"Search error: {error}"}, ensure_ascii=False), metadata
    metadata["total_results"] = sum(map(len, found))
    return _write_documents(found), metadata


def _write_documents(found: Sequence[Sequence[Document]]) -> str:
    """Write documents as verl does: whole, titles with their quotes, as JSON."""
    passages: list[str] = []
    for documents in found:
        parts = (document.contents.partition("\n") for document in documents)
        shown = (f"Doc {n} (Title: {t})\n{text}\n\n" for n, (t, _, text) in enumerate(parts, 1))
        passages.append("".join(shown).strip())
    return json.dumps({"result": "\n---\n".join(passages)}, ensure_ascii=False)


class PoolMode(Enum):
    """The mode of verl's pool; here both modes use the event loop."""

    ThreadMode = 1
    ProcessMode = 2


class _Remote:
    """Calls a function directly; verl sends it to a Ray actor."""

    async def remote(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await an async function; run a plain one on a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)


class ExecutionPool:
    """Supports `execution_pool.execute.remote(function, ...)`."""

    def __init__(self) -> None:
        self.execute = _Remote()


def init_execution_pool(*args: Any, **kwargs: Any) -> ExecutionPool:
    """Make a pool; the tool's `max_concurrency` limits the calls that run at once."""
    return ExecutionPool()


class SandboxFusionTool(OwnSandboxFusionTool):
    """Runs programs on a SandboxFusion service.

    Subclasses that run their code by `self.execution_pool.execute.remote(self.execute_code, ...)`
    work without changes.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__({"enable_global_rate_limit": True, **config}, tool_schema)
        self.default_timeout = self._keys.default_timeout
        self.default_language = self._keys.default_language
        self.sandbox_fusion_url = self._keys.sandbox_fusion_url
        self.memory_limit_mb = self._keys.memory_limit_mb
        self.num_workers = self._keys.num_workers
        self.execution_pool = init_execution_pool()

    async def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> ToolResponse:
        """Run a program and return its output."""
        execution = await self.run_program(code, timeout_s=timeout, language=language)
        return ToolResponse(text=self.describe(execution))

    def describe(self, execution: Execution) -> str:
        """Join output and errors; a program that did not end gets a fixed text."""
        if execution.end not in FINISHED:
            return _NOT_FINISHED
        return execution.stdout + execution.stderr


def get_tool_class(cls_name: str) -> type[BaseTool]:
    """Load a tool's class by its path.

    Raises:
        PluginError: for a path that does not lead to a tool.
    """
    return load_class(translate(cls_name, VERL_TOOLS, base="BaseTool"), BaseTool)


# Helpers.


def hf_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Load a tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Load a processor of images; None for a model without one, as in verl."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError, ImportError):
        return None
    return processor if "Processor" in type(processor).__name__ else None


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Append each value to the list under its key."""
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Generator[None]:
    """Do nothing: agentrl records every call anyway."""
    yield
