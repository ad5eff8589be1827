"""Call any endpoint that takes and returns JSON, as a tool: no code, only a YAML.

tools:
- class_name: agentrl.tools.http_tool.HTTPTool
config:
url: https://weather.example/v1/current
method: GET
headers: {Authorization: "Bearer ${oc.env:WEATHER_KEY}"}
response_path: current.summary
tool_schema: {type: function, function: {name: weather, description: ..., parameters: ...}}
"""

from typing import Any, Literal, cast

from pydantic import Field

from agentrl.clients.http import Answer, HttpClient
from agentrl.config.schema.section import Section
from agentrl.errors import ServiceError, ToolError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse, dump_json
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool, refuse_unsendable

MAX_ERROR_CHARACTERS = 2000
"""Characters of the answer that the model is shown if the service refuses a call."""
_INFRASTRUCTURE_STATUSES = (401, 407, 408, 425, 429)
"""Refusals that other arguments cannot fix: credentials, time-outs, the number of calls."""

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class HttpToolConfig(Section):
    """The own keys of `HTTPTool`."""

    url: str = Field(pattern=r"^https?://", repr=False)
    """An address that begins with http:// or https://."""
    method: Method = "POST"
    """GET, POST, PUT, PATCH or DELETE."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Headers of every request, by name."""
    send_arguments: Literal["json", "query"] | None = None
    """json (the body), query, or null: query for GET and DELETE, json for the others."""
    response_path: str | None = Field(default=None, min_length=1)
    """A dotted path into the answer, such as data.items.0.text; null: the whole answer."""
    max_response_bytes: int = Field(default=1024 * 1024, ge=1)
    """Bytes of an answer, at least 1; a longer one is a failed call."""


class HTTPTool(BundledTool):
    """Send a call's arguments to an endpoint, and show the model the answer.

    `config`, in addition to the keys of every tool:

    * `url`: the address. `method`: POST by default.
    * `headers`: by name, secrets from the environment (`${oc.env:NAME}`). They are never shown, not
      even if the endpoint sends them back.
    * `send_arguments`: `json` as the body, `query` in the address; by default what fits the method.
    * `response_path`: the part of the answer that is shown (`data.items.0.text`); all by default.
    * `max_response_bytes`: 1 MiB by default.

    A status of 400 and more is shown to the model, with the beginning of the answer, so that it can
    change its arguments (`ToolError`). Failures that other arguments cannot fix are failures of the
    infrastructure: 401, 407, 408, 425, 429, 500 and more, redirects, broken connections, an answer
    without `response_path`.
    """

    keys_class = HttpToolConfig
    why_inline = "an HTTPTool only waits for others, and blocks nothing"

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        keys: HttpToolConfig = self._keys
        self._client = HttpClient(keys.url, headers=keys.headers, max_bytes=keys.max_response_bytes)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Make the request.

        Raises:
            ToolError: for a status that other arguments may fix, or an answer that is too long.
            ServiceError: for every other failure.
        """
        refuse_unsendable(parameters)
        method, path = self._keys.method, self._keys.response_path
        default = "query" if method in ("GET", "DELETE") else "json"
        if (self._keys.send_arguments or default) == "query":
            answer = await self._client.send(method, query=parameters)
        else:
            answer = await self._client.send(method, body=parameters)
        self._check(answer)
        text = answer.text if path is None else self._pick(answer, path)
        return ToolResult(ToolResponse(text=text), metrics={"status": answer.status})

    async def shutdown(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _check(self, answer: Answer) -> None:
        status = answer.status
        said = answer.text[:MAX_ERROR_CHARACTERS].strip()
        if 400 <= status < 500 and status not in _INFRASTRUCTURE_STATUSES:
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
        """Return the part of an answer at a dotted path."""
        value = answer.json(service=self._client.shown_url)
        for step in path.split("."):
            match value:
                case dict() if step in value:
                    value = cast("dict[str, Any]", value)[step]
                case list() if step.isdecimal() and int(step) < len(cast("list[Any]", value)):
                    value = cast("list[Any]", value)[int(step)]
                case _:
                    url = self._client.shown_url
                    raise ServiceError(
                        f"the answer of {url} has no {step!r}: {answer.text[:200]!r}",
                        service=url,
                        expected=f"response_path {path}",
                    )
        return value if isinstance(value, str) else dump_json(value)
