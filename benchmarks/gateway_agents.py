"""The agents of `gateway.py`: loops that only send their history, in a process of their own.

Reads a JSON object from standard input, and prints one: the seconds of each call, and the wall time
from the first call to the end of the last.
"""

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp


async def run_agent(
    http: aiohttp.ClientSession, job: dict[str, Any], given: dict[str, Any]
) -> list[float]:
    """Answer each call of the policy by the next observation, until there is none."""
    await asyncio.sleep(job["start_s"])
    url, head = f"{given['base_url']}/chat/completions", {"Authorization": f"Bearer {job['key']}"}
    history: list[dict[str, Any]] = [{"role": "user", "content": job["prompt"]}]
    waiting, seconds = list(job["observations"]), list[float]()
    while True:
        body = {"model": "policy", "messages": history, "tools": given["tools"]}
        started = time.perf_counter()
        async with http.post(url, json=body, headers=head) as response:
            answer = await response.json()
        seconds.append(time.perf_counter() - started)
        if response.status != 200:
            raise RuntimeError(answer)
        message = answer["choices"][0]["message"]
        history.append(message)
        if not waiting:
            return seconds
        call = message["tool_calls"][0]["id"]
        history.append({"role": "tool", "tool_call_id": call, "content": waiting.pop(0)})


async def main() -> None:
    given = json.load(sys.stdin)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        started = time.perf_counter()
        seconds = await asyncio.gather(*(run_agent(http, job, given) for job in given["jobs"]))
        wall_s = time.perf_counter() - started
    print(json.dumps({"seconds": [s for one in seconds for s in one], "wall_s": wall_s}))


if __name__ == "__main__":
    asyncio.run(main())
