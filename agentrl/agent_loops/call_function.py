"""A program that calls one agent function: `call_function.py FOLDER module:function < row.json`.

`rollout.agent.isolation: process` runs it for each request. It imports nothing of agentrl, so that
it starts fast; modules are also found in FOLDER. The record has the attributes of
`agentrl.agent_loops.agent_record.AgentRecord`.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any


def make_record(row: dict[str, Any]) -> SimpleNamespace:
    """Make the record from the environment variables and the row."""
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["AGENTRL_API_KEY"]
    anthropic_base_url = os.environ["ANTHROPIC_BASE_URL"]
    return SimpleNamespace(
        base_url=base_url,
        key=key,
        row=row,
        request_id=os.environ["AGENTRL_REQUEST_ID"],
        model=os.environ["AGENTRL_MODEL"],
        anthropic_base_url=anthropic_base_url,
        openai={"base_url": base_url, "api_key": key},
        anthropic={"base_url": anthropic_base_url, "api_key": key},
        environment=dict(os.environ),
    )


def load_function(path: str) -> Any:
    """Load `package.module:function` or `path/to/file.py:function`."""
    module_path, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module_path.endswith(".py"):
        spec = importlib.util.spec_from_file_location("agent", module_path)
        if spec is None or spec.loader is None:
            sys.exit(f"no Python file {module_path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["agent"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_path)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


async def _await(value: Any) -> Any:
    return await value


def report(reward: Any) -> None:
    """Send the reward to the gateway. The output of the function can be too long to hold it."""
    if hasattr(reward, "__float__") and not isinstance(reward, bool | int | float):
        reward = float(reward)  # a number of numpy or torch
    request = urllib.request.Request(
        os.environ["AGENTRL_REWARD_URL"],
        data=json.dumps({"reward": reward}, default=repr).encode(),
        headers={"Authorization": f"Bearer {os.environ['AGENTRL_API_KEY']}"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(request).close()
    except urllib.error.HTTPError as error:
        sys.exit(f"the agent returned the reward {reward!r}: {error.read().decode()}")


def main() -> None:
    """Call the function, and report its reward."""
    record = make_record(json.load(sys.stdin))
    folder, path = sys.argv[1:]
    sys.path[0] = folder  # it was the folder of this file
    returned = load_function(path)(record)
    if inspect.isawaitable(returned):
        returned = asyncio.run(_await(returned))
    reward = returned.get("reward") if isinstance(returned, dict) else returned
    if reward is not None:
        report(reward)


if __name__ == "__main__":
    main()
