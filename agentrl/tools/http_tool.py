"""Any endpoint that takes and gives JSON, as a tool: no code, only a YAML.

tools:
- class_name: agentrl.tools.http_tool.HTTPTool
config:
url: https://weather.example/v1/current
method: GET
headers: {Authorization: "Bearer ${oc.env:WEATHER_KEY}"}
response_path: current.summary
tool_schema: {type: function, function: {name: weather, description: ..., parameters: ...}}
"""

import json
from typing import Any, Literal, cast

from pydantic import Field

from agentrl.clients.http import Answer, HttpClient
from agentrl.config.schema.section import Section
from agentrl.errors import ServiceError, ToolError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.keys import read_keys
from agentrl.tools.arguments import refuse_unsendable
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import SHARED_KEYS, refuse_isolation

MAX_ERROR_CHARACTERS = 2000
"""Of what the service says of a refused call, that the model is shown."""
_NOT_THE_MODELS_FAULT = (401, 407, 408, 425, 429)
"""Refusals that no other arguments can mend: credentials, patience, the number of calls."""

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Place = Literal["json", "query"]


class HttpToolConfig(Section):
    """The keys of an `HTTPTool`'s own."""

    url: str = Field(pattern=r"^https?://", repr=False)
    """An address that begins with http:// or https://."""
    method: Method = "POST"
    """GET, POST, PUT, PATCH or DELETE."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Headers of every request, by name."""
    send_arguments: Place | None = None
    """json (the body), query, or null: query for GET and DELETE, json for the others."""
    response_path: str | None = Field(default=None, min_length=1)
    """A dotted path into the answer, such as data.items.0.text; null: the whole answer."""
    max_response_bytes: int = Field(default=1024 * 1024, ge=1)
    """Bytes of an answer, at least 1; a longer one is a failed call."""


class HTTPTool(BaseTool):
    """Send a call's arguments to an endpoint, and show the model what it answers.

    `config`, beside the keys of every tool:

    * `url`: the address. `method`: POST by default.
    * `headers`: by name, secrets from the environment (`${oc.env:NAME}`); never shown, not even
      where the endpoint sends them back.
    * `send_arguments`: `json` as the body, `query` in the address; what fits the method by default.
    * `response_path`: the part of the answer that is shown (`data.items.0.text`); all by default.
    * `max_response_bytes`: 1 MiB by default.

    A status of 400 and more is shown to the model, which may do better (`ToolError`), with the
    answer's beginning. What other arguments cannot mend is a failure of the infrastructure: 401,
    407, 408, 425, 429, 500 and more, redirects, broken connections, an answer without
    `response_path`.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        keys = read_keys(HttpToolConfig, config, key="config", also_known=SHARED_KEYS)
        refuse_isolation(config, because="an HTTPTool only waits for others, and blocks nothing")
        self._keys = keys
        self._client = HttpClient(keys.url, headers=keys.headers, max_bytes=keys.max_response_bytes)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Make the request.

        Raises:
            ToolError: for a status that other arguments may mend, or an answer that is too long.
            ServiceError: for every other failure.
        """
        refuse_unsendable(parameters)
        answer = await self._ask(parameters)
        self._check(answer)
        text = answer.text
        if self._keys.response_path is not None:
            text = self._pick(answer, self._keys.response_path)
        return ToolResult(ToolResponse(text=text), metrics={"status": answer.status})

    async def shutdown(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _ask(self, parameters: dict[str, Any]) -> Answer:
        method = self._keys.method
        place = self._keys.send_arguments or ("query" if method in ("GET", "DELETE") else "json")
        if place == "query":
            return await self._client.send(method, query=parameters)
        return await self._client.send(method, body=parameters)

    def _check(self, answer: Answer) -> None:
        status = answer.status
        said = answer.text[:MAX_ERROR_CHARACTERS].strip()
        if 400 <= status < 500 and status not in _NOT_THE_MODELS_FAULT:
            raise ToolError(f"Error: the service refused the call with status {status}: {said}")
        if not 200 <= status < 300:
            raise ServiceError(
                f"{self._keys.method} {self._client.shown_url}: status {status}: {said[:200]}",
                service=self._client.shown_url,
                expected="a status from 200 to 299",
            )
        if answer.is_cut:
            raise ToolError(
                f"Error: the answer is longer than {self._keys.max_response_bytes} bytes; "
                "ask for less"
            )

    def _pick(self, answer: Answer, path: str) -> str:
        value = answer.json(service=self._client.shown_url)
        for step in path.split("."):
            value = self._step(value, step, answer)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _step(self, value: Any, step: str, answer: Answer) -> Any:
        if isinstance(value, dict) and step in value:
            return cast("dict[str, Any]", value)[step]
        if isinstance(value, list) and step.isdecimal():
            items = cast("list[Any]", value)
            if int(step) < len(items):
                return items[int(step)]
        raise ServiceError(
            f"the answer of {self._client.shown_url} has no {step!r}: {answer.text[:200]!r}",
            service=self._client.shown_url,
            expected=f"response_path {self._keys.response_path}",
        )
