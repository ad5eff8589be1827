"""The tools of `soak.py`. Their processes import this module, so it imports little."""

import os
import signal
import time
from typing import Any

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.tools import BaseTool


class RiskyTool(BaseTool):
    """Ends each of its methods as it is told; notes in the file `config.log` that it began.

    It runs in a process of its own: what hangs there blocks, and what is killed is gone.
    """

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema."""
        act = {"type": "string"}
        parameters = {"type": "object", "properties": {"act": act}, "required": ["act"]}
        function = {"name": "risky", "description": "Take a risk.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id: str | None = None, act: str = "fine") -> Any:
        """Begin an instance."""
        self._note("c")
        return self._end(act, instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        """Answer, or not."""
        return self._end(parameters["act"], f"took it in {os.getpid()}")

    async def calc_reward(self, instance_id: str, act: str = "fine") -> Any:
        """Judge, or not."""
        return self._end(act, 1.0)

    async def release(self, instance_id: str, act: str = "fine") -> None:
        """End an instance."""
        self._note("r")
        self._end(act, None)

    def _note(self, what: str) -> None:
        log = os.open(self.config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, what.encode())
        os.close(log)

    def _end(self, act: str, value: Any) -> Any:
        match act:
            case "raise":
                raise ValueError("as told")
            case "hang":
                time.sleep(3600)
            case "garbage":
                return object
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return value


class NotesTool(BaseTool):
    """Lives on the event loop beside the other, and knows which of its instances are open."""

    def __init__(self) -> None:
        parameters = {"type": "object", "properties": {}}
        function = {"name": "notes", "description": "Take notes.", "parameters": parameters}
        schema = {"type": "function", "function": function}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.open: set[str] = set()
        self.num_created = 0

    async def create(self, instance_id: str | None = None) -> Any:
        """Open an instance."""
        self.open.add(str(instance_id))
        self.num_created += 1
        return instance_id

    async def release(self, instance_id: str) -> None:
        """Close it."""
        self.open.remove(instance_id)
