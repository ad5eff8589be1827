"""An MCP server over stdio that misbehaves where it is told to: `python fakes_mcp_server.py [how]`.

It speaks the protocol by hand, in the standard library alone, so that it starts at once and that
what it sends is known to the byte. Ways to be, by the first argument: `fine`; `mute` (never
answers); `many` (has 1,500 tools); `dead` (leaves at once, with a word on its standard error);
`flaky FILE` (dead until FILE exists, which it makes); `renamed NAME` (its one tool is NAME);
`bad_schema`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WHOLE_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"n": {"type": ["integer", "null"], "default": None}},
    "properties": {
        "z_first": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "array", "items": {}}]},
        "a": {"enum": [None, 1, "x"], "x-ours": {"deep": [None, {}]}},
    },
    "patternProperties": {"^x-": True},
    "additionalProperties": False,
    "required": [],
}  # fmt: skip
ANY = {"type": "object", "additionalProperties": True}


def main(how: str = "fine", *rest: str) -> None:
    print(f"server {how} starts", file=sys.stderr, flush=True)
    match how:
        case "dead":
            raise SystemExit("no licence")
        case "flaky" if not Path(rest[0]).exists():
            Path(rest[0]).touch()
            raise SystemExit("not yet")
    tools = {
        "whole": WHOLE_SCHEMA, "echo": ANY, "wait": ANY, "die": ANY, "fail": ANY, "refuse": ANY,
        "break": ANY, "count": ANY, "noise": ANY, "endless": ANY, "daemon": ANY,
    }  # fmt: skip
    if how == "many":
        tools = {f"tool{n}": ANY for n in range(1500)}
    if how == "renamed":
        tools = {rest[0]: ANY}
    if how == "bad_schema":
        tools = {"bad": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}
    server = Server(tools)
    for line in sys.stdin:
        if how != "mute":
            server.receive(json.loads(line))


class Server:
    """Answers one message at a time, but for waits."""

    def __init__(self, tools: dict[str, dict[str, Any]]) -> None:
        self.tools = tools
        self.count = 0
        self.writing = threading.Lock()

    def receive(self, message: dict[str, Any]) -> None:
        if "id" in message:
            threading.Thread(target=self.answer, args=(message,), daemon=True).start()

    def answer(self, message: dict[str, Any]) -> None:
        parameters = message.get("params") or {}
        match message["method"]:
            case "initialize":
                result = {
                    "protocolVersion": parameters["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "fake", "version": "1"},
                }
            case "tools/list":
                result = self.page(int(parameters.get("cursor", 0)))
            case "tools/call":
                result = self.call(parameters["name"], parameters.get("arguments"))
            case _:
                return self.send(message, error={"code": -32601, "message": "no such method"})
        self.send(message, **result if "error" in result else {"result": result})
        return None

    def page(self, first: int) -> dict[str, Any]:
        """Tools come two by two; many of them in hundreds."""
        size = 2 if len(self.tools) < 100 else 100
        names = list(self.tools)[first : first + size]
        tools = [{"name": name, "inputSchema": self.tools[name]} for name in names]
        more = {"nextCursor": str(first + size)} if first + size < len(self.tools) else {}
        return {"tools": tools, **more}

    def call(self, name: str, arguments: Any) -> dict[str, Any]:
        match name:
            case "wait":
                time.sleep(arguments["s"])
            case "die":
                os._exit(3)
            case "fail":
                return {"content": [{"type": "text", "text": "no luck"}], "isError": True}
            case "refuse":
                return {"error": {"code": -32602, "message": "n must be even"}}
            case "break":
                return {"error": {"code": -32603, "message": "a secret of the server"}}
            case "count":
                self.count += 1
                arguments = {"pid": os.getpid(), "count": self.count}
            case "endless":
                with self.writing:
                    while True:
                        sys.stdout.write("x" * 2**20)
            case "daemon":
                daemon = subprocess.Popen(
                    [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
                )
                arguments = {"pid": daemon.pid}
            case "noise":
                sys.stderr.write("loud " * 100_000)
                sys.stderr.flush()
        return {"content": [{"type": "text", "text": json.dumps(arguments)}]}

    def send(self, message: dict[str, Any], **answer: Any) -> None:
        with self.writing:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
