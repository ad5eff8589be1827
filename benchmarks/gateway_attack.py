"""The hostile bodies of `gateway.py --attack`, and what measures their cost.

The bodies are made and sent by a process of their own, so that its CPU time and its memory are not
those of the gateway.
"""

import asyncio
import ctypes
import gc
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

Make = Callable[[], list[Any]]
CHAT, REWARD = "/chat/completions", "/reward"
USER: dict[str, Any] = {"role": "user", "content": "x"}


class Hold:
    """Measures the longest time for which the event loop's thread computes without a pause."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - before)


def memory_mb() -> float:
    """Return the resident memory of this process, after it gave back what it does not use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _, _, after = Path("/proc/self/status").read_text().partition("VmRSS:")
    return int(after.split()[0]) / 1024


def _calls(number: int, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    made = [{"id": f"c{n}", "type": "function", "function": function} for n in range(number)]
    return {"role": "assistant", "content": None, "tool_calls": made}


def _results(number: int) -> list[Any]:
    return [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(number)][::-1]


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER, *messages], **fields}


def _tools(number: int, properties: dict[str, Any]) -> list[Any]:
    schema = {"type": "object", "properties": properties}
    return [{"function": {"name": f"f{n}", "parameters": schema}} for n in range(number)]


def _properties(number: int) -> dict[str, Any]:
    return {f"p{n}": {"type": "string"} for n in range(number)}


def _deep(levels: int) -> dict[str, Any]:
    return {"a": {"type": "object", "properties": _deep(levels - 1)}} if levels else {}


def _objects(number: int) -> list[Any]:
    return [{"a": 1}] * number


BODIES: dict[str, tuple[str, Make]] = {
    "500,000 messages": (CHAT, lambda: [_chat(*[USER] * 500_000)]),
    "4,000 messages": (CHAT, lambda: [_chat(*[USER] * 4000)]),
    "100,000 calls, results reversed": (
        CHAT,
        lambda: [_chat(_calls(100_000), *_results(100_000))],
    ),
    "1,000 calls, results reversed": (CHAT, lambda: [_chat(_calls(1000), *_results(1000))]),
    "100,000 calls and results": (CHAT, lambda: [_chat(*[_calls(1), *_results(1)] * 50_000)]),
    "20 prompts of 16 MB": (
        CHAT,
        lambda: [_chat(USER | {"content": "\n" * 8_000_000 + str(n)}) for n in range(20)],
    ),
    "20 prompts of 2 MB": (
        CHAT,
        lambda: [_chat(USER | {"content": "\n" * 1_000_000 + str(n)}) for n in range(20)],
    ),
    "a system text of 2 MB of lines": (
        CHAT,
        lambda: [_chat({"role": "system", "content": "\n" * 1_000_000 + str(n)}) for n in range(4)],
    ),
    "2,000 tools": (CHAT, lambda: [_chat(tools=_tools(2000, _properties(2)))]),
    "20,000 tools": (CHAT, lambda: [_chat(tools=_tools(20_000, {}))]),
    "500 tools": (CHAT, lambda: [_chat(tools=_tools(500, _properties(4)))]),
    "20,000 properties": (CHAT, lambda: [_chat(tools=_tools(1, _properties(20_000)))]),
    "a schema of depth 60, 90": (
        CHAT,
        lambda: [_chat(tools=_tools(1, _deep(d))) for d in (60, 90)],
    ),
    "a schema of depth 22": (CHAT, lambda: [_chat(tools=_tools(1, _deep(22)))]),
    "1,000,000 stops": (CHAT, lambda: [_chat(stop=["x"] * 1_000_000)]),
    "a reward of 30 MB": (REWARD, lambda: [{"reward": 1, "a": _objects(3_000_000)}]),
    "a call of 30 MB": (CHAT, lambda: [_chat(metadata=_objects(3_000_000))]),
    "90,000 values": (CHAT, lambda: [_chat(metadata=_objects(40_000))]),
    "arguments of 8 MB": (CHAT, lambda: [_chat(_calls(1, json.dumps({"a": "x" * (8 << 20)})))]),
    "arguments of 1 MB": (CHAT, lambda: [_chat(_calls(1, json.dumps({"a": "x" * 1_000_000})))]),
    "a name of 1 MB": (CHAT, lambda: [_chat(tools=[{"function": {"name": "f" * (1 << 20)}}])]),
}


def post(url: str, key: str, make: Make) -> list[str]:
    """Send bodies from another process, one after another; return the codes of the answers."""
    [name] = [name for name, (_, one) in BODIES.items() if one is make]
    command = [sys.executable, __file__, url, key, name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    """Send the bodies of a name."""
    url, key, name = sys.argv[1:]
    for body in BODIES[name][1]():
        head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(url, json.dumps(body).encode(), head)
        try:
            with urllib.request.urlopen(asked) as response:
                print(response.status)
        except urllib.error.HTTPError as error:
            print(error.code)
        except OSError as error:
            print(type(error).__name__)


if __name__ == "__main__":
    main()
